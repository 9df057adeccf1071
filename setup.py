"""Everything is in setup.cfg, but for the compiled kernels, which it has no place for."""

from pathlib import Path

from setuptools import Extension, setup

KERNELS = ("dcp_nvcomp.codecs.transforms._planes", "dcp_nvcomp.codecs.coders._literals")


def kernel(name: str) -> Extension:
    """Describe one compiled kernel."""
    source = Path(*name.split("."))
    headers = [str(header) for header in source.parent.glob(f"{source.name}_*.h")]
    # optional: without a C compiler the package is installed all the same, and is slower
    return Extension(name, [f"{source}.c"], depends=headers, extra_compile_args=["-O3"], optional=True)


setup(ext_modules=[kernel(name) for name in KERNELS])
