"""Verify checkpoints."""
