"""The documents: what they show runs, and what they link to is there."""
