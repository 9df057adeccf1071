"""Asynchronous saves: the caller waits until its state is staged, not until it is written."""
