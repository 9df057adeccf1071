#!/bin/bash
# Installs a wheel into an empty environment and uses it there.
#
#     .ci/try_wheel.sh WHEEL PYTHON [TORCH]
#
# With TORCH (what pip installs as torch) a checkpoint is saved and loaded. Without it only what needs no torch is tried:
# the command's help, and the compiled kernels' round trip.
set -euo pipefail

wheel=$(realpath "$1") python=$2 torch=${3:-}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
cd "$folder"
pip=("$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check)
if [ -n "$torch" ]; then
    "${pip[@]}" "$torch"
    "${pip[@]}" "$wheel"
    venv/bin/python -m dcp_nvcomp info
    venv/bin/python - <<'PYTHON'
import torch, dcp_nvcomp

state = {"w": torch.randn(1000, 100), "step": 3}
saved = state["w"].clone()
dcp_nvcomp.save(state, "checkpoint", no_dist=True)
state["w"].zero_()
dcp_nvcomp.load(state, "checkpoint", no_dist=True)
assert torch.equal(state["w"], saved) and dcp_nvcomp.tools.verify("checkpoint").is_sound
print("a checkpoint was saved, loaded and verified")
PYTHON
else
    "${pip[@]}" numpy fsspec zstandard crc32c typer rich tqdm
    "${pip[@]}" --no-deps "$wheel"
    venv/bin/dcp-nvcomp --help > /dev/null
    venv/bin/python - <<'PYTHON'
import importlib

import numpy

for kernel in ("transforms._planes", "coders._literals", "_planes_literals"):
    importlib.import_module(f"dcp_nvcomp.codecs.{kernel}")
from dcp_nvcomp.codecs.coders._literals import decode_literals, encode_literals

data = numpy.random.default_rng(1).binomial(20, 0.3, 100_000).astype("uint8")
frame, back = bytearray(200_000), bytearray(len(data))
nbytes = encode_literals(data, frame)
decode_literals(memoryview(frame)[:nbytes], back)
assert bytes(back) == data.tobytes() and nbytes < len(data)
print("the kernels are there, and what they encode they decode")
PYTHON
fi
