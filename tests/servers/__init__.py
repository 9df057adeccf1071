"""Servers that tests start for themselves, on 127.0.0.1 only: each can be killed and started again with its data."""
