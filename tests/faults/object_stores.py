"""Object stores behind a proxy that makes faults: S3 (moto, and a real server), Azure and Google Cloud Storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter, errors
from dcp_nvcomp.storage.attempts import Attempts
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import load
from tests.states import State, assert_same

from .proxy import FaultProxy

PART_NBYTES = 5 << 20


Request = dict[str, Any]  # how it looks on the wire: its method, and what is in its address


def _request(method: str, path: str) -> Request:
    return {"method": method, "path": path}


@dataclass(frozen=True)
class Requests:
    part: Request
    publish: Request
    complete: Request
    look: str  # in the address of a GET of what was published


_PUT = _request("PUT", "/.metadata")
_PART = _request("PUT", "upload_id=")  # to Google Cloud, of which the last one completes the upload
S3 = Requests(_request("PUT", "partNumber="), _PUT, _request("POST", "uploadId="), "/.metadata")
AZURE = Requests(_request("PUT", "comp=block"), _PUT, _request("PUT", "comp=blocklist"), "/.metadata")
GCS = Requests(_PART, _request("POST", "ifGenerationMatch"), _PART, ".metadata?alt=media")
STORES = {
    "moto": (S3, "s3_store", pytest.mark.s3),
    "real": (S3, "real_s3_store", pytest.mark.s3),
    "azure": (AZURE, "azure_store", pytest.mark.azure),
    "gcs": (GCS, "gcs_store", pytest.mark.gcs),
}


def on(*names: str, more: tuple[Any, ...] = ()) -> list[Any]:
    """Parameters for some stores, each with its marker."""
    return [pytest.param(name, *more, marks=STORES[name][2]) for name in names]


@dataclass
class Wire:
    """A fresh directory on a server, and the proxy before it."""

    proxy: FaultProxy
    url: str
    direct: dict[str, Any]  # options without the proxy
    options: dict[str, Any]
    requests: Requests
    elements: int  # of the largest tensor

    def state(self, seed: int) -> State:
        """Return tensors filled with the seed."""
        return {"w": torch.full((self.elements,), float(seed)), "small": torch.full((5,), seed), "seed": seed}

    def writer(self, *, deadline: float = 30, direct: bool = False, **options: Any) -> NvcompWriter:
        given = {"thread_count": 1, "codec": "none", "storage_deadline_seconds": deadline, **options}
        return NvcompWriter(self.url, **given, **(self.direct if direct else self.options))

    def save(self, seed: int, writer: NvcompWriter | None = None, **options: Any) -> errors.CheckpointError | None:
        """Save, and return the error of this package that it failed with."""
        try:
            dcp.save(self.state(seed), storage_writer=writer or self.writer(**options), no_dist=True)
        except dcp.CheckpointException as error:
            cause = cause_of(error)
            assert isinstance(cause, errors.CheckpointError), cause
            return cause
        return None

    def load(self, *, direct: bool = False, deadline: float = 30) -> int:
        """Load, make sure that all is of one save, and return its seed."""
        options = self.direct if direct else self.options
        found = load(self.url, self.state(-1), storage_deadline_seconds=deadline, **options)
        assert_same(found, self.state(int(found["seed"])))
        return int(found["seed"])

    def found(self) -> int:
        """Load without the proxy, and make sure that nothing is there but what was loaded."""
        filesystem = self.filesystem(direct=True)
        assert len(filesystem.list_names()) == 3 and filesystem.list_uploads() == []
        return self.load(direct=True)

    def filesystem(self, *, direct: bool = False, deadline: float = 30) -> Filesystem:
        options = self.direct if direct else self.options
        return open_filesystem(self.url, storage_options=options, deadline_seconds=deadline)


def cause_of(error: Exception) -> BaseException:
    return error.failures[0][0] if isinstance(error, dcp.CheckpointException) else error


def wired(request: pytest.FixtureRequest, name: str, elements: int = 3 << 20) -> Iterator[Wire]:
    """Open a store by its name; tests wait for what is retried, not for the pauses between."""
    request.getfixturevalue("monkeypatch").setattr(Attempts, "_first_pause_seconds", 0.01)
    requests, fixture, _ = STORES[name]
    url, direct = request.getfixturevalue(fixture)
    fields = dict(field.split("=", 1) for field in filter(None, direct.get("connection_string", "").split(";")))
    upstream = fields["BlobEndpoint"].rpartition("/")[0] if requests is AZURE else direct["endpoint_url"]
    with FaultProxy(upstream, seed=4) as proxy:
        options = {**direct, "endpoint_url": proxy.url}
        if requests is AZURE:
            options = {"account_name": "ckpt", "account_key": fields["AccountKey"], "endpoint": f"{proxy.url}/ckpt"}
        yield Wire(proxy, url, direct, {**options, "default_block_size": PART_NBYTES}, requests, elements)
