"""One module for each group of commands: read, decide in a pure module, show."""
