"""Fixtures of the tests that need ranks."""

from tests.distributed.launch import ranks, single_rank

__all__ = ["ranks", "single_rank"]
