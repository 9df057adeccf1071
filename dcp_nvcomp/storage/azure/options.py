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

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.options import unknown_option

__all__ = ["AZURE", "AzurePlace", "azure_place", "azure_url"]

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
_OTHERS: Final = ("anon", "connection_string", "default_block_size", "use_listings_cache", "skip_instance_cache")
_CONNECTION_STRING: Final = "AZURE_STORAGE_CONNECTION_STRING"
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
    """Return where a URL leads.

    Args:
        path: `az://container/prefix`, or `abfs://container@account.dfs.core.windows.net/prefix`.
        options: as adlfs takes them.
        known_options: names of the caller's own options, for hints at typing errors.

    Raises:
        ConfigurationError: an option is unknown, or there is no account.
    """
    known = (*_SETTINGS, *_OTHERS)
    for option in options.keys() - set(known):
        close = difflib.get_close_matches(option, [*known_options, *known], n=1, cutoff=0.75)
        raise unknown_option(option, close, f"az:// takes {', '.join(sorted(known))}")
    match = _URL.fullmatch(path)
    if match is None:
        raise ConfigurationError("A URL of Azure is az://container/path.", path=path)
    container, host = match["container"], match["host"]
    config: dict[str, Any] = {}
    if container is None:
        container = host
    else:
        config["account_name"] = host.partition(".")[0]
    text = options.get("connection_string") or _unless(options, os.environ.get(_CONNECTION_STRING))
    if text:
        config |= _of_connection_string(text)
    for option, (name, variable) in _SETTINGS.items():
        value = options.get(option) or (None if text else os.environ.get(variable))
        if value:
            config[name] = value
    if options.get("anon"):
        config["skip_signature"] = True
    if not config.get("account_name"):
        raise ConfigurationError(
            "There is no account: give account_name= or connection_string=, or set AZURE_STORAGE_ACCOUNT_NAME or "
            f"{_CONNECTION_STRING}.",
            path=path,
        )
    return AzurePlace(container, (match["prefix"] or "").strip("/"), config)


def azure_url(path: str) -> str:
    """Return one URL for a place however it is written, to compare places within an account."""
    match = _URL.fullmatch(path)
    return path if match is None else f"az://{match['container'] or match['host']}/{(match['prefix'] or '').strip('/')}"


def _unless(options: Mapping[str, Any], text: str | None) -> str | None:
    """Return the environment's connection string, unless the options say who we are."""
    return None if any(options.get(name) for name in ("account_name", "account_key", "sas_token")) else text


def _of_connection_string(text: str) -> dict[str, str]:
    """Take a connection string apart, as the portal of Azure shows it."""
    fields = {}
    for field in filter(None, text.split(";")):
        name, equals, value = field.partition("=")
        if not equals:
            raise ConfigurationError("connection_string= is not NAME=VALUE;NAME=VALUE;...")
        fields[name.strip().lower()] = value.strip()
    account = fields.get("accountname", "")
    config = {"account_name": account}
    for ours, theirs in (("accountkey", "account_key"), ("sharedaccesssignature", "sas_token")):
        if ours in fields:
            config[theirs] = fields[ours]
    if "blobendpoint" in fields:
        config["endpoint"] = fields["blobendpoint"].rstrip("/")
    elif account and "endpointsuffix" in fields:
        scheme = fields.get("defaultendpointsprotocol", "https")
        config["endpoint"] = f"{scheme}://{account}.blob.{fields['endpointsuffix']}"
    return config
