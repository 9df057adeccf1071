"""The CUDA engine: nvCOMP, and kernels of our own."""
