"""Other libraries: one file for each, none of which is imported before it is used."""
