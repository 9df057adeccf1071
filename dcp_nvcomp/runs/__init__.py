"""A training run: its checkpoints, what is kept of them, and where they are."""
