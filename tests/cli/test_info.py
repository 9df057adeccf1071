"""`dcp-nvcomp info`, `--version` and `--help`: what they say, and that they need no torch."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dcp_nvcomp
from dcp_nvcomp.cli.app import app
from dcp_nvcomp.maintenance import environment


def test_info() -> None:
    found = dcp_nvcomp.tools.info()
    assert found.versions["dcp-nvcomp"] == dcp_nvcomp.__version__
    assert found.versions["torch"]
    assert found.cpu.startswith("available")
    assert found.cuda.startswith(("available", "not available: "))
    output = CliRunner().invoke(app, ["info"]).stdout
    assert all(name in output for name in [*found.versions, *found.kernels])
    assert json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout) == found.to_json()


def test_why_a_kernel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dcp_nvcomp.codecs.coders._literals", None)
    assert environment.info().kernels["literals kernel"].startswith("not compiled, so numpy and libzstd do its work")


def test_every_kernel_that_is_built_is_listed() -> None:
    setup = (Path(dcp_nvcomp.__file__).parents[1] / "setup.py").read_text()
    built = re.findall(r'^    "(dcp_nvcomp[.\w]+)",$', setup, re.MULTILINE)
    assert sorted(built) == sorted(environment._KERNELS.values())


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"dcp-nvcomp {dcp_nvcomp.__version__}\n")


def test_all_public_names_are_there() -> None:
    for name in dcp_nvcomp.__all__:
        assert getattr(dcp_nvcomp, name) is not None, name
    assert set(dcp_nvcomp.__all__) <= set(dir(dcp_nvcomp))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        dcp_nvcomp.nothing  # noqa: B018
