"""How much training is left with a fault every few seconds, from the training scripts' own logs."""
