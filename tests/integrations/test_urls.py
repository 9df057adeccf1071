"""dcpz:// URLs: a program that imports nothing of ours saves and loads through this package."""

from __future__ import annotations

import importlib.metadata
import textwrap
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, ZStandard

from dcp_nvcomp import ConfigurationError, NvcompWriter, open_checkpoint
from dcp_nvcomp.integrations import urls
from dcp_nvcomp.storage.open import MARK, MARKED_PROTOCOLS, without_mark
from tests.conftest import S3Store
from tests.integrations.launch import printed

PROGRAM = """
    import sys
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    def main(url):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        state = {"w": torch.arange(1000.0)}
        dcp.save(state, checkpoint_id=f"{url}/step-1")
        dcp.async_save(state, checkpoint_id=f"{url}/step-2").result()
        state["w"].zero_()
        for step in (1, 2):
            dcp.load(state, checkpoint_id=f"{url}/step-{step}")
            assert torch.equal(state["w"], torch.arange(1000.0)), step
        dist.destroy_process_group()

    if __name__ == "__main__":
        main(sys.argv[1])
"""


def test_every_protocol_has_its_entry_point() -> None:
    wanted = {MARK: "MarkedLocal", **{f"{MARK}+{one}": urls.class_name(one) for one in MARKED_PROTOCOLS}}
    found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="fsspec.specs")}
    for name, class_name in wanted.items():
        assert found[name] == f"dcp_nvcomp.integrations.urls.{class_name}", "install the package again"


def test_a_program_that_imports_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    printed(str(program), f"dcpz://{tmp_path}/run")
    for step in (1, 2):
        path = tmp_path / "run" / f"step-{step}"
        assert list(path.glob("__*.metadata"))
        assert open_checkpoint(path)["w"][999] == 999


def test_s3(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = s3_store
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    state = {"w": torch.arange(100.0)}
    dcp.save(state, checkpoint_id=f"dcpz+{url}", no_dist=True)
    state["w"].zero_()
    dcp.load(state, checkpoint_id=f"dcpz+{url}", no_dist=True)
    assert state["w"][99] == 99
    assert open_checkpoint(url, **options)["w"][99] == 99
    fs, _ = fsspec.url_to_fs(f"dcpz+{url}")
    assert fs.exists(f"dcpz+{url}/.metadata")


def test_what_programs_do_there_besides(tmp_path: Path) -> None:
    url = f"dcpz://{tmp_path}"
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=f"{url}/step-1", no_dist=True)
    fs, path = fsspec.url_to_fs(url)
    assert path == str(tmp_path)
    assert fs.isdir(f"{url}/step-1") and fs.exists(f"{url}/step-1/.metadata")
    assert [Path(name).name for name in fs.ls(url, detail=False)] == ["step-1"]
    fs.rm(f"{url}/step-1", recursive=True)
    assert not (tmp_path / "step-1").exists()
    assert fs.unstrip_protocol(str(tmp_path)) == url


def test_everything_of_ours_takes_them(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=NvcompWriter(f"dcpz://{tmp_path}"), no_dist=True)
    assert open_checkpoint(f"dcpz://{tmp_path}")["w"][0] == 1
    assert open_checkpoint(f"file://{tmp_path}")["w"][0] == 1


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("dcpz:///a/b", "/a/b"),
        ("dcpz://a", "a"),
        ("dcpz+s3://bucket/key", "s3://bucket/key"),
        ("s3://bucket", "s3://bucket"),
        ("/dcpz/a", "/dcpz/a"),
        ("dcpzip://a", "dcpzip://a"),
    ],
)
def test_without_mark(path: str, plain: str) -> None:
    assert without_mark(path) == plain


@pytest.mark.parametrize(("path", "meant"), [("dcpz:///x", "dcpz:///x"), ("dcpz+s3://b/k", r"dcpz\+s3://b/k")])
def test_what_pathlib_makes_of_them_is_refused(path: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"pass '{meant}' as text, not as a Path"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=Path(path), no_dist=True)
    with pytest.raises(ConfigurationError, match="what pathlib makes of a URL"):
        NvcompWriter(Path(path))


def test_what_only_stock_dcp_can_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=f"stock DCP's.*Give FsspecWriter .*without the mark, '{tmp_path}'"):
        dcp.FileSystemWriter(f"dcpz://{tmp_path}", _extensions=[ZStandard()])
    with pytest.raises(ConfigurationError, match=f"stock DCP's.*Give FsspecReader .*without the mark, '{tmp_path}'"):
        dcp.FileSystemReader(f"dcpz://{tmp_path}", _extension_registry=ExtensionRegistry())
    assert list(tmp_path.iterdir()) == []
