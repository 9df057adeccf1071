"""Tests of plans that are kept from save to save."""
