"""The table of what a batch costs on a GPU, counted from the code: no GPU is needed, and nothing here is a time."""

from __future__ import annotations

from tests.engines.traffic import Traffic, traffic

__all__ = ["gpu_traffic"]

_HEAD = """| bfloat16 weights, `planes-zstd` | read | written | launches | calls of nvCOMP | waits |
| --- | ---: | ---: | ---: | ---: | ---: |"""
_NAMES = {"nvcomp": "nvCOMP", "literals": "our kernels"}


def _row(what: str, count: Traffic) -> str:
    counts = f"{count.launches} | {count.nvcomp_calls} | {count.waits}"
    return f"| {what} | {count.read:.2f} | {count.written:.2f} | {counts} |"


def gpu_traffic() -> str:
    """Return the table."""
    encodes, decodes = [], []
    for zstd, name in _NAMES.items():
        checked, decoding = traffic(zstd, check_encodes=True)
        encodes += [
            _row(f"encode, {name}, checked", checked),
            _row(f'encode, {name}, `check_encodes="off"`', traffic(zstd, check_encodes=False)[0]),
        ]
        decodes.append(_row(f"decode, {name}", decoding))
    return "\n".join([_HEAD, *encodes, *decodes])
