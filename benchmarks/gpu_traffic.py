"""The table of what a batch costs on a GPU, counted from the code: no GPU is needed, and nothing here is a time."""

from __future__ import annotations

from tests.engines.traffic import Traffic, traffic

__all__ = ["gpu_traffic"]

_HEAD = """| bfloat16 weights, `planes-zstd` | read | written | launches | waits |
| --- | ---: | ---: | ---: | ---: |"""


def _row(what: str, count: Traffic) -> str:
    return f"| {what} | {count.read:.2f} | {count.written:.2f} | {count.launches} | {count.waits} |"


def gpu_traffic() -> str:
    """Return the table."""
    encoding, decoding = traffic(check_encodes=True)
    unchecked, _ = traffic(check_encodes=False)
    rows = {"encode, checked": encoding, 'encode, `check_encodes="off"`': unchecked, "decode": decoding}
    return "\n".join([_HEAD, *(_row(what, count) for what, count in rows.items())])
