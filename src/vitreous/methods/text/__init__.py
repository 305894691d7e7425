"""Methods for models that compare images with texts; they take any other target too."""
