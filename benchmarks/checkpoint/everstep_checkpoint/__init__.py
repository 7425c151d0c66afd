"""What a save costs the step, beside other checkpoint libraries."""
