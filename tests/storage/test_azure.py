"""Azure Blob Storage through obstore: what test_objects.py does not have of it, on Azurite.

Azurite can't show: the latency and throttling of the real service, Azure AD, and hierarchical namespaces.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import fsspec.config
import pytest
from azure.storage.blob import (
    AccountSasPermissions,
    ContainerClient,
    ResourceTypes,
    generate_account_sas,
)

from dcp_nvcomp.errors import ConfigurationError, StorageError
from dcp_nvcomp.storage.objects.azure import AzureContainer, azure_place
from dcp_nvcomp.storage.open import open_filesystem, real_place

from .suite import Place
from .test_objects import lose_an_answer

pytestmark = pytest.mark.azure

SECRET = "S3cretS3cretS3cret"


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN", "CONNECTION_STRING", "ENDPOINT"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)


@pytest.fixture
def container(azure_store: Place) -> Iterator[ContainerClient]:
    """A client beside ours."""
    url, options = azure_store
    with ContainerClient.from_connection_string(options["connection_string"], url.split("/")[2]) as client:
        yield client


@pytest.mark.parametrize("unsure", [True, False])
def test_a_refusal_that_does_not_pass_is_told_at_once(
    azure_store: Place, container: ContainerClient, monkeypatch: pytest.MonkeyPatch, unsure: bool
) -> None:
    """The version is what it was: it was not another save. But a PUT before it that got no answer may be done yet."""
    url, options = azure_store
    filesystem = open_filesystem(url, storage_options=options, deadline_seconds=60)
    filesystem.publish("a", b"old")
    lease = container.get_blob_client("run/a").acquire_lease()
    if unsure:
        lose_an_answer(AzureContainer, monkeypatch, done=False)
    began = time.monotonic()
    with pytest.raises(StorageError, match="LeaseIdMissing") as caught:
        filesystem.publish("a", b"new")
    assert time.monotonic() - began < 10
    assert caught.value.outcome_unknown == unsure
    assert filesystem.read_all("a", limit_nbytes=9) == b"old"
    lease.release()
    filesystem.publish("a", b"new")
    assert filesystem.read_all("a", limit_nbytes=9) == b"new"


# --- trouble ---------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_not_repeated(azure_store: Place) -> None:
    url, options = azure_store
    text = options["connection_string"]
    key = next(field for field in text.split(";") if field.startswith("AccountKey="))
    wrong = {"connection_string": text.replace(key, "AccountKey=QUJDREVGRw==")}
    filesystem = open_filesystem(url, storage_options=wrong, deadline_seconds=60)
    for use in (lambda: filesystem.publish("a", b"x"), lambda: filesystem.list_files()):
        start = time.monotonic()
        with pytest.raises(StorageError) as caught:
            use()
        assert time.monotonic() - start < 20 and caught.value.errno == errno.EACCES


# --- options ---------------------------------------------------------------------------------------------------------


def test_urls() -> None:
    account = {"account_name": "acc"}
    for url, container, prefix in (
        ("az://c/a/b", "c", "a/b"),
        ("az://c", "c", ""),
        ("abfs://c@other.dfs.core.windows.net/a/", "c", "a"),
        ("abfss://c/a", "c", "a"),
    ):
        place = azure_place(url, account)
        assert (place.bucket, place.prefix) == (container, prefix)
        assert place.client["account_name"] == "acc"
    assert azure_place("abfs://c@other.dfs.core.windows.net/a", {}).client["account_name"] == "other"
    assert real_place("abfs://c@other.dfs.core.windows.net/a/") == real_place("az://c/a") == "az://c/a"


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


@pytest.mark.parametrize("given", ["account_key", "sas_token", "connection_string with a key", "one with a signature"])
@pytest.mark.parametrize("around", ["ACCOUNT_KEY", "SAS_TOKEN", "TOKEN", "CONNECTION_STRING"])
def test_credentials_of_the_options_are_not_mixed_with_the_environments(
    azure_store: Place, monkeypatch: pytest.MonkeyPatch, given: str, around: str
) -> None:
    """The environment's are wrong: neither we nor obstore may use them."""
    url, options = azure_store
    text = options["connection_string"]
    fields = dict(field.split("=", 1) for field in filter(None, text.split(";")))
    token = generate_account_sas(
        fields["AccountName"],
        fields["AccountKey"],
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions(read=True, write=True, list=True, create=True),
        datetime.now(timezone.utc) + timedelta(hours=1),
    )
    base = {"account_name": fields["AccountName"], "endpoint": fields["BlobEndpoint"]}
    monkeypatch.setenv(
        f"AZURE_STORAGE_{around}",
        {
            "ACCOUNT_KEY": "QUJDREVGRw==",
            "SAS_TOKEN": token.replace("sig=", "sig=x"),
            "TOKEN": "x",
            "CONNECTION_STRING": "AccountName=other;AccountKey=QUJDREVGRw==",
        }[around],
    )
    filesystem = open_filesystem(
        url,
        storage_options={
            "account_key": {**base, "account_key": fields["AccountKey"]},
            "sas_token": {**base, "sas_token": token},
            "connection_string with a key": {"connection_string": text},
            "one with a signature": {
                "connection_string": f"BlobEndpoint={fields['BlobEndpoint']};SharedAccessSignature={token}"
            },
        }[given],
        deadline_seconds=20,
    )
    filesystem.publish("a", b"x")
    assert filesystem.read_all("a", limit_nbytes=9) == b"x"


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


def test_no_secret_is_told() -> None:
    """Of the others tests/stores/test_secrets.py makes sure."""
    options = {"account_name": "acc", "endpoint": "http://127.0.0.1:9/acc"}
    options |= {"client_secret": SECRET, "tenant_id": "t", "client_id": "i"}
    with pytest.raises((StorageError, ConfigurationError)) as caught:
        open_filesystem("az://c/a", storage_options=options, deadline_seconds=2).file_nbytes("x")
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error!r} {error}"
        error = error.__cause__ or error.__context__
