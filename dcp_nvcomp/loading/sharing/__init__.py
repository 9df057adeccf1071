"""Reads that several ranks of a load want alike, made once and exchanged."""
