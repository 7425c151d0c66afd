"""`make demo`: a training job loses two GPUs on the lab; a second run is undisturbed."""
