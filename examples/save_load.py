"""Save a model and its optimizer, and load them into fresh ones, in one process.

python examples/save_load.py [DIRECTORY_OR_URL]
"""

import argparse

import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("path", nargs="?", default="examples-out/save-load", metavar="DIRECTORY_OR_URL")
path = parser.parse_args().path

model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 1024)).square().sum().backward()
optimizer.step()

writer = NvcompWriter(path)
dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, storage_writer=writer)
print(writer.last_save)

restored = {"model": torch.nn.Linear(1024, 1024).state_dict(), "optimizer": optimizer.state_dict()}
dcp.load(restored, storage_reader=NvcompReader(path))
assert torch.equal(restored["model"]["weight"], model.weight)
print("loaded, equal to what was saved")
print(f"look at it: dcp-nvcomp inspect {path}")
