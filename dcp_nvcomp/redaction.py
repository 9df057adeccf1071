"""Keep passwords and access tokens out of messages, log lines and reports, and what a terminal would obey."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

# "://user:password@"; the password may hold a slash, unless what precedes it is a host, and it begins with a port
_PASSWORD: Final = re.compile(
    r"(://(?!(?:[\w\-]*\.[\w.\-]*|localhost):\d+[/?#\s]|[A-Za-z]?:[/?#\s])[^/?#@:\s\[]*:(?!:))([^/?#\s]+(?=@)|\S+?(?=@))"
)
# "://token@"; in Azure's and Oracle's URLs a container or bucket has this place
_TOKEN: Final = re.compile(
    r"((?<!abfs)(?<!abfss)(?<!wasb)(?<!wasbs)(?<!\baz)(?<!\boci)://)([^/?#@:\s]{16,})(?=@)", re.IGNORECASE
)
_PARAMETER: Final = re.compile(r"([?&;]([\w.\-]+)=)([^&#\s'\"]+)")

# Names of options and of parameters in URLs, in lower case, with "_" between their words.
_SECRET_NAME: Final = re.compile(
    r"secret|passw|passphrase|passcode|credential|signature|token(?!iz)|connection_string"
    r"|(^|_)(sig|sas|pwd|pass|o?auth|authorization|p_?key)(_|$)"
    r"|(account|api|private|access|encryption|customer|shared|master|auth|ssh)_?keys?$"
)
_KEY_PARAMETER: Final = re.compile(r"(^|_)key(_|$)")  # as an option, `key` is the public half of S3's pair
_PUBLIC_NAME: Final = re.compile(r"timeout|(^|_)(mechanism|authority|method|protocol|type)$")
# What gcsfs takes for `token` instead of a token.
_NO_TOKENS: Final = ("cloud", "browser", "cache", "anon", "google_default")
_SHORT: Final = 4
HIDDEN: Final = "***"


def _words(name: str) -> str:
    return re.sub(r"[.\-]", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)).lower()


def _is_public(name: str) -> bool:
    """True if a name is of what is no secret, though it may sound so: `auth_type`, `sasl_mechanism`."""
    return _PUBLIC_NAME.search(_words(name)) is not None


def is_secret(name: str, *, parameter: bool = False) -> bool:
    """True if the value of an option, or of a parameter in a URL, must not be shown."""
    if _is_public(name):
        return False
    words = _words(name)
    return bool(_SECRET_NAME.search(words) or (parameter and _KEY_PARAMETER.search(words)))


def _hide_parameter(match: re.Match[str]) -> str:
    return match[1] + HIDDEN if is_secret(match[2], parameter=True) else match[0]


def without_secrets(text: str) -> str:
    """Return `text` with the passwords and access tokens of the URLs in it replaced by `***`."""
    for pattern in (_PASSWORD, _TOKEN):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _PARAMETER.sub(_hide_parameter, text)


def printable(text: str, *, but: str = "") -> str:
    """Return text without anything that a terminal would obey or an encoding would choke on."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in but or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


class RedactedError(Exception):
    """A storage client's error whose own words held a secret, with `***` in its place."""


class Redactor:
    """The secrets of one storage, to be hidden wherever its client quotes them."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        words = {*_in_url(path), *_in_options(options)}
        words |= {form for word in words for form in (unquote(word), quote(word, safe=""), repr(word)[1:-1])}
        found = sorted(filter(None, words), key=len, reverse=True)
        # whole words only: a password like "run" must not garble every message
        self._pattern = re.compile("|".join(map(_whole_word, found))) if found else None

    def __call__(self, text: str) -> str:
        text = without_secrets(text)
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)

    def error(self, error: Exception) -> Exception:
        """Return `error`, or one with its redacted words if printing it, or what it came from, would show a secret."""
        links = list(_chain(error))
        if not any(self(text) != text for link in links for text in (str(link), repr(link))):
            return error
        stand_in = RedactedError(self(f"{type(error).__name__}: {error}"))
        replies = (getattr(link, "response", None) for link in links)
        # S3's reply; s3fs raises an OSError from the error that has it
        stand_in.response = next((reply for reply in replies if reply is not None), None)  # type: ignore[attr-defined]
        return stand_in


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came from, each once: an error that is raised again may have come from itself."""
    link: BaseException | None = error
    seen = set[int]()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _whole_word(word: str) -> str:
    if len(word) < _SHORT:  # only as a quoted or assigned value: "a" must not garble every message
        return rf"(?<=['\"]){re.escape(word)}(?=['\"])|(?<==){re.escape(word)}(?![^'\"\s,;&)}}])"
    before = r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", word) else ""
    return f"{before}{re.escape(word)}{after}"


def _in_url(text: str) -> Iterator[str]:
    for pattern in (_PASSWORD, _TOKEN):
        yield from (match[2] for match in pattern.finditer(text))
    yield from (match[3] for match in _PARAMETER.finditer(text) if is_secret(match[2], parameter=True))


def _in_options(value: Any, *, secret: bool = False) -> Iterator[str]:
    """Yield the secret strings of options, and of the mappings and sequences in them."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "token" or inner not in _NO_TOKENS:
                yield from _in_options(inner, secret=is_secret(str(name)) or (secret and not _is_public(str(name))))
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _in_options(inner, secret=secret)
    elif isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode("latin-1")
        if secret:
            yield text
        yield from _in_url(text)
    elif secret and isinstance(value, int | float) and not isinstance(value, bool):  # `-o password=12345` is JSON
        yield str(value)
