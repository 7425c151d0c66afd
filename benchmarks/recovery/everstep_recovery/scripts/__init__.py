"""What runs in the training processes."""
