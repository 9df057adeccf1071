"""Keep passwords and access tokens out of messages, log lines and reports.

without_secrets(text)     hides what the form of a URL shows to be a secret
Redactor(path, options)   also hides the values of secret options, wherever a client quotes them
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

__all__ = ["Redactor", "without_secrets"]

# "://user:password@"; the second form is a password with a slash in it, unless what follows the colon is a port
_PASSWORD: Final = re.compile(r"(://[^/?#@:\s\[]*:(?!:))([^/?#\s]+(?=@)|(?!\d*[/?#\s])\S+?(?=@))")
_QUERY: Final = re.compile(
    r"([?&][\w.\-]*(?:sig|secret|passw|token|credential|key|auth)[\w.\-]*=)([^&#\s'\"]+)", re.IGNORECASE
)
# Names of storage options; `key` alone is the public half of S3's pair.
_SECRET_OPTION: Final = re.compile(
    r"secret|passw|passphrase|token|credential|(account|api|private|access|encryption|customer)_?key$|pkey|sas"
    r"|connection_string|^auth",
    re.IGNORECASE,
)
HIDDEN: Final = "***"


def without_secrets(text: str) -> str:
    """Return `text` with the passwords and access tokens of the URLs in it replaced by `***`.

    Everything that puts a path or URL into a message, a log line or a report uses this; `CheckpointError` does so by
    itself.

    Example:
        >>> without_secrets("simplecache::smb://user:secret@host/share/run?sig=abc&x=1")
        'simplecache::smb://user:***@host/share/run?sig=***&x=1'
    """
    return _QUERY.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1{HIDDEN}", text))


class RedactedError(Exception):
    """A storage client's error whose own words held a secret, with `***` in its place."""


class Redactor:
    """The secrets of one storage, to be hidden wherever its client quotes them.

    Args:
        path: the checkpoint's path or URL.
        options: the storage options.
    """

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        words = {*_in_url(path), *_in_options(options)}
        words |= {form for word in words for form in (unquote(word), quote(word, safe=""), repr(word)[1:-1])}
        found = sorted(filter(None, words), key=len, reverse=True)
        # whole words only: a password like "run" must not garble every message
        self._pattern = re.compile("|".join(map(_whole_word, found))) if found else None

    def __call__(self, text: str) -> str:
        """Return `text` without the secrets."""
        text = without_secrets(text)
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)

    def error(self, error: Exception) -> Exception:
        """Return `error`, or one with its redacted words if printing it, or what it came from, would show a secret."""
        link: BaseException | None = error
        while link is not None:
            if any(self(text) != text for text in (str(link), repr(link))):
                stand_in = RedactedError(self(f"{type(error).__name__}: {error}"))
                stand_in.response = getattr(error, "response", None)  # type: ignore[attr-defined]  # the S3 reply
                return stand_in
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        return error


def _whole_word(word: str) -> str:
    before = r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", word) else ""
    return f"{before}{re.escape(word)}{after}"


def _in_url(text: str) -> Iterator[str]:
    for pattern in (_PASSWORD, _QUERY):
        yield from (match[2] for match in pattern.finditer(text))


def _in_options(value: Any, *, secret: bool = False) -> Iterator[str]:
    """Yield the secret strings of options, and of the mappings and sequences in them."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _in_options(inner, secret=secret or _SECRET_OPTION.search(str(name)) is not None)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _in_options(inner, secret=secret)
    elif isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode("latin-1")
        if secret:
            yield text
        yield from _in_url(text)
