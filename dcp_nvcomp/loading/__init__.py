"""A load: metadata -> fetch -> decode -> place."""
