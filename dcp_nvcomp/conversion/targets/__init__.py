"""Formats that a conversion writes."""
