"""Imports shared by the processes of all steps. None of them may start CUDA, which does not survive a fork."""

from importlib import import_module

for _name in (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "dcp_nvcomp",
    "benchmarks.gpu_acceptance.child",
    "benchmarks.gpu_codecs",
    "benchmarks.peers",
):
    import_module(_name)
