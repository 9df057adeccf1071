"""Which path or URL opens what, by which options, and which of them are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.storage.file_servers.urls import sftp_place, smb_place
from dcp_nvcomp.storage.fsspec_files import FsspecFilesystem
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.objects.azure import azure_place
from dcp_nvcomp.storage.objects.gcs import gcs_place
from dcp_nvcomp.storage.open import open_filesystem, place_of, real_place
from dcp_nvcomp.storage.processes import is_known_elsewhere, storage_of
from tests.faults import forked

_CHANGED = ("a//b", "a/../b", "./a", "a\nb", "a\x7f", "a\\b")  # by Azure, or by its client
SECRET = "S3cretS3cretS3cret"
WRITER_OPTIONS = ("codec", "thread_count", "overwrite", "sync_files", "host_memory_budget")


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AZURE_STORAGE_", "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_", "GCSFS_DEFAULT_")):
            monkeypatch.delenv(name)


# --- local paths and protocols ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "names",
    [
        ("s3://bucket/x", "S3://bucket/x/"),
        ("gs://b/a", "gcs://b/a/"),
        ("gs://b", "gs://b/"),
        ("az://c/a", "abfs://c@other.dfs.core.windows.net/a/"),
        ("sftp://host/run/a", "ssh://me:secret@HOST:22/run//a/", "SSH://host/run/./a"),
        ("sftp://host:2222/a", "ssh://host:2222/a"),
        ("smb://host/share/a", "smb://work;me:secret@host:445/share/a/"),
    ],
    ids=lambda names: names[0],
)
def test_one_name_for_one_place(names: tuple[str, ...]) -> None:
    assert {real_place(url) for url in names} == {names[0]}


_WITHOUT_PACKAGES = """if True:
    import sys
    import dcp_nvcomp.storage.open
    assert not {"s3fs", "botocore", "asyncssh", "smbprotocol"} & sys.modules.keys()
    for name in ("s3fs", "asyncssh", "smbprotocol"):
        sys.modules[name] = None
    from dcp_nvcomp.errors import ConfigurationError
    for protocol in ("s3", "sftp", "ssh", "smb"):
        try:
            dcp_nvcomp.storage.open.open_filesystem(f"{protocol}://bucket/run")
        except ConfigurationError as error:
            print(error)
