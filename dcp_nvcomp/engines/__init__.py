"""Where codecs run: on the CPU everywhere, on NVIDIA GPUs with nvCOMP."""
