"""The golden data files: what their index says of each, and how one more is made.

A file in git is never written again: that today's reader still reads it is what it is there for. `golden/index.json`
names, for each file, the SHA-256 of every record. `write_golden` is called once for each codec that is added.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dcp_nvcomp.codecs import CodecChain
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


def write_golden(name: str, records: list[tuple[dict[str, Any], CodecChain, bytes]]) -> None:
    """Write one more golden file, of records as `write_file` takes them, none in a pack, and add it to the index."""
    path, index = GOLDEN / f"{name}.distcp", json.loads(INDEX.read_text())
    assert not path.exists(), "a golden file is never written again"
    data = write_file(records)
    contents = read_file(data)
    assert [one[4] for one in contents.values()] == [raw for *_, raw in records], "the index is of what was put in"
    path.write_bytes(data)
    index[name] = described(contents)
    lines = [
        f"{json.dumps(one)}: [\n" + ",\n".join(json.dumps(record) for record in index[one]) + "\n]"
        for one in sorted(index)
    ]
    INDEX.write_text("{\n" + ",\n".join(lines) + "\n}\n")
