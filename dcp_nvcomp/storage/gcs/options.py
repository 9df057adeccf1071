"""The options of `gs://` and `gcs://`: those that gcsfs takes, so that a URL and its options serve both.

URL, options, fsspec's config files -> bucket, prefix, length of parts, options of gcsfs
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import fsspec.config

from dcp_nvcomp.calls.unknown_options import unknown_option
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.storage.remote import option_nbytes

GCS: Final = ("gs", "gcs")
PART_MULTIPLE: Final = 256 << 10  # all parts of an upload but the last are multiples of it

_PART_NBYTES: Final = 16 << 20
_CLIENT: Final = (
    *("project", "access", "token", "requester_pays", "endpoint_url", "session_kwargs", "requests_timeout"),
    *("consistency", "cache_timeout", "timeout", "default_location", "version_aware", "skip_instance_cache"),
    *("use_listings_cache", "listings_expiry_time", "max_paths"),
)
_PART: Final = ("default_block_size", "block_size")
_URL: Final = re.compile(r"[A-Za-z]+://(?P<bucket>[^/]+)(?:/(?P<prefix>.*))?", re.DOTALL)


@dataclass(frozen=True)
class GcsPlace:
    """Where a checkpoint is, and how to get there.

    Attributes:
        bucket: its name.
        prefix: its objects' beginning.
        part_nbytes: how long the parts of an upload are.
        client: options of gcsfs; they hold secrets.
    """

    bucket: str
    prefix: str
    part_nbytes: int
    client: Mapping[str, Any]


def gcs_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> GcsPlace:
    """Return where a URL leads."""
    options = {**fsspec.config.conf.get("gcs", {}), **fsspec.config.conf.get("gs", {}), **options}
    known = (*_CLIENT, *_PART)
    for option in sorted(options.keys() - set(known)):
        close = difflib.get_close_matches(option, [*known_options, *known], n=1, cutoff=0.75)
        raise unknown_option(option, close, call=known_options, storage="gs://", takes=known)
    match = _URL.fullmatch(path)
    if match is None:
        raise ConfigurationError("A URL of Google Cloud Storage is gs://bucket/path.", path=path)
    nbytes = option_nbytes(options, *_PART) or _PART_NBYTES
    if nbytes < PART_MULTIPLE:
        raise ConfigurationError(f"default_block_size must be at least {PART_MULTIPLE}, Google's smallest part.")
    client = {name: value for name, value in options.items() if name in _CLIENT}
    _check_client(client)
    return GcsPlace(match["bucket"], (match["prefix"] or "").strip("/"), nbytes - nbytes % PART_MULTIPLE, client)


def _check_client(options: Mapping[str, Any]) -> None:
    """Refuse what gcsfs would take for something else, and find out by asking Google."""
    endpoint, token = options.get("endpoint_url"), options.get("token")
    if endpoint and not str(endpoint).startswith(("http://", "https://")):
        raise ConfigurationError("endpoint_url= must begin with http:// or https://.")
    if isinstance(token, str) and token.endswith(".json") and not os.path.exists(token):
        raise ConfigurationError("token= is the name of a JSON file, but there is no such file. A ~ is not expanded.")


def gcs_url(path: str) -> str:
    """Return one URL for a place however it is written, to compare places."""
    match = _URL.fullmatch(path)
    return path if match is None else f"gs://{match['bucket']}/{(match['prefix'] or '').strip('/')}".rstrip("/")
