"""The lowest versions of what the package needs: setup.cfg has them, and what says so at run time agrees."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.storage import open as opening
from dcp_nvcomp.storage.open import LOWEST, open_filesystem
from tests.package.lowest import lowest_versions

ROOT = Path(__file__).parents[2]
# nvCOMP and CuPy are for a GPU, which decides on their versions
WITHOUT_BOUND = re.compile(r"nvidia-|cupy-")


def test_every_dependency_has_a_lowest_version() -> None:
    found = lowest_versions(ROOT / "setup.cfg")
    assert {"torch", "numpy", "fsspec", "s3fs", "gcsfs", "obstore", "asyncssh", "smbprotocol", "matplotlib"} <= set(
        found
    )
    assert [name for name, version in found.items() if version is None and not WITHOUT_BOUND.match(name)] == []


def test_messages_name_the_same_versions() -> None:
    found = lowest_versions(ROOT / "setup.cfg")
    assert {name: found[name] for name in LOWEST} == LOWEST


@pytest.mark.parametrize(
    ("url", "package", "version"),
    [
        ("s3://bucket/x", "s3fs", "0.4.2"),
        ("s3://bucket/x", "fsspec", "2023.12.2"),
        ("gs://bucket/x", "gcsfs", "2021.4.0"),
        ("az://container/x", "obstore", "0.9.2"),
        ("sftp://host/x", "asyncssh", "1.0.0"),
        ("smb://host/share/x", "smbprotocol", "0.2.0"),
        ("memory://x", "fsspec", "0.9.0"),
    ],
)
def test_an_old_package_is_named(url: str, package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        return version if name == package else "9999.1"

    monkeypatch.setattr(importlib.metadata, "version", installed)
    opening._installed.cache_clear()
    try:
        with pytest.raises(ConfigurationError) as caught:
            open_filesystem(url, storage_options={"endpoint_url": "http://127.0.0.1:1"})
    finally:
        opening._installed.cache_clear()
    lowest = LOWEST[package]
    assert str(caught.value).startswith(f"{package} {version} is too old for {url.partition('/')[0]}//, which needs ")
    assert f"pip install '{package}>={lowest}'" in str(caught.value)


def test_versions_are_compared_as_numbers() -> None:
    assert opening._parts("2024.10.0") > opening._parts("2024.9.0.post1")
    assert opening._parts("2.9.post0") < opening._parts("2.10")
