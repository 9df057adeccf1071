"""The CUDA engine: nvCOMP, and the kernels of kernels.cu."""
