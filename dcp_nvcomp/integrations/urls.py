"""dcpz:///path and dcpz+s3://bucket/key: a program that is given such a URL saves and loads through this package.

fsspec imports this module when it first meets such a URL (an entry point names it), which is before stock DCP makes its
writer. The filesystems here are for what programs do there besides: list steps, and remove old ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import fsspec

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.integrations.installing import ours
from dcp_nvcomp.integrations.stock_classes import Kind, add_maker
from dcp_nvcomp.storage.open import MARK, MARKED_PROTOCOLS, is_marked, without_mark


def _make(kind: Kind, path: Any, arguments: Mapping[str, Any]) -> Any:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not is_marked(text):
        return None
    made = ours(kind, without_mark(text), arguments, {})
    if made is None:  # to stock DCP's FileSystemWriter the URL is a local path
        theirs = "FsspecWriter" if kind == "writer" else "FsspecReader"
        raise ConfigurationError(
            "Safetensors, extensions and extension registries are stock DCP's, and cannot be had with a "
            f"{text.partition('://')[0]}:// URL, which asks for this package. Give {theirs} the URL without the mark, "
            f"{without_mark(text)!r}."
        )
    return made


add_maker(_make, is_default=True)


def _marked(protocol: str | None) -> Any:
    """Return fsspec's class for a protocol (None: local paths), as a class that takes URLs with the mark."""
    base: Any = fsspec.get_filesystem_class("file" if protocol is None else protocol)
    mark = MARK if protocol is None else f"{MARK}+{protocol}"

    def _strip_protocol(cls: Any, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return base._strip_protocol(without_mark(os.fspath(path)))

    def unstrip_protocol(self: Any, name: str) -> str:
        return f"{mark}://{self._strip_protocol(name)}"

    def _get_kwargs_from_urls(path: str) -> Any:
        return base._get_kwargs_from_urls(without_mark(path))

    members = {
        "__doc__": f"{base.__name__} for {mark}:// URLs.",
        "__module__": __name__,
        "protocol": mark,
        "_strip_protocol": classmethod(_strip_protocol),
        "unstrip_protocol": unstrip_protocol,
        "_get_kwargs_from_urls": staticmethod(_get_kwargs_from_urls),
    }
    return type(base)(class_name(protocol), (base,), members)


def class_name(protocol: str | None) -> str:
    """Return what the entry point of a protocol calls its class."""
    return f"Marked{(protocol or 'local').capitalize()}"


def __getattr__(name: str) -> Any:
    for protocol in (None, *MARKED_PROTOCOLS):
        if name == class_name(protocol):
            found = globals()[name] = _marked(protocol)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
