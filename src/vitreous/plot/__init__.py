"""Maps as images: colours, overlays, figures."""
