"""Everything is in setup.cfg, but for the compiled kernels, which it has no place for."""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

KERNELS = (
    "dcp_nvcomp.codecs.transforms._planes",
    "dcp_nvcomp.codecs.transforms._rowcol",
    "dcp_nvcomp.codecs.transforms._derived",
    "dcp_nvcomp.codecs.coders._literals",
    "dcp_nvcomp.codecs._planes_literals",
)
HEADERS = sorted(str(header) for header in Path("dcp_nvcomp", "codecs").rglob("*.h"))

# The buffer interface is part of the stable ABI from Python 3.11 on: what is built there runs on all later ones.
# Free-threaded Pythons have no stable ABI.
STABLE_ABI = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
MACROS = [("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else []


def kernel(name: str) -> Extension:
    """Describe one compiled kernel."""
    source = Path(*name.split(".")).with_suffix(".c")
    # optional: without a C compiler the package is installed all the same, and is slower
    return Extension(
        name,
        [str(source)],
        depends=HEADERS,
        define_macros=MACROS,
        py_limited_api=STABLE_ABI,
        extra_compile_args=["-O3"],
        optional=True,
    )


setup(
    ext_modules=[kernel(name) for name in KERNELS],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
