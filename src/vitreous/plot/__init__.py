"""Maps as pictures: colours, overlays, figures."""
