"""Jobs: observe → plan → apply. The plan is pure; read `plan.py` first."""
