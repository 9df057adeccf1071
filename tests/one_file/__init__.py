"""Tests of single compressed files."""
