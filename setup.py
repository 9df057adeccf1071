"""Everything is in setup.cfg, but for the compiled kernels, which it has no place for."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # optional: without a C compiler the package is installed all the same and uses numpy, more slowly
        Extension(
            "dcp_nvcomp.codecs._planes", ["dcp_nvcomp/codecs/_planes.c"], extra_compile_args=["-O3"], optional=True
        )
    ]
)
