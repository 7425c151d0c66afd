"""What a save costs the step, compared with other checkpoint libraries."""
