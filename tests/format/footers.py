"""The footers of a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path

from dcp_nvcomp import NvcompReader
from dcp_nvcomp.format.data_file import read_footers
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.storage.open import open_filesystem


def footers_of(checkpoint: Path) -> list[Footer]:
    """The footers of all data files that `.metadata` names, in the order of their names."""
    files = {stored.file for stored in NvcompReader(checkpoint).read_metadata().storage_data.values()}
    return read_footers(open_filesystem(checkpoint), sorted(files))
