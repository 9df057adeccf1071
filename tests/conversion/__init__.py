"""Tests of conversion between formats."""
