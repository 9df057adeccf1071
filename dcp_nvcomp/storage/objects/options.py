"""The options of `az://` and `gs://`: those that adlfs and gcsfs take, so that a URL and its options serve both."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import fsspec.config

from dcp_nvcomp.calls.suggestions import unknown_option
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.storage.remote import option_nbytes, part_nbytes

AZURE: Final = ("az", "abfs", "abfss")
GCS: Final = ("gs", "gcs")

# --- Azure -----------------------------------------------------------------------------------------------------------

# Our option, the store's, and the environment variable that both adlfs and obstore know.
_SETTINGS: Final = {
    "account_name": ("account_name", "AZURE_STORAGE_ACCOUNT_NAME"),
    "account_key": ("account_key", "AZURE_STORAGE_ACCOUNT_KEY"),
    "sas_token": ("sas_token", "AZURE_STORAGE_SAS_TOKEN"),
    "tenant_id": ("tenant_id", "AZURE_STORAGE_TENANT_ID"),
    "client_id": ("client_id", "AZURE_STORAGE_CLIENT_ID"),
    "client_secret": ("client_secret", "AZURE_STORAGE_CLIENT_SECRET"),
    "endpoint": ("endpoint", "AZURE_STORAGE_ENDPOINT"),
}
# The secrets among them, and what obstore calls their kind; it prefers the first.
_CREDENTIALS: Final = {"account_key": "access_key", "sas_token": "sas_token", "client_secret": "client_secret"}
_OTHERS: Final = ("anon", "connection_string", "default_block_size", "use_listings_cache", "skip_instance_cache")
_CONNECTION_STRING: Final = "AZURE_STORAGE_CONNECTION_STRING"
_PUBLIC: Final = ".blob.core.windows.net"
_AZURE_URL: Final = re.compile(r"[A-Za-z]+://(?:(?P<container>[^/@]+)@)?(?P<host>[^/]+)(?:/(?P<prefix>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is, and how to get there."""

    bucket: str  # name of the bucket or container
    prefix: str
    part_nbytes: int  # how long the parts of an upload are
    client: Mapping[str, Any]  # settings of the client; they hold secrets


def _refuse_unknown(
    options: Mapping[str, Any], known: Sequence[str], known_options: Sequence[str], storage: str
) -> None:
    for option in sorted(options.keys() - set(known)):
        close = difflib.get_close_matches(option, [*known_options, *known], n=1, cutoff=0.75)
        raise unknown_option(option, close, call=known_options, storage=storage, takes=known)


def azure_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> Place:
    """Return where a URL leads."""
    # of any of its names, as adlfs does it; of one alone, since an account's key is no good for another account
    sections = (fsspec.config.conf.get(name) for name in (path.partition("://")[0], *AZURE))
    options = {**next(filter(None, sections), {}), **options}
    _refuse_unknown(options, (*_SETTINGS, *_OTHERS), known_options, "az://")
    match = _AZURE_URL.fullmatch(path)
    if match is None:
        raise ConfigurationError("A URL of Azure is az://container/path.", path=path)
    container, named = match["container"], {}
    if container is None:
        container = match["host"]
    else:
        named = _of_host(match["host"], path)
    config = _settings(options, named)
    if not config.get("account_name"):
        raise ConfigurationError(
            "There is no account: give account_name= or connection_string=, or set AZURE_STORAGE_ACCOUNT_NAME or "
            f"{_CONNECTION_STRING}.",
            path=path,
        )
    return Place(container, _checked((match["prefix"] or "").strip("/"), path), part_nbytes(options), config)


def azure_url(path: str) -> str:
    """Return one URL for a place however it is written, to compare places within an account."""
    match = _AZURE_URL.fullmatch(path)
    return path if match is None else f"az://{match['container'] or match['host']}/{(match['prefix'] or '').strip('/')}"


def _checked(prefix: str, path: str) -> str:
    """Return a prefix of names that obstore can send and Azure keeps as they are."""
    if prefix and {"", ".", ".."} & set(prefix.split("/")):
        reason = "empty, '.' or '..' parts"
    elif re.search(r"[\x00-\x1f\x7f\\]", prefix):
        reason = "backslashes or control characters"
    else:
        return prefix
    raise ConfigurationError(f"A path in a container can't have {reason}.", path=path)


def _of_host(host: str, path: str) -> dict[str, Any]:
    """Take the host of an `abfs://` URL apart; what is beside Azure's public cloud has an endpoint of its own."""
    account, *rest = host.split(".")
    if not rest:
        return {"account_name": account}
    if not {"dfs", "blob"} & set(rest):
        raise ConfigurationError(
            "The host of such a URL is ACCOUNT.dfs.core.windows.net, or another cloud's.", path=path
        )
    address = ".".join([account, *("blob" if label == "dfs" else label for label in rest)])
    public = address == f"{account}{_PUBLIC}"
    return {"account_name": account} if public else {"account_name": account, "endpoint": f"https://{address}"}


