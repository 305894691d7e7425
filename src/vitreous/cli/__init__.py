"""The command line: thin commands over the library. Nothing heavy is imported before a command runs."""
