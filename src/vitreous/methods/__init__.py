"""One method, one file: find it by its name in the folder of its family."""
