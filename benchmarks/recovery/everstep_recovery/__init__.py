"""What a lost rank costs: time, steps and samples, from the training scripts' own logs."""
