"""`.metadata`: written, and read without executing anything."""
