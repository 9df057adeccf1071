"""Tests of reading parts of checkpoints."""
