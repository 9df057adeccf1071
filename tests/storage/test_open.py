"""Which path opens what, and which options are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of, real_place
from tests.faults import forked

_CHANGED = ("a//b", "a/../b", "./a", "a\nb", "a\x7f", "a\\b")  # by Azure, or by its client
WRITER_OPTIONS = ("codec", "thread_count", "overwrite", "sync_files", "host_memory_budget")


def test_kinds_of_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    open_filesystem(tmp_path).publish("a", b"x")
    places: list[str | Path] = [str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}", ".", Path("."), "~"]
    places.append(f"{tmp_path}/../{tmp_path.name}/")
    for place in places:
        filesystem = open_filesystem(place)
        assert isinstance(filesystem, PosixFilesystem)
        assert filesystem.path == str(place)
        assert filesystem.list_names() == ["a"]


def test_a_relative_path_survives_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    filesystem = open_filesystem("run")
    monkeypatch.chdir("/")
    filesystem.create_directory()
    filesystem.publish("a", b"x")
    assert (tmp_path / "run" / "a").read_bytes() == b"x"
    assert filesystem.location("a") == "run/a"


@pytest.mark.parametrize("path", ["", b"bytes", 3])
def test_paths_that_are_none(path: Any) -> None:
    with pytest.raises((ConfigurationError, TypeError)):
        open_filesystem(path)


def test_a_colon_is_no_protocol(tmp_path: Path) -> None:
    for name in ("a:b", "x::y", "C:"):
        filesystem = open_filesystem(tmp_path / name)
        filesystem.create_directory()
        assert (tmp_path / name).is_dir()


def test_unknown_protocol() -> None:
    with pytest.raises(ConfigurationError, match="Unknown storage protocol 's4'"):
        open_filesystem("s4://bucket/run")
    with pytest.raises(ConfigurationError, match=r"Did you mean 'memory://'\?"):
        open_filesystem("memry://bucket/run")


def test_a_protocol_may_be_in_upper_case(tmp_path: Path) -> None:
    assert open_filesystem(f"FILE://{tmp_path}").location("x") == f"file://{tmp_path}/x"
    assert open_filesystem("MEMORY://upper/x").path == "memory://upper/x"
    assert place_of(f"File://{tmp_path}") == str(tmp_path)
    assert real_place("S3://bucket/x/") == real_place("s3://bucket/x") == "s3://bucket/x"


def test_missing_package_is_named() -> None:
    code = """if True:
        import sys
        sys.modules["s3fs"] = None
        from dcp_nvcomp.errors import ConfigurationError
        from dcp_nvcomp.storage.open import open_filesystem
        try:
            open_filesystem("s3://bucket/run")
        except ConfigurationError as error:
            print(error)
    """
    done = forked.execute(code)
    assert "pip install 'dcp-nvcomp[s3]'" in done.stdout


@pytest.mark.parametrize("path", ["local", "memory://x", "s3://bucket/run"])
def test_a_mistyped_option_of_the_caller(path: str) -> None:
    with pytest.raises(ConfigurationError, match="'thread_cont': did you mean 'thread_count'"):
        open_filesystem(path, storage_options={"thread_cont": 4}, known_options=WRITER_OPTIONS)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("local", {"endpoint_url": "http://x"}, "it is an option of s3://, not of file://"),
        ("memory://x", {"whatever": 1}, "'whatever'"),
        ("s3://bucket/run", {"endpoint": "http://x"}, "did you mean 'endpoint_url'"),
        ("s3://bucket/run", {"whatever": 1}, "takes anon, .*endpoint_url"),
        ("s3://bucket/run", {"mode": "rb"}, "Unknown option 'mode'"),
        ("s3://bucket/run", {"client_kwargs": {"region": "x"}}, "'region'"),
        ("s3://bucket/run", {"config_kwargs": {"read_timout": 1}}, "'read_timout'"),
        ("s3://bucket/run", {"s3_additional_kwargs": {"ServerSideEncyption": "AES256"}}, "'ServerSideEncryption'"),
        ("s3://bucket/run", {"default_block_size": 1000}, "smallest part"),
        ("s3://bucket/run", {"default_block_size": "16MB"}, "'16MB' must be a number of bytes"),
        ("s3://bucket/run", {"endpoint_url": "no-url"}, "no-url"),
        ("sftp://host/run", {"usrname": "x"}, "did you mean 'username'"),
        ("smb://host/share", {"sharing": "x"}, "did you mean 'share_access'|smb:// takes"),
        ("smb://host/share", {"client_keys": "x"}, "smb:// takes"),
        ("sftp://host/run", {"port": 0}, "port=0"),
        ("sftp://host/run", {"port": "many"}, "port='many'"),
        ("sftp:///run", {}, "sftp://user@host/directory"),
        ("smb://host", {}, "smb://user@host/share/directory"),
        ("smb://host/share/a/../b", {}, r"\.\."),
        ("smb://host/share", {"share_access": "x"}, "share_access"),
        ("smb://host/share", {"encrypt": "maybe"}, "encrypt"),
        ("smb://host/share", {"auth_protocol": "none"}, "auth_protocol"),
        ("sftp://host/run", {"default_block_size": 10}, "default_block_size"),
        ("smb://host/share", {"block_size": "16MB"}, "block_size='16MB' must be a number of bytes"),
        ("sftp://host/run", {"password": 123}, "password= must be text, not int"),
        ("smb://host/share", {"password": 123}, "password= must be text, not int"),
        ("smb://host/share", {"user": 7}, "username= must be text"),
        *(
            pytest.param(*row, marks=pytest.mark.azure)
            for row in [
                ("az://c/a", {}, "There is no account"),
                ("az://c/a", {"account_name": "a", "acount_key": "x"}, "did you mean 'account_key'"),
                ("az://c/a", {"connection_string": "S3cret"}, "NAME=VALUE"),
                ("az://c/a", {"account_name": "a", "default_block_size": "16MB"}, "must be a number of bytes"),
                *((f"az://c/{path}", {"account_name": "a"}, "A path in a container can't have") for path in _CHANGED),
            ]
        ),
        *(
            pytest.param("gs://b/a", {"token": "anon", **options}, words, marks=pytest.mark.gcs)
            for options, words in [
                ({"projects": "x"}, "did you mean 'project'"),
                ({"default_block_size": 1000}, "at least 262144"),
                ({"default_block_size": "16MB"}, "'16MB' must be a number of bytes"),
                ({"endpoint_url": "127.0.0.1:9000"}, "must begin with http"),
                ({"token": "/no/such/key.json"}, "no such file"),
                ({"token": "~/key.json"}, "no such file"),
                ({"access": "read"}, "do not work"),
            ]
        ),
        pytest.param("gs:///a", {"token": "anon"}, "gs://bucket/path", marks=pytest.mark.gcs),
    ],
)
def test_options_that_cannot_work(
    path: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("AZURE_STORAGE_", "STORAGE_EMULATOR_HOST")):
            monkeypatch.delenv(name)
    keys = {"key": "ci", "secret": "cisecret"} if path.startswith("s3:") else {}
    with pytest.raises(ConfigurationError, match=message):
        open_filesystem(path, storage_options={**keys, **options}, known_options=WRITER_OPTIONS)


def test_options_that_are_right() -> None:
    s3_options: dict[str, Any] = {
        "anon": False,
        "key": "ci",
        "secret": "cisecret",
        "endpoint_url": "http://127.0.0.1:1",
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"read_timeout": 3, "retries": {"mode": "standard"}},
        "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
        "use_listings_cache": True,
        "skip_instance_cache": True,
        "max_concurrency": 2,
    }
    before = repr(s3_options)
    open_filesystem("s3://bucket/run", storage_options=s3_options, known_options=WRITER_OPTIONS)
    assert repr(s3_options) == before
    open_filesystem("local", storage_options={"auto_mkdir": True})
    open_filesystem("memory://x", storage_options={"use_listings_cache": True})


def test_importing_needs_no_s3fs() -> None:
    code = "import sys, dcp_nvcomp.storage.open; assert not {'s3fs', 'botocore'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_streams_to_an_object_store_keep_to_the_memory_budget() -> None:
    """Each holds a part several times; how many threads encode does not matter, as streams wait for the network."""
    store = open_filesystem("memory://x")
    streams = [store.output_streams(1, mebibytes << 20) for mebibytes in (1, 80, 160, 256, 1024, 1 << 20)]
    assert streams == [1, 1, 2, 3, 4, 4]
    small_parts = open_filesystem("s3://b/x", storage_options={"default_block_size": 5 << 20})
    assert small_parts.output_streams(1, 64 << 20) == 2


def test_streams_to_a_disk_are_few(tmp_path: Path) -> None:
    assert [open_filesystem(tmp_path).output_streams(threads, 1) for threads in (1, 2, 16)] == [1, 2, 2]
