"""Imports between the rooms of the package point one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dcp_nvcomp

PACKAGE = Path(dcp_nvcomp.__file__).parent

# A room may import those of the lines below its own, and itself.
LAYERS = (
    ("__main__",),
    ("cli", "integrations"),
    ("tools",),
    ("runs", "advising"),
    ("maintenance", "conversion", "one_file", "reporting"),
    ("reading",),
    ("saving", "loading"),
    ("format",),
    ("engines", "storage"),
    ("calls", "codecs", "options"),
    ("errors",),
    ("redaction", "version", "lazy_names"),
)
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def imports(path: Path) -> Iterator[str]:
    """Dotted names of the package's own modules that a module imports, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dcp_nvcomp"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module and node.module.split(".")[0] == "dcp_nvcomp":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(dotted: str) -> str:
    return dotted.split(".")[1]


def upward_imports() -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        for name in imports(path):
            here, there = parts[0], room_of(name)
            if here != there and LEVELS[there] <= LEVELS[here]:
                found.append(f"{'/'.join(parts)} imports {name}")
    return found


def test_imports_point_one_way() -> None:
    assert upward_imports() == []


def test_every_room_has_a_level() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(LEVELS)


def test_no_room_is_named_like_a_public_function() -> None:
    assert not set(LEVELS) & set(dcp_nvcomp.__all__) - {"codecs", "errors", "runs", "tools"}


def test_one_module_imports_fsspec_and_one_the_gpu_libraries() -> None:
    importers: dict[str, set[str]] = {"fsspec": set(), "cupy": set(), "nvidia": set()}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.split(".")[0] in importers:
                    importers[name.split(".")[0]].add(path.relative_to(PACKAGE).parts[0])
    assert importers["fsspec"] == {"storage", "integrations"}  # the second for its own URLs
    assert importers["cupy"] | importers["nvidia"] <= {"engines"}
