"""Formats that a conversion reads."""
