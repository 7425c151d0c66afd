"""`kubectl everstep`: what happened, what did it cost, is it safe. Standard library only."""
