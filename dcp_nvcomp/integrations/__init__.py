"""This package in other software: frameworks, whose checkpoints go through it, and what watches a job.

Nothing here is imported by the rest of the package, and each file imports its framework only when it is imported.
"""

from dcp_nvcomp.integrations.installing import Installation, install

__all__ = ["Installation", "install"]
