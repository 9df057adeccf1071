"""Fixtures of the tests that need ranks."""

from .launch import ranks, single_rank

__all__ = ["ranks", "single_rank"]
