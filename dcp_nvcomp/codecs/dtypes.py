"""The element types of docs/format.md, as codecs need them. Independent of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElementType:
    """Memory layout of the elements of one dtype."""

    name: str  # PyTorch's name of the dtype, without `torch.`
    nbytes: int  # bytes of one element
    float_nbytes: int = 0  # bytes of each float in it; 0 if it has no float of two bytes or more to split


ELEMENT_TYPES: dict[str, ElementType] = {
    kind.name: kind
    for kind in (
        ElementType("bool", 1),
        ElementType("uint8", 1),
        ElementType("int8", 1),
        ElementType("uint16", 2),
        ElementType("int16", 2),
        ElementType("uint32", 4),
        ElementType("int32", 4),
        ElementType("uint64", 8),
        ElementType("int64", 8),
        ElementType("float4_e2m1fn_x2", 1),
        ElementType("float8_e4m3fn", 1),
        ElementType("float8_e4m3fnuz", 1),
        ElementType("float8_e5m2", 1),
        ElementType("float8_e5m2fnuz", 1),
        ElementType("float8_e8m0fnu", 1),
        ElementType("float16", 2, 2),
        ElementType("bfloat16", 2, 2),
        ElementType("float32", 4, 4),
        ElementType("float64", 8, 8),
        ElementType("complex32", 4, 2),
        ElementType("complex64", 8, 4),
        ElementType("complex128", 16, 8),
    )
}
