"""Engines run codecs: on the CPU everywhere, on NVIDIA GPUs with nvCOMP."""
