"""This package in other software: frameworks, whose checkpoints go through it, and what watches a job.

    install(writer={...}, reader={...})   every job that names no storage, or stock DCP's classes      installing.py
    dcpz:///path, dcpz+s3://bucket/key    unmodified programs, by the URL that they are given          urls.py
    lightning, megatron, torchtitan       the framework's own way to choose how checkpoints are saved  a file each
    metrics                               on_save and on_load for what watches a job
    async_writer                          the writer that Megatron and NVIDIA's resiliency extension ask for

Nothing here is imported by the rest of the package, and each file imports its framework only when it is imported.
"""

from dcp_nvcomp.integrations.installing import Installation, install

__all__ = ["Installation", "install"]
