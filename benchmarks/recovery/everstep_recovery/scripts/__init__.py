"""The scripts that run in the training processes."""
