"""The path that a user takes with a whole model, walked with random weights: the command `rehearsal`."""
