"""`dcp-nvcomp info`, `--version` and `--help`: what they say, and that they need no torch."""

from __future__ import annotations

import json
import subprocess
import sys

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


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"dcp-nvcomp {dcp_nvcomp.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "--help"], ["ls", "--help"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom dcp_nvcomp.cli.app import app\n"
        f"try: app({arguments!r})\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'fsspec'} & sys.modules.keys(), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_package_is_imported_lazily() -> None:
    before, after = "assert 'torch' not in sys.modules", "assert 'torch' in sys.modules"
    code = f"import sys, dcp_nvcomp\n{before}\ndcp_nvcomp.NvcompWriter\n{after}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_all_public_names_are_there() -> None:
    for name in dcp_nvcomp.__all__:
        assert getattr(dcp_nvcomp, name) is not None, name
    assert set(dcp_nvcomp.__all__) <= set(dir(dcp_nvcomp))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        dcp_nvcomp.nothing  # noqa: B018
