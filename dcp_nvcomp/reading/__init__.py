"""Reading parts of a checkpoint without a job: one tensor, some rows, or a whole module."""
