"""The cost of an undisturbed step, compared with the same loop under stock DDP."""
