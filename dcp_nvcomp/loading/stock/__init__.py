"""Checkpoints that stock DCP wrote."""
