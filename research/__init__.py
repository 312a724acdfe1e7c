"""A fixed-budget research loop: try changes of one training script, keep those that are truly better."""
