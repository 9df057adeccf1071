"""The options of `az://` and `abfs://`: those that adlfs takes, so that a URL and its options serve both.

URL, options, fsspec's config files, environment -> container, prefix, settings of obstore's AzureStore
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from dcp_nvcomp.calls.unknown_options import unknown_option
from dcp_nvcomp.errors import ConfigurationError

AZURE: Final = ("az", "abfs", "abfss")

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
_URL: Final = re.compile(r"[A-Za-z]+://(?:(?P<container>[^/@]+)@)?(?P<host>[^/]+)(?:/(?P<prefix>.*))?", re.DOTALL)


@dataclass(frozen=True)
class AzurePlace:
    """Where a checkpoint is, and how to get there.

    Attributes:
        container: of the account.
        prefix: its names' beginning.
        config: settings of obstore's `AzureStore`; they hold secrets.
    """

    container: str
    prefix: str
    config: Mapping[str, Any]


def azure_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> AzurePlace:
    """Return where a URL leads."""
    known = (*_SETTINGS, *_OTHERS)
    for option in sorted(options.keys() - set(known)):
        close = difflib.get_close_matches(option, [*known_options, *known], n=1, cutoff=0.75)
        raise unknown_option(option, close, call=known_options, storage="az://", takes=known)
    match = _URL.fullmatch(path)
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
    return AzurePlace(container, _checked((match["prefix"] or "").strip("/"), path), config)


def azure_url(path: str) -> str:
    """Return one URL for a place however it is written, to compare places within an account."""
    match = _URL.fullmatch(path)
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
        scheme, suffix = (
            fields.get("defaultendpointsprotocol", "https"),
            fields.get("endpointsuffix", "core.windows.net"),
        )
        endpoint = f"{scheme}://{account}.blob.{suffix}"
    return config | {"endpoint": endpoint} if endpoint else config


def _account_of(endpoint: str) -> str:
    """Return the account that an endpoint's address begins with; an emulator's ends with it."""
    address = urlsplit(endpoint)
    return address.path.strip("/") or (address.hostname or "").partition(".")[0]
