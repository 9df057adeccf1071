"""Everything is in setup.cfg, but for the compiled kernels, which it has no place for."""

from setuptools import Extension, setup

# optional: without a C compiler the package is installed all the same, and is slower
KERNELS = [
    Extension(f"dcp_nvcomp.codecs.{name}", [f"dcp_nvcomp/codecs/{name}.c"], extra_compile_args=["-O3"], optional=True)
    for name in ("_planes", "_literals")
]

setup(ext_modules=KERNELS)
