"""No password and no access token gets into a message: here the function that removes them from text."""

from __future__ import annotations

import pickle

import pytest

from dcp_nvcomp import CheckpointError, RankFailedError, StorageError
from dcp_nvcomp.redaction import Redactor, without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("smb://user:s3cr3t@host/share/run", "smb://user:***@host/share/run"),
        ("smb://DOMAIN;user:s3cr3t@host:445/share", "smb://DOMAIN;user:***@host:445/share"),
        ("simplecache::smb://u:s3cr3t@h/x", "simplecache::smb://u:***@h/x"),
        ("zip://a.zip::sftp://u:s3cr3t@h/x::sftp://u:s3cr3t@h/y", "zip://a.zip::sftp://u:***@h/x::sftp://u:***@h/y"),
        ("ftp://:s3cr3t@h/x", "ftp://:***@h/x"),
        ("ftp://u:s3/cr3t@h/x", "ftp://u:***@h/x"),
        ("ftp://u:s3@cr3t@h/x", "ftp://u:***@h/x"),
        ("smb://user:12/45cr3t@host", "smb://user:***@host"),
        ("smb://u:12/45cr3t@host", "smb://u:***@host"),
        ("https://s3cr3t0123456789@host/x", "https://***@host/x"),
        ("ftp://u:s3?cr3t@h/x", "ftp://u:***@h/x"),
        ("Can't open 'ftp://u:s3cr3t@h/x', nor ftp://h.", "Can't open 'ftp://u:***@h/x', nor ftp://h."),
        ("https://h/run?sv=2024&sig=s3cr3t%3D&se=1", "https://h/run?sv=2024&sig=***&se=1"),
        ("https://h/x?X-Amz-Signature=s3cr3t", "https://h/x?X-Amz-Signature=***"),
        ("https://h/x?access_token=s3cr3t#part", "https://h/x?access_token=***#part"),
        ("'https://h/x?Password=s3cr3t'", "'https://h/x?Password=***'"),
        ("https://h/x?apikey=s3cr3t&key=s3cr3t", "https://h/x?apikey=***&key=***"),
        ("https://h/x?AWSAccessKeyId=s3cr3t&auth=s3cr3t", "https://h/x?AWSAccessKeyId=***&auth=***"),
        ("https://h/x?X-Amz-Security-Token=s3cr3t;sig=s3cr3t", "https://h/x?X-Amz-Security-Token=***"),
    ],
)
def test_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    error = CheckpointError(f"About {text}", path=text)
    for form in (str(error), repr(error), error.message, str(error.args), str(error.path), repr(pickle.dumps(error))):
        assert "s3cr3t" not in form and "cr3t" not in form


@pytest.mark.parametrize(
    "text",
    [
        "/data/run@1/step-1",
        "s3://bucket/run@v2/step:3",
        "sftp://user@host:2222/run@3/x",
        "http://127.0.0.1:9000/bucket/a@b",
        "http://127.0.0.1:9000 and a@b",
        "http://[::1]:9000/a@b",
        "abfs://container@account.dfs.core.windows.net/run?timeout=3",
        "abfs://my-training-checkpoints@account.dfs.core.windows.net/run",
        "https://h/x?monkey=1&design=flat&keyframe=3&tokenizer=gpt2",
        "https://h/x?auth_type=basic&authority=me&sasl_mechanism=PLAIN&auth_timeout=9",
        "http://localhost:9000/bucket/a@b",
        "memory://run",
        "C:\\run",
        "",
    ],
)
def test_shown(text: str) -> None:
    assert without_secrets(text) == text


def test_assigned_later() -> None:
    """Much code adds the path to an error on its way up."""
    error = StorageError("Broken.")
    error.path, error.message = "ftp://u:s3cr3t@h/x", "No ftp://u:s3cr3t@h/y."
    setattr(error, "path", "ftp://u:s3cr3t@h/x")  # noqa: B010  as unpickling does
    assert (error.path, error.message) == ("ftp://u:***@h/x", "No ftp://u:***@h/y.")
    for form in (str(error), repr(vars(error)), repr(pickle.dumps(error))):
        assert "s3cr3t" not in form
    loaded = pickle.loads(pickle.dumps(error))
    assert (str(loaded), vars(loaded)) == (str(error), vars(error))
    error.path = None
    assert error.path is None


def test_pickles_keep_the_attributes_by_name() -> None:
    """Ranks with another version of this package set them by name."""
    error = StorageError("Broken.", path="x", fqn="w", byte_range=(1, 2), errno=5)
    _, (_, message, attributes) = error.__reduce__()
    public = {"message": "Broken.", "path": "x", "fqn": "w", "byte_range": (1, 2), "errno": 5}
    assert (message, {name: attributes[name] for name in public}) == ("Broken.", public)


def test_what_a_client_says() -> None:
    error = StorageError.from_os_error("write", "smb://u:s3cr3t@h/x", OSError(5, "smb://u:s3cr3t@h/x is gone"))
    assert str(error) == "Could not write: OSError: [Errno 5] smb://u:***@h/x is gone. (file 'smb://u:***@h/x')"


