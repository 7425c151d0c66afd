"""One module for each group of commands: it reads, decides in a pure module, and prints."""
