"""Inspect, recover and clean checkpoints."""