OPTIONS = {
    "password": "s3cr3t",
    "client_kwargs": {"aws_secret_access_key": "s3/cr3t+", "region_name": "eu-west-1"},
    "endpoint_url": "http://u:cr3t@host:1",
    "token": {"refresh": ["tok3n"]},
    "key": "public",
    "port": 3,
}


@pytest.mark.parametrize("word", ["s3cr3t", "s3/cr3t+", "s3%2Fcr3t%2B", "cr3t", "tok3n", "fr0m-url"])
def test_values_of_options(word: str) -> None:
    redact = Redactor("smb://u:fr0m-url@h/x", OPTIONS)
    assert redact(f"login with {word} refused") == "login with *** refused"
    assert redact(f"password={word!r}") == "password='***'"
    assert redact("public eu-west-1 xcr3ty run 3") == "public eu-west-1 xcr3ty run 3"


SECRET_NAMES = (
    "secret aws_secret_access_key passwd api_key accountKey sas_token sas auth proxy_auth pkey password_hash pwd "
    "connection_string Authorization token private_key client-secret"
)


@pytest.mark.parametrize("name", SECRET_NAMES.split())
@pytest.mark.parametrize("value", ["s3cr3t", "cloudy", 123456, ["s3cr3t"], {"x": "s3cr3t"}])
def test_names_of_secret_options(name: str, value: object) -> None:
    shown = next(iter(value.values())) if isinstance(value, dict) else value[0] if isinstance(value, list) else value
    assert Redactor("memory://x", {name: value})(f"login {shown} refused") == "login *** refused"


@pytest.mark.parametrize(
    "name", ["sasl_mechanism", "auth_timeout", "authority", "auth_type", "auth_protocol", "token_type", "monkey", "key"]
)
def test_names_of_other_options(name: str) -> None:
    redact = Redactor("memory://x", {name: "PLAIN", "client_kwargs": {name: "PLAIN"}})
    assert redact("login PLAIN refused") == "login PLAIN refused"


@pytest.mark.parametrize("word", ["cloud", "browser", "cache", "anon", "google_default"])
def test_words_of_gcsfs(word: str) -> None:
    """They may be a bucket, too; but a password may be any word."""
    assert Redactor("gs://b", {"token": word})(f"gs://{word}/x") == f"gs://{word}/x"
    assert Redactor("gs://b", {"password": word})(f"no {word}") == "no ***"


def test_short_secrets() -> None:
    redact = Redactor("memory://x", {"password": "a", "token": 12})
    assert redact("a file with a name of 12 letters") == "a file with a name of 12 letters"
    assert redact("password='a', password=a, token=12") == "password='***', password=***, token=***"
    assert redact("'a file' of key 'abc', n=123") == "'a file' of key 'abc', n=123"


def test_the_reply_of_s3_is_kept() -> None:
    """s3fs raises an OSError from the client's error, which has the status."""
    redact, error, cause = Redactor("s3://x", OPTIONS), OSError(5, "s3cr3t refused"), ValueError("no")
    cause.response = {"ResponseMetadata": {"HTTPStatusCode": 412}}  # type: ignore[attr-defined]
    error.__cause__ = cause
    assert redact.error(error).response == cause.response  # type: ignore[attr-defined]


def test_errors_of_clients() -> None:
    redact = Redactor("smb://u:p@h/x", OPTIONS)
    harmless, telling = OSError(5, "broken"), OSError(5, "s3cr3t refused")
    assert redact.error(harmless) is harmless
    assert "s3cr3t" not in repr(redact.error(telling)) and "OSError" in str(redact.error(telling))
    harmless.__cause__ = telling
    assert redact.error(harmless).__cause__ is None


def test_an_error_that_came_from_itself() -> None:
    """As one that a connection keeps, and raises for each request that it can't send any more."""
    lost, request = OSError(5, "s3cr3t is lost"), ValueError("broken")
    request.__cause__, lost.__cause__ = lost, request
    assert "s3cr3t" not in repr(Redactor("smb://u:p@h/x", OPTIONS).error(request))
    harmless = ValueError("broken")
    harmless.__context__ = OSError(5, "broken")
    harmless.__context__.__context__ = harmless
    assert Redactor("smb://u:p@h/x", OPTIONS).error(harmless) is harmless


@pytest.mark.parametrize("harm", ["\x1b[2J", "\x9b1m", "\r", "\x07", "\x7f", "\u202e", "\u2028", "\ud800", "\0"])
def test_nothing_is_obeyed_by_a_terminal(harm: str) -> None:
    error = CheckpointError(f"It says {harm}.", path=f"run/{harm}", fqn=harm)
    error.message += f" And {harm}."
    for one in (error, pickle.loads(pickle.dumps(error)), StorageError.from_os_error("read", harm, OSError(harm))):
        assert harm not in str(one) and harm not in repr(one)
        str(one).encode()
    assert harm not in str(RankFailedError.of({0: harm, 1: harm}))


def test_text_of_all_languages_stays() -> None:
    text = "Zeile 1\n\tZeile 2: über 3\u00a0GB, 日本語"
    assert CheckpointError(text).message == text
