"""The oldest versions of the storages' packages that work here.

Those of setup.cfg, which an installer obeys; but a later installation of something else may bring an older one, as
resolvers take s3fs 0.4 where a new boto3 is wanted beside it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import Final

from dcp_nvcomp.errors import ConfigurationError

LOWEST: Final = {
    "fsspec": "2024.3.1",
    "s3fs": "2024.3.1",
    "gcsfs": "2024.3.1",
    "obstore": "0.11.1",
    "asyncssh": "2.18",
    "smbprotocol": "1.12",
}


def refuse_old(package: str, needed_for: str) -> None:
    """Raise if a package is installed in a version that is too old; do nothing if it is not installed."""
    installed = _installed(package)
    if installed is not None and _parts(installed) < _parts(LOWEST[package]):
        raise ConfigurationError(
            f"{package} {installed} is too old for {needed_for}, which needs {LOWEST[package]} or newer: "
            f"pip install '{package}>={LOWEST[package]}'."
        )


@functools.cache
def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]+", version)[:3]]
