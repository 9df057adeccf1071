"""Checksums of values, by which ranks find out whether theirs are the same.

What its bytes do not show, as an object whose pickle depends on more than its value, counts by its class alone; of
large tensors a sample counts.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import pathlib
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from crc32c import crc32c
from torch.distributed.tensor import DTensor

from dcp_nvcomp.calls.values import PLAIN_TENSORS
from dcp_nvcomp.saving.encode.objects import is_sharded_tensor, is_whole

_WHOLE_NBYTES: Final = 1 << 16
_SAMPLED: Final = 2048  # elements of a larger tensor, evenly spread
_MOST_ITEMS: Final = 1000  # of a container; of a longer list a sample, of other ones the length
_MOST_DEPTH: Final = 8
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)

# Their text is their value.
_TEXTS: Final = (
    *(range, decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
)
_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)


def fingerprints(state: Mapping[str, Any]) -> dict[str, int]:
    """Return a checksum for each value that is not sharded."""
    found: dict[str, int] = {}
    waiting: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    with torch.no_grad():
        for key, value in state.items():
            kind = type(value)
            if (
                isinstance(value, DTensor)
                or hasattr(kind, "__create_write_items__")
                or kind.__name__ == "ShardedTensor"
            ):
                continue
            found[key] = crc32c(_encoded(value))
            sample = _sample(value) if isinstance(value, torch.Tensor) and value.device.type != "cpu" else None
            if sample is not None:
                waiting.setdefault(value.device, []).append((key, sample))
        for samples in waiting.values():
            data, begin = torch.cat([sample for _, sample in samples]).cpu().numpy(), 0  # one copy for all
            for key, sample in samples:
                found[key] = crc32c(data[begin : begin + len(sample)].tobytes(), found[key])
                begin += len(sample)
    return found


def _encoded(value: Any, depth: int = 0) -> bytes:
    """Return bytes that are the same for equal values, whatever order a dict or set has; of other objects the class."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        described = f"{value.dtype}{tuple(value.shape)}".encode()
        if kind not in PLAIN_TENSORS:
            if is_sharded_tensor(value) or not is_whole(value):
                return described  # an object with a shard is refused when it is saved
            if isinstance(value, DTensor):
                value = value.to_local()  # what is run on the whole could wait for other ranks
        sample = _sample(value) if value.device.type == "cpu" else None
        return described + (b"" if sample is None else sample.numpy().tobytes())
    if kind is int:  # of any size: repr refuses long ones
        return b"int:" + int(value).to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if kind in _PLAIN or isinstance(value, np.generic):
        return f"{kind.__name__}:{value!r}".encode(errors="surrogatepass")
    name = f"{kind.__module__}.{kind.__qualname__}".encode()
    if depth == _MOST_DEPTH:
        return name
    if kind is np.ndarray and not value.dtype.hasobject:
        step = 1 if value.nbytes <= _WHOLE_NBYTES else 1 + value.size // _SAMPLED
        return f"{value.dtype.str}{value.shape}".encode() + bytes(value.flat[::step].tobytes())
    if kind is bytearray:
        return name + bytes(value)
    if isinstance(value, enum.Enum):
        return name + value.name.encode(errors="surrogatepass")
    if kind in _TEXTS or isinstance(value, pathlib.PurePath):
        return name + str(value).encode(errors="surrogatepass")
    if kind is slice:
        return name + _encoded((value.start, value.stop, value.step), depth + 1)
    if kind in (list, tuple, deque) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        some = itertools.islice(value, 0, None, 1 + len(value) // _MOST_ITEMS)
        longest = str(value.maxlen).encode() if kind is deque else b""
        return name + longest + _joined(len(value), (_encoded(one, depth + 1) for one in some))
    if kind in (*_DICTS, set, frozenset):
        if len(value) > _MOST_ITEMS:
            return name + str(len(value)).encode()
        items = value.items() if isinstance(value, dict) else value
        return name + _joined(len(value), sorted(_encoded(one, depth + 1) for one in items))
    if dataclasses.is_dataclass(kind):
        fields = [getattr(value, field.name, None) for field in dataclasses.fields(value) if field.compare]
        return name + _joined(len(fields), (_encoded(one, depth + 1) for one in fields))
    return name


def _joined(count: int, parts: Iterable[bytes]) -> bytes:
    return b"%d" % count + b"".join(b"[%d]" % len(part) + part for part in parts)


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of a tensor, or of some of its elements; None if it has none that can be had so."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    try:
        step = 1 if tensor.nbytes <= _WHOLE_NBYTES else tensor.numel() // _SAMPLED
        if step == 1 or tensor.is_contiguous():
            some = tensor.detach().reshape(-1)[::step]
        else:
            some = torch.take(tensor.detach(), torch.arange(0, tensor.numel(), step, device=tensor.device))
        return some.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    except (RuntimeError, TypeError, NotImplementedError):  # a dtype, or a subclass, that can't do it
        return None
