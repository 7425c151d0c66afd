"""How much training is left under a fault every few seconds, from the training scripts' own logs."""
