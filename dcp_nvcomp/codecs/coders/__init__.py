"""Entropy coders: what happens to the slices of a plane."""
