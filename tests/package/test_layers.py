"""Imports between the rooms of the package point one way."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import dcp_nvcomp

PACKAGE = Path(dcp_nvcomp.__file__).parent

# A room may import those of the lines below its own, and itself.
LAYERS = (
    ("__main__",),
    ("cli", "integrations"),
    ("tools",),
    ("runs", "advising"),
    ("maintenance", "conversion", "reporting"),
    ("one_file",),
    ("streams",),
    ("reading",),
    ("saving", "loading"),
    ("format",),
    ("engines", "storage"),
    ("calls", "codecs", "options"),
    ("errors",),
    ("redaction", "version", "lazy_names"),
)
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


@cache
def imports(path: Path) -> list[str]:
    """Dotted names of what a module imports, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_imports_point_one_way() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        here, *_ = parts = path.relative_to(PACKAGE).with_suffix("").parts
        for name in imports(path) if here != "__init__" else []:
            package, _, rest = name.partition(".")
            there = rest.partition(".")[0]
            if package == "dcp_nvcomp" and here != there and LEVELS[there] <= LEVELS[here]:
                found.append(f"{'/'.join(parts)} imports {name}")
    assert found == []


def test_every_room_has_a_level() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(LEVELS)


def test_no_room_is_named_like_a_public_function() -> None:
    assert not set(LEVELS) & set(dcp_nvcomp.__all__) - {"codecs", "errors", "runs", "tools"}


def test_one_module_imports_fsspec_and_one_the_gpu_libraries() -> None:
    importers: dict[str, set[str]] = {"fsspec": set(), "cupy": set(), "nvidia": set()}
    for path in PACKAGE.rglob("*.py"):
        for name in imports(path):
            if name.split(".")[0] in importers:
                importers[name.split(".")[0]].add(path.relative_to(PACKAGE).parts[0])
    assert importers["fsspec"] == {"storage", "integrations"}  # the second for its own URLs
    assert importers["cupy"] | importers["nvidia"] <= {"engines"}
