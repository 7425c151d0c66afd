"""`make demo`: a training job loses two GPUs on the lab; another one loses none."""