def _settings(options: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Bring together what the options, the URL and the environment say; the credentials are all of one source."""
    given = {name: options[option] for option, (name, _) in _SETTINGS.items() if options.get(option)}
    text = options.get("connection_string")
    told = _of_connection_string(text) if text else {}
    around = {} if text else _of_environment(given, named)
    config = {**around, **named, **told, **given}
    credentials = next((found for found in (given, told, around) if _CREDENTIALS.keys() & found.keys()), {})
    for name in _CREDENTIALS:
        config.pop(name, None)
    if options.get("anon"):
        return config | {"skip_signature": True}
    kind = next((kind for name, kind in _CREDENTIALS.items() if name in credentials), None)
    if kind is not None:  # told, so that obstore does not prefer what it finds in the environment
        config |= {name: credentials[name] for name in _CREDENTIALS if _CREDENTIALS[name] == kind}
        config |= {"credential_type": kind, "skip_signature": False}
    return config


def _of_environment(given: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, str]:
    """Return what the environment says; its connection string counts unless options or URL say who we are."""
    text = os.environ.get(_CONNECTION_STRING)
    if text and "account_name" not in given and not _CREDENTIALS.keys() & given.keys():
        found = _of_connection_string(text)
        if named.get("account_name", found.get("account_name")) == found.get("account_name"):
            return found
    return {name: os.environ[variable] for name, variable in _SETTINGS.values() if os.environ.get(variable)}


def _of_connection_string(text: str) -> dict[str, str]:
    """Take a connection string apart, as the portal of Azure shows it."""
    fields = {}
    for field in filter(None, text.split(";")):
        name, equals, value = field.partition("=")
        if not equals:
            raise ConfigurationError("connection_string= is not NAME=VALUE;NAME=VALUE;...")
        fields[name.strip().lower()] = value.strip()
    endpoint = fields.get("blobendpoint", "").rstrip("/")
    account = fields.get("accountname") or _account_of(endpoint)
    config = {"account_name": account} if account else {}
    for ours, theirs in (("accountkey", "account_key"), ("sharedaccesssignature", "sas_token")):
        if fields.get(ours):
            config[theirs] = fields[ours]
    if account and not endpoint:
        scheme = fields.get("defaultendpointsprotocol", "https")
        endpoint = f"{scheme}://{account}.blob.{fields.get('endpointsuffix', 'core.windows.net')}"
    return config | {"endpoint": endpoint} if endpoint else config


def _account_of(endpoint: str) -> str:
    """Return the account that an endpoint's address begins with; an emulator's ends with it."""
    address = urlsplit(endpoint)
    return address.path.strip("/") or (address.hostname or "").partition(".")[0]


# --- Google Cloud Storage --------------------------------------------------------------------------------------------

_PART_MULTIPLE: Final = 256 << 10  # all parts of an upload but the last are multiples of it
_PART_NBYTES: Final = 16 << 20
_CLIENT: Final = (
    *("project", "access", "token", "requester_pays", "endpoint_url", "session_kwargs", "requests_timeout"),
    *("consistency", "cache_timeout", "timeout", "default_location", "version_aware", "skip_instance_cache"),
    *("use_listings_cache", "listings_expiry_time", "max_paths"),
)
_PART: Final = ("default_block_size", "block_size")
_GCS_URL: Final = re.compile(r"[A-Za-z]+://(?P<bucket>[^/]+)(?:/(?P<prefix>.*))?", re.DOTALL)


def gcs_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> Place:
    """Return where a URL leads."""
    options = {**fsspec.config.conf.get("gcs", {}), **fsspec.config.conf.get("gs", {}), **options}
    _refuse_unknown(options, (*_CLIENT, *_PART), known_options, "gs://")
    match = _GCS_URL.fullmatch(path)
    if match is None:
        raise ConfigurationError("A URL of Google Cloud Storage is gs://bucket/path.", path=path)
    nbytes = option_nbytes(options, *_PART) or _PART_NBYTES
    if nbytes < _PART_MULTIPLE:
        raise ConfigurationError(f"default_block_size must be at least {_PART_MULTIPLE}, Google's smallest part.")
    client = {name: value for name, value in options.items() if name in _CLIENT}
    _check_client(client)
    return Place(match["bucket"], (match["prefix"] or "").strip("/"), nbytes - nbytes % _PART_MULTIPLE, client)


def _check_client(options: Mapping[str, Any]) -> None:
    """Refuse what gcsfs would take for something else, and find out by asking Google."""
    endpoint, token = options.get("endpoint_url"), options.get("token")
    if endpoint and not str(endpoint).startswith(("http://", "https://")):
        raise ConfigurationError("endpoint_url= must begin with http:// or https://.")
    if isinstance(token, str) and token.endswith(".json") and not os.path.exists(token):
        raise ConfigurationError("token= is the name of a JSON file, but there is no such file. A ~ is not expanded.")


def gcs_url(path: str) -> str:
    """Return one URL for a place however it is written, to compare places."""
    match = _GCS_URL.fullmatch(path)
    return path if match is None else f"gs://{match['bucket']}/{(match['prefix'] or '').strip('/')}".rstrip("/")
