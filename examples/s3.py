"""Save to an S3 bucket, load all of it, and load one tensor only.

    AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... python examples/s3.py s3://bucket/run/step-1

Options beyond `path` that the writer and the reader do not know go to s3fs: here an endpoint that is not AWS.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--endpoint-url", help="for a server other than AWS, such as http://127.0.0.1:7480")
    arguments = parser.parse_args()
    options: dict[str, Any] = {"endpoint_url": arguments.endpoint_url} if arguments.endpoint_url else {}

    model = torch.nn.Sequential(torch.nn.Linear(2048, 1024), torch.nn.Linear(1024, 10)).bfloat16()
    writer = NvcompWriter(arguments.url, **options)
    dcp.save(model.state_dict(), storage_writer=writer)
    print(writer.last_save)

    restored = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(restored, storage_reader=NvcompReader(arguments.url, **options))
    assert all(torch.equal(restored[name], tensor) for name, tensor in model.state_dict().items())
    print("loaded, equal to what was saved")

    head = {"1.weight": torch.zeros(10, 1024, dtype=torch.bfloat16)}
    dcp.load(head, storage_reader=NvcompReader(arguments.url, **options))
    assert torch.equal(head["1.weight"], model.state_dict()["1.weight"])
    print("loaded 1.weight alone: only its bytes were fetched")
    print(f"look at it: dcp-nvcomp inspect {arguments.url}")


if __name__ == "__main__":
    main()
