"""Hub folders: where the model's files lie, how a repository is assembled, what its card says."""
