"""The cost of an undisturbed step, paired with the same loop under stock DDP."""
