"""What the site shows that nobody wrote by hand: pages of declarations, figures, tables, the tutorial's pictures."""
