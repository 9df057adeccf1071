"""Writes the golden data files that do not exist yet: `python -m tests.format.make_golden`.

A file in git is never written again: that today's reader still reads it is what it is there for. `golden/index.json`
names, for each file, the SHA-256 of every record.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.format.golden_files import NAMES, records
from tests.format.library import Contents, read_file, write_file

GOLDEN = Path(__file__).parent / "golden"
INDEX = GOLDEN / "index.json"


def described(contents: Contents) -> list[dict[str, Any]]:
    """What the index says of a file."""
    return [
        {
            "fqn": fqn,
            "offsets": list(offsets),
            "kind": kind,
            "dtype": dtype,
            "shape": list(shape),
            "global_shape": list(global_shape),
            "sha256": hashlib.sha256(elements).hexdigest(),
        }
        for (fqn, offsets), (kind, dtype, shape, global_shape, elements) in contents.items()
    ]


def expected(made: list[Any]) -> dict[tuple[str, tuple[int, ...]], bytes]:
    """What was put in, so that the index is not made from what came out."""
    inputs: dict[tuple[str, tuple[int, ...]], bytes] = {}
    for row, _, raw in made:
        if row.get("kind") == "pack":
            continue
        if "pack" in row:
            holder, start = row["pack"]
            count = 1
            for size in row["shape"]:
                count *= size
            pack_row, _, pack_raw = made[holder]
            nbytes = len(pack_raw) // pack_row["shape"][0]
            raw = pack_raw[start * nbytes : (start + count) * nbytes]
        inputs[row["fqn"], tuple(row.get("offsets", [0] * len(row["shape"])))] = raw
    return inputs


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    index = json.loads(INDEX.read_text()) if INDEX.exists() else {}
    for name in NAMES:
        path = GOLDEN / f"{name}.distcp"
        if path.exists():
            continue
        made = records(name)
        data = write_file(made, align=name == "aligned")
        contents = read_file(data)
        assert {key: value[4] for key, value in contents.items()} == expected(made), name
        path.write_bytes(data)
        index[name] = described(contents)
        print(path, len(data))
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(record) for record in index[name]) + "\n]"
        for name in sorted(index)
    ]
    INDEX.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