"""


def test_packages_are_imported_when_they_are_needed_and_named_if_they_are_missing() -> None:
    lines = forked.execute(_WITHOUT_PACKAGES).stdout.splitlines()
    for line, extra in zip(lines, ("s3", "sftp", "sftp", "smb"), strict=True):
        assert f"pip install 'dcp-nvcomp[{extra}]'" in line


# --- options that are refused, and that are not -----------------------------------------------------------------------


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
def test_options_that_cannot_work(path: str, options: dict[str, Any], message: str) -> None:
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
    sftp_place("sftp://host/run", {"skip_instance_cache": True, "temppath": "/tmp"})
    smb_place("smb://host/share", {"timeout": 60, "register_session_retries": 4, "auto_mkdir": True})


def test_streams_to_an_object_store_keep_to_the_memory_budget() -> None:
    """Each holds a part several times; how many threads encode does not matter, as streams wait for the network."""
    store = open_filesystem("memory://x")
    streams = [store.output_streams(1, mebibytes << 20) for mebibytes in (1, 80, 160, 256, 1024, 1 << 20)]
    assert streams == [1, 1, 2, 3, 4, 4]
    small_parts = open_filesystem("s3://b/x", storage_options={"default_block_size": 5 << 20})
    assert small_parts.output_streams(1, 64 << 20) == 2


def test_streams_to_a_disk_are_few(tmp_path: Path) -> None:
    assert [open_filesystem(tmp_path).output_streams(threads, 1) for threads in (1, 2, 16)] == [1, 2, 2]


# --- SFTP and SMB -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("mark", ["", "dcpz+"])
def test_another_place_is_asked_with_the_same_password(mark: str) -> None:
    """Messages say `***` for it, which is a wrong one: after some of these, servers lock users out."""
    filesystem = open_filesystem(f"{mark}plainlogin://user:right-word@host/run/step-1")
    assert isinstance(filesystem, FsspecFilesystem) and filesystem.reopen is not None
    above = filesystem.path.removesuffix("/step-1")
    for path, word in ((above, "right-word"), (filesystem.path, "right-word"), ("plainlogin://u:own@other/x", "own")):
        other = filesystem.reopen(path)
        assert isinstance(other, FsspecFilesystem) and other._fs.password == word
    assert "right-word" not in filesystem.path


def test_no_secret_in_a_repr() -> None:
    for place in (
        sftp_place("sftp://me:S3cret@host/run", {"passphrase": "S3cret"}),
        smb_place("smb://me@host/share", {"password": "S3cret"}),
    ):
        assert "S3cret" not in repr(place)


def test_other_processes_find_the_same_place() -> None:
    for url in ("sftp://host/run", "smb://host/share"):
        assert is_known_elsewhere(url) and not storage_of(url).classes


# --- Azure and Google Cloud Storage -----------------------------------------------------------------------------------


def test_urls_of_buckets() -> None:
    for place, bucket, prefix in (
        (azure_place("az://c/a/b", {"account_name": "acc"}), "c", "a/b"),
        (azure_place("az://c", {"account_name": "acc"}), "c", ""),
        (azure_place("abfs://c@other.dfs.core.windows.net/a/", {"account_name": "acc"}), "c", "a"),
        (azure_place("abfss://c/a", {"account_name": "acc"}), "c", "a"),
        (gcs_place("gs://b/a/b", {}), "b", "a/b"),
        (gcs_place("gs://b", {}), "b", ""),
        (gcs_place("gcs://b/a/", {}), "b", "a"),
    ):
        assert (place.bucket, place.prefix) == (bucket, prefix)
        assert place.client.get("account_name", "acc") == "acc"
    assert azure_place("abfs://c@other.dfs.core.windows.net/a", {}).client["account_name"] == "other"


def test_the_host_of_another_cloud() -> None:
    for host, endpoint in (
        ("acc.dfs.core.windows.net", None),
        ("acc.blob.core.windows.net", None),
        ("acc", None),
        ("acc.dfs.core.chinacloudapi.cn", "https://acc.blob.core.chinacloudapi.cn"),
        ("acc.z5.dfs.storage.azure.net", "https://acc.z5.blob.storage.azure.net"),
    ):
        config = azure_place(f"abfs://c@{host}/a", {}).client
        assert config == {"account_name": "acc"} | ({"endpoint": endpoint} if endpoint else {})
    with pytest.raises(ConfigurationError, match=r"ACCOUNT\.dfs\.core\.windows\.net"):
        azure_place("abfs://c@example.com/a", {})


def test_connection_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={SECRET}==;EndpointSuffix=core.windows.net"
    key = {"account_key": f"{SECRET}==", "credential_type": "access_key", "skip_signature": False}
    expected = {"account_name": "acc", "endpoint": "https://acc.blob.core.windows.net", **key}
    assert azure_place("az://c/a", {"connection_string": text}).client == expected
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert azure_place("az://c/a", {}).client == expected
    assert azure_place("abfs://c@acc.dfs.core.windows.net/a", {}).client == expected
    assert azure_place("abfs://c@other.dfs.core.windows.net/a", {}).client == {"account_name": "other"}
    assert azure_place("az://c/a", {"account_name": "b"}).client == {"account_name": "b"}


@pytest.mark.parametrize(
    ("endpoint", "account"),
    [("https://acc.blob.core.windows.net/", "acc"), ("http://127.0.0.1:10000/acc", "acc"), ("http://h/acc/", "acc")],
)
def test_a_connection_string_with_a_signature_as_the_portal_shows_it(endpoint: str, account: str) -> None:
    text = f"BlobEndpoint={endpoint};QueueEndpoint=https://acc.queue.core.windows.net/;SharedAccessSignature=sv=1&sig=x"
    for url in ("az://c/a", "abfs://c@acc.dfs.core.windows.net/a"):
        assert azure_place(url, {"connection_string": text}).client == {
            "account_name": account,
            "endpoint": endpoint.rstrip("/"),
            "sas_token": "sv=1&sig=x",
            "credential_type": "sas_token",
            "skip_signature": False,
        }


def test_the_environment_and_fsspecs_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "from-environment")
    assert azure_place("az://c/a", {}).client == {"account_name": "from-environment"}
    assert azure_place("abfs://c@acc/a", {}).client == {"account_name": "acc"}
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    monkeypatch.setitem(fsspec.config.conf, "abfs", {"account_name": "from-files"})
    open_filesystem("az://c/a")
    monkeypatch.setitem(fsspec.config.conf, "az", {"sas_token": "sv=of-another-account"})
    with pytest.raises(ConfigurationError, match="account"):  # those of two accounts are not mixed
        open_filesystem("az://c/a")
    monkeypatch.setitem(fsspec.config.conf, "az", {"account_nam": "x"})
    with pytest.raises(ConfigurationError, match="account_name"):
        open_filesystem("az://c/a")


_WRONG = {
    "ACCOUNT_KEY": "QUJDREVGRw==",
    "SAS_TOKEN": "sv=1&sig=wrong",
    "TOKEN": "x",
    "CONNECTION_STRING": "AccountName=other;AccountKey=QUJDREVGRw==",
}


@pytest.mark.azure
def test_credentials_of_the_options_are_not_mixed_with_the_environments(
    kind_named: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's are wrong: neither we nor obstore may use them."""
    kind = kind_named("azure")
    url, options = kind.place()
    base = {"account_name": options["account_name"], "endpoint": options["endpoint"]}
    rights = AccountSasPermissions(read=True, write=True, list=True, create=True)
    until = datetime.now(timezone.utc) + timedelta(hours=1)
    types = ResourceTypes(service=True, container=True, object=True)
    token = generate_account_sas(base["account_name"], options["account_key"], types, rights, until)
    text = f"AccountName={base['account_name']};AccountKey={options['account_key']};BlobEndpoint={base['endpoint']}"
    signed = f"BlobEndpoint={base['endpoint']};SharedAccessSignature={token}"
    for name, value in _WRONG.items():
        for given in (
            options,
            {**base, "sas_token": token},
            {"connection_string": text},
            {"connection_string": signed},
        ):
            with monkeypatch.context() as patch:
                patch.setenv(f"AZURE_STORAGE_{name}", value)
                filesystem = open_filesystem(url, storage_options=given, deadline_seconds=20)
                filesystem.publish("a", b"x")
                assert filesystem.read_all("a", limit_nbytes=9) == b"x"
    kind.remove(url)


