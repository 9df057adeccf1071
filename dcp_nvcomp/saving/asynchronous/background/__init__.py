"""A process of our own that encodes and writes what training copied for it, with the cores that training leaves."""
