"""What the processes of all steps have in common. Nothing here may start CUDA, which does not survive a fork."""

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
