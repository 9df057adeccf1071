"""The CUDA engine: nvCOMP, and our own kernels (kernels/)."""
