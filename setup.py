"""Everything is in setup.cfg, but for the compiled kernels, which it has no place for."""

from pathlib import Path

from setuptools import Extension, setup

KERNELS = (
    "dcp_nvcomp.codecs.transforms._planes",
    "dcp_nvcomp.codecs.coders._literals",
    "dcp_nvcomp.codecs._planes_literals",
)
HEADERS = sorted(str(header) for header in Path("dcp_nvcomp", "codecs").rglob("*.h"))


def kernel(name: str) -> Extension:
    """Describe one compiled kernel."""
    source = Path(*name.split(".")).with_suffix(".c")
    # optional: without a C compiler the package is installed all the same, and is slower
    return Extension(name, [str(source)], depends=HEADERS, extra_compile_args=["-O3"], optional=True)


setup(ext_modules=[kernel(name) for name in KERNELS])
