"""A save from the staged file to its commit, and back: parts, manifest, restore, retention."""
