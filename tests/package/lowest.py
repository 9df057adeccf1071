"""The lowest versions that setup.cfg allows, as pip's constraints: `python -m tests.package.lowest > constraints.txt`.

They are written down in setup.cfg alone.
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["lowest_versions"]

# Extras that users install. Those of developers take the newest.
EXTRAS = ("azure", "gcs", "s3", "sftp", "smb", "plot", "cu12", "cu13")


def _requirements(path: Path) -> Iterator[str]:
    config = configparser.ConfigParser()
    config.read(path)
    texts = [config["options"]["install_requires"], *(config["options.extras_require"][extra] for extra in EXTRAS)]
    for text in texts:
        yield from filter(None, map(str.strip, text.splitlines()))


def lowest_versions(path: Path) -> dict[str, str | None]:
    """Return the lowest version of each package that users need, by name; None if any will do.

    Args:
        path: of setup.cfg.
    """
    found: dict[str, str | None] = {}
    for requirement in _requirements(path):
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?[^;]*?(?:>=\s*([0-9][^\s,;]*))?(?:[\s,;]|$)", requirement)
        assert match is not None, requirement
        found[match[1]] = match[2]
    return found


if __name__ == "__main__":
    # torch is what the Makefile says
    pins = {name: version for name, version in lowest_versions(Path("setup.cfg")).items() if name != "torch"}
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in pins.items() if version and "nvidia" not in name)
