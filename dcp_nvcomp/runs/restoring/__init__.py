"""A run's way back: which step is the newest, and for each of its files the nearest copy."""
