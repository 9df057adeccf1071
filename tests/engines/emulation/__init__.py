"""CUDA kernels on a CPU, each thread of the GPU a fiber: fast, or under ThreadSanitizer. See emulation.hpp."""
