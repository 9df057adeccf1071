"""Conversion between checkpoint formats, streamed a piece at a time."""
