"""URLs and options of SFTP and SMB; no server is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec.config
import pytest

from dcp_nvcomp.storage.file_servers.urls import file_server_url, sftp_place, smb_place
from dcp_nvcomp.storage.open import real_place
from dcp_nvcomp.storage.processes import is_known_elsewhere, storage_of


@pytest.mark.parametrize(
    ("url", "host", "port", "user", "password", "path"),
    [
        ("sftp://host/run", "host", (), None, None, "/run"),
        ("ssh://me@host:2222/a/b/", "host", 2222, "me", None, "/a/b"),
        ("SFTP://me:p%40s%2F@10.0.0.1/a#b?c", "10.0.0.1", (), "me", "p@s/", "/a#b?c"),
        ("sftp://[::1]:22/run", "::1", 22, None, None, "/run"),
        ("sftp://a@b@host/run", "host", (), "a@b", None, "/run"),
        ("sftp://host", "host", (), None, None, "/"),
    ],
)
def test_where_sftp_urls_lead(
    url: str, host: str, port: Any, user: str | None, password: str | None, path: str
) -> None:
    place = sftp_place(url, {})
    assert (place.host, place.port, place.path) == (host, port, path)
    assert (place.client.get("username"), place.client.get("password")) == (user, password)


@pytest.mark.parametrize(
    ("url", "host", "port", "user", "password", "share", "path"),
    [
        ("smb://host/share/run", "host", 445, None, None, "share", "run"),
        ("smb://me:secret@host:4450/share", "host", 4450, "me", "secret", "share", ""),
        ("smb://work;me@host/share/a b/c/", "host", 445, "work\\me", None, "share", "a b/c"),
    ],
)
def test_where_smb_urls_lead(
    url: str, host: str, port: int, user: str | None, password: str | None, share: str, path: str
) -> None:
    place = smb_place(url, {})
    assert (place.host, place.port, place.share, place.path) == (host, port, share, path)
    assert (place.client["username"], place.client["password"]) == (user, password)
    assert place.client["require_signing"] and not place.client["encrypt"] and place.share_access == "rwd"


def test_options_come_before_the_url_and_both_before_fsspec_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "sftp", {"username": "conf", "port": "2022", "password": "conf"})
    monkeypatch.setitem(fsspec.config.conf, "smb", {"username": "conf", "domain": "conf", "encrypt": "true"})
    place = sftp_place("ssh://url@host/run", {"password": "option"})
    assert (place.client["username"], place.client["password"], place.port) == ("url", "option", 2022)
    assert sftp_place("sftp://host/run", {}).client["username"] == "conf"
    assert sftp_place("sftp://url@host/run", {"user": "option"}).client["username"] == "option"
    found = smb_place("smb://host/share", {"domain": "option"})
    assert found.client["username"] == "option\\conf" and found.client["encrypt"]


def test_files_of_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"client_keys": ["~/key"], "known_hosts": Path("~/hosts")}
    client = sftp_place("sftp://host/run", given).client
    assert client["client_keys"] == [f"{tmp_path}/key"] and client["known_hosts"] == f"{tmp_path}/hosts"
    client = sftp_place("sftp://host/run", {"key_filename": "~/key", "known_hosts": None}).client
    assert client["client_keys"] == f"{tmp_path}/key" and client["known_hosts"] is None
    assert "known_hosts" not in sftp_place("sftp://host/run", {}).client  # then it is ~/.ssh/known_hosts


def test_no_agent_and_no_configuration() -> None:
    client = sftp_place("sftp://host/run", {"agent_path": None, "config": None, "password": None}).client
    assert client["agent_path"] is None and client["config"] is None and "password" not in client
    assert not {"agent_path", "config"} & sftp_place("sftp://host/run", {}).client.keys()


def test_options_of_fsspec_s_own_filesystems_are_taken() -> None:
    sftp_place("sftp://host/run", {"skip_instance_cache": True, "temppath": "/tmp"})
    smb_place("smb://host/share", {"timeout": 60, "register_session_retries": 4, "auto_mkdir": True})


def test_no_secret_in_a_repr() -> None:
    for place in (
        sftp_place("sftp://me:S3cret@host/run", {"passphrase": "S3cret"}),
        smb_place("smb://me@host/share", {"password": "S3cret"}),
    ):
        assert "S3cret" not in repr(place)


def test_one_name_for_one_place() -> None:
    for urls in (
        ("sftp://host/run/a", "ssh://me:secret@HOST:22/run//a/", "SSH://host/run/./a"),
        ("smb://host/share/a", "smb://work;me:secret@host:445/share/a/"),
    ):
        assert {real_place(url) for url in urls} == {urls[0]}
    assert file_server_url("sftp://host:2222/a") == "sftp://host:2222/a" != file_server_url("sftp://host/a")


def test_other_processes_find_the_same_place() -> None:
    for url in ("sftp://host/run", "smb://host/share"):
        assert is_known_elsewhere(url) and not storage_of(url).classes
