"""Methods that change the image and look what happens."""
