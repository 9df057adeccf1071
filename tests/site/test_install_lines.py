"""What the pages say of installing works as it is written: nothing is released, so it is done in a clone."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE = re.compile(r"(?:python -m )?pip install [^#`\n]*[^#`\s]")
OURS = re.compile(r"pip install (?:\.|'\.\[([a-z0-9,]+)\]')")
# Of other packages, which an index has.
OTHERS = {"pip install 'smbprotocol[kerberos]'"}


def lines() -> dict[str, list[str]]:
    """Return each distinct line that installs something, and the pages that have it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for line in LINE.findall(page.read_text()):
            found.setdefault(line, []).append(str(page.relative_to(ROOT)))
    return found


def test_lines_are_of_one_form() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = set(config["options.extras_require"])
    found = lines()
    assert {"pip install .", "pip install '.[s3]'", "pip install '.[cu13]'"} <= found.keys()
    for line, pages in found.items():
        match = OURS.fullmatch(line)
        assert match or line in OTHERS, f"{pages}: {line}"
        if match and match[1]:
            assert set(match[1].split(",")) <= extras, f"{pages}: {line}"


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_line_works_in_an_empty_environment(tmp_path: Path) -> None:
    """Only torch is there before, for which a test should not download gigabytes of CUDA."""
    clone = tmp_path / "clone"
    tracked = _run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    _run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    install = (python, "-m", "pip", "install", "--disable-pip-version-check")
    _run(*install, "--quiet", "--upgrade", "pip", cwd=clone)
    _run(*install, "--quiet", "torch==2.13.0", cwd=clone)
    for line in lines():
        if "kerberos" in line and shutil.which("krb5-config") is None:  # the page says that it is needed
            continue
        what = line.removeprefix("pip install ").strip("'")
        assert "Would install" in _run(*install, "--dry-run", what, cwd=clone), line
    _run(*install, "--quiet", ".", cwd=clone)
    assert "Would install" in _run(*install, "--dry-run", "dcp-nvcomp[s3]", cwd=tmp_path)  # as messages advise
    assert '"torch": "2.13.0' in _run(python.with_name("dcp-nvcomp"), "info", "--json", cwd=tmp_path)
