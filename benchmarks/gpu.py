"""`gpu`: everything that needs an NVIDIA GPU. Its parts, for `--part`.

codecs     encode and decode GB/s for each codec and dtype; the ceiling of the open coders      gpu_codecs.py
staging    encode, and copy of the encoded bytes to pinned memory meanwhile, beside a plain
           pinned copy                                                                          gpu_codecs.py
memory     save and load of 16 GiB to files in memory, compared with DCP, DCP+zstd and a simple
           baseline; extra GPU memory                                                           gpu_checkpoints.py
disk       the same to a disk                                                                   gpu_checkpoints.py

How slice sizes and coders compare is `python -m benchmarks.slices`.
"""

from __future__ import annotations

import torch

from benchmarks import gpu_checkpoints, gpu_codecs
from benchmarks.measuring import NotHere, Settings
from benchmarks.results import Report
from dcp_nvcomp.engines.cuda.device import CudaDevice
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason


def run(settings: Settings) -> Report:
    reason = cuda_unavailable_reason()
    if reason is not None:
        raise NotHere(reason)
    report = Report("gpu", settings)
    device = CudaDevice(torch.device("cuda"))
    if settings.wants("codecs"):
        gpu_codecs.codecs(report, device)
    if settings.wants("staging"):
        gpu_codecs.staging(report, device)
    for part in ("memory", "disk"):
        if settings.wants(part):
            gpu_checkpoints.checkpoints(report, device, part)
    return report