def test_credentials_of_one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def credentials(**options: Any) -> dict[str, Any]:
        config = azure_place("az://c/a", {"account_name": "acc", **options}).client
        return {name: config[name] for name in config if name not in ("account_name", "endpoint")}

    service = {"tenant_id": "t", "client_id": "i", "client_secret": "s"}
    for name in ("ACCOUNT_KEY", "SAS_TOKEN", "CLIENT_SECRET"):
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", SECRET)
    signed = {"skip_signature": False}
    assert credentials(**service) == {**service, "credential_type": "client_secret", **signed}
    assert credentials(sas_token="x") == {"sas_token": "x", "credential_type": "sas_token", **signed}
    assert credentials(connection_string="AccountName=acc;AccountKey=k", sas_token="x") == credentials(sas_token="x")
    assert credentials(anon=True) == {"skip_signature": True}
    assert credentials() == {"account_key": SECRET, "credential_type": "access_key", **signed}


@pytest.mark.gcs
def test_fsspecs_files_and_the_environment_for_google(
    kind_named: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind_named("gcs")
    url, options = kind.place()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", options["endpoint_url"])
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    open_filesystem(url).publish("a", b"x")
    assert open_filesystem(url, storage_options=options).list_names() == ["a"]
    monkeypatch.setitem(fsspec.config.conf, "gs", {"tokn": "anon"})
    with pytest.raises(ConfigurationError, match="token"):
        open_filesystem(url)
    kind.remove(url)
