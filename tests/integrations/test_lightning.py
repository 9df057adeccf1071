"""Lightning's strategies for sharded models, with `Trainer` and with `Fabric`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_nvcomp import ConfigurationError
from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start


@pytest.mark.parametrize("which", ["trainer-fsdp", "trainer-mp", "fabric-fsdp", "fabric-mp"])
def test_saved_killed_and_resumed(tmp_path: Path, which: str) -> None:
    needs("lightning", "lightning==2.6.6")
    start("lightning", tmp_path, "train", which, killed=True)
    start("lightning", tmp_path, "resume", which)
    check_resumed(tmp_path, saved=2, last=4)
    assert (tmp_path / "step-2" / "meta.pt").exists()
    check_ours(tmp_path / "step-2")
    if which.startswith("trainer"):
        kept = tmp_path / "kept"  # of ModelCheckpoint, which removes old ones and links to the last
        assert (kept / "last.ckpt").is_symlink()
        check_ours(kept / "last.ckpt")
    check_cleaned(tmp_path, tmp_path / "step-2")


def test_wrong_options_fail_at_once() -> None:
    needs("lightning", "lightning==2.6.6")
    from dcp_nvcomp.integrations.lightning import NvcompModelParallelStrategy

    with pytest.raises(ConfigurationError, match="nosuch"):
        NvcompModelParallelStrategy(writer={"codec": "nosuch"})
