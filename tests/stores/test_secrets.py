"""No password, key or token of a store is told by anything: each is marked, and all that is said is searched for it.

With the right secrets, with wrong ones, and where no server is. Errors with all their causes, log records at DEBUG,
`repr`, reports, `storage_meta`, and pickles of what goes from rank to rank.
"""

from __future__ import annotations

import json
import pickle
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import pytest
from google.oauth2.credentials import Credentials

from dcp_nvcomp import CheckpointManager, NvcompReader, NvcompWriter, convert, open_checkpoint, tools
from dcp_nvcomp.runs import clean_run, list_run
from dcp_nvcomp.storage.open import open_filesystem, real_place
from tests.cli.checkpoints import run
from tests.errors.test_secrets_everywhere import nothing_tells, what_is_said
from tests.servers.azurite import AzuriteServer
from tests.servers.gcs import GcsServer
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer

from .kinds import parameters
from .places import Place

WRONG = "wr0ng/S3cr3t+wr0ng"
_WRONG_KEY = "d3IwbmcvUzNjcjN0K3dyMG5n"  # Azure's are base64


@dataclass(frozen=True)
class Login:
    """One way to log in, with the right secret and with a wrong one."""

    place: Place  # with the right one
    wrong: Place | None  # with the wrong one; None if the server takes any
    words: tuple[str, ...]  # what nothing may tell


def _s3(_: object, place: Place) -> dict[str, Login]:
    marked = "m4rked/S3+S3cr3t"
    return {"secret": Login(replace(place, options={**place.options, "secret": marked}), None, (marked,))}


def _azure(server: AzuriteServer, place: Place) -> dict[str, Login]:
    signed = server.signed(place.url, "rcwdl")
    signature = signed["sas_token"].partition("sig=")[2].partition("&")[0]
    wrong_token = signed["sas_token"].replace(signature, WRONG)
    text = f"AccountName=ckpt;AccountKey={server.key};BlobEndpoint={server.endpoint}"

    def given(**options: Any) -> Place:
        return replace(place, options=options)

    return {
        "account_key": Login(place, given(**{**place.options, "account_key": _WRONG_KEY}), (server.key,)),
        "sas_token": Login(given(**signed), given(**{**signed, "sas_token": wrong_token}), (signature,)),
        "connection_string": Login(
            given(connection_string=text),
            given(connection_string=text.replace(server.key, _WRONG_KEY)),
            (server.key,),
        ),
    }


def _gcs(_: GcsServer, place: Place) -> dict[str, Login]:
    def given(token: str) -> Place:
        return replace(place, options={**place.options, "token": Credentials(token)})  # type: ignore[no-untyped-call]

    marked = "only:get,list,create,delete,m4rked-t0ken"
    return {"token": Login(given(marked), given("nobody"), ("m4rked-t0ken",))}


def _sftp(server: SftpServer, place: Place) -> dict[str, Login]:
    passphrase = "m4rked/P4ssphrase"
    key = server.key.with_name("locked")
    if not key.exists():
        server.let_in(server.make_key(key.name, passphrase))

    def given(url: str, **options: Any) -> Place:
        known = {"known_hosts": place.options["known_hosts"]}
        return replace(place, url=url, options={**known, **options})

    with_password = place.url.replace("@", f":{quote(WRONG, safe='')}@", 1)
    return {
        "passphrase": Login(
            given(place.url, client_keys=[str(key)], passphrase=passphrase),
            given(place.url, client_keys=[str(key)], passphrase=WRONG),
            (passphrase,),
        ),
        "password in the URL": Login(
            given(with_password, client_keys=[str(server.key)]), given(with_password, client_keys=[]), (WRONG,)
        ),
        "password": Login(place, given(place.url, password=WRONG, client_keys=[]), (WRONG,)),
    }


def _smb(server: SmbServer, place: Place) -> dict[str, Login]:
    def in_url(password: str) -> Place:
        login = f"smb://{server.user}:{quote(password, safe='')}@"
        return replace(place, url=place.url.replace("smb://", login), options={})

    return {
        "password": Login(place, replace(place, options={**place.options, "password": WRONG}), (server.password,)),
        "password in the URL": Login(in_url(server.password), in_url(WRONG), (server.password,)),
    }


_LOGINS: dict[str, Callable[[Any, Place], dict[str, Login]]] = {
    "moto": _s3,
    "azure": _azure,
    "gcs": _gcs,
    "sftp": _sftp,
    "smb": _smb,
}
_WAYS = {
    "moto": ("secret",),
    "azure": ("account_key", "sas_token", "connection_string"),
    "gcs": ("token",),
    "sftp": ("passphrase", "password in the URL", "password"),
    "smb": ("password", "password in the URL"),
}


def _parameters(*names: str) -> list[Any]:
    return [
        pytest.param((*one.values, way), marks=one.marks, id=f"{one.id}-{way}")
        for one in parameters(*names)
        for way in _WAYS[str(one.id)]
    ]


@pytest.fixture(params=_parameters(*_WAYS))
def login(request: pytest.FixtureRequest, kind_named: Callable[[str], Any]) -> Iterator[Login]:
    name, way = request.param
    kind = kind_named(name)
    place = Place(*kind.place(), deadline_seconds=10)
    yield _LOGINS[name](kind, place)[way]
    kind.remove(place.url)


@pytest.fixture
def said(login: Login) -> Iterator[list[str]]:
    with nothing_tells(*login.words, WRONG, _WRONG_KEY) as said:
        yield said


def _all_of(place: Place) -> list[Callable[[], object]]:
    url, options = place.url, {**place.options, "storage_deadline_seconds": place.deadline_seconds}
    return [
        lambda: place.save(1),
        lambda: place.loaded(),
        lambda: NvcompReader(url, **options).read_metadata(),
        lambda: tools.verify(url, storage_options=options),
        lambda: tools.recover(url, storage_options=options),
        lambda: tools.inspect(url, storage_options=options),
        lambda: clean_run(url, storage_options=options),
        lambda: list_run(url, storage_options=options),
        lambda: open_checkpoint(url, **options).metadata,
        lambda: CheckpointManager(url, every=1, run_id="job", **options).close(),
        lambda: convert(url, "/nowhere/at/all", storage_options=options),
        lambda: open_filesystem(url, storage_options=options).publish("a", b"x"),
    ]


def _told(work: Callable[[], object]) -> str:
    """Return all that an error tells, its pickle too, or what was returned."""
    try:
        result = work()
    except BaseException as error:
        raised = error

        def again() -> object:
            raise raised

        parts = [what_is_said(again)]
        for failure, _ in getattr(error, "failures", {}).values():
            parts += [repr(failure), repr(vars(failure)), pickle.dumps(failure).decode("latin-1")]
        if not hasattr(error, "failures"):
            parts.append(pickle.dumps(error).decode("latin-1"))
        return "\n".join(parts)
    texts = [str(result), repr(result)]
    if hasattr(result, "to_json"):
        texts.append(json.dumps(result.to_json()))
    return "\n".join(texts)


@pytest.mark.ci
def test_what_works_tells_no_secret(login: Login, said: list[str]) -> None:
    place = login.place
    writer, reader = place.writer(), NvcompReader(place.url, **place.options)
    for number in (1, 2):
        assert place.save(number, writer) is None
    assert place.loaded() == 2
    said += [str(writer.last_save), repr(writer.last_save), repr(writer), repr(reader), repr(writer.storage_meta())]
    said += [writer.checkpoint_id, reader.checkpoint_id, repr(place.filesystem()), real_place(place.url)]
    metadata = reader.read_metadata()
    said += [repr(metadata.storage_meta), pickle.dumps(metadata.storage_meta).decode("latin-1")]
    said.append(pickle.dumps(writer.last_save).decode("latin-1"))
    filesystem = place.filesystem()
    said += [filesystem.read_all(name, limit_nbytes=1 << 24).decode("latin-1") for name in filesystem.list_names()]
    said += [_told(work) for work in _all_of(place)[2:8]]
    with CheckpointManager(place.below("run").url, every=1, run_id="job", **place.options) as manager:
        manager.save(1, place.state(1))
        manager.wait()
        said += [repr(manager), str(manager.report()), repr(manager.report())]
    given = [f"{name}={value}" for name, value in place.options.items() if isinstance(value, str)]
    if len(given) == len(place.options):  # what a command line can give
        for command in (("inspect",), ("verify",), ("verify", "--json"), ("clean",), ("ls",)):
            status, output, errors = run(*command, place.url, *(word for one in given for word in ("-o", one)))
            assert status == 0, errors
            said += [output, errors]


@pytest.mark.parametrize("login", _parameters("azure", "gcs", "sftp", "smb"), indirect=True)  # moto takes any
def test_what_is_refused_tells_no_secret(login: Login, said: list[str]) -> None:
    assert login.wrong is not None
    for work in _all_of(login.wrong):
        said.append(_told(work))
    assert isinstance(login.wrong.save(1), Exception)


@pytest.mark.ci
def test_no_server_tells_no_secret(login: Login, said: list[str]) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    place = replace(_at_port(login.place, port), deadline_seconds=0.5)
    for work in _all_of(place):
        said.append(_told(work))


def _at_port(place: Place, port: int) -> Place:
    def moved(value: Any) -> Any:
        return re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", value) if isinstance(value, str) else value

    return replace(place, url=moved(place.url), options={name: moved(value) for name, value in place.options.items()})


@pytest.mark.parametrize("option", ["thread_count", "storage_deadline_seconds"])
def test_what_cannot_work_tells_no_secret(login: Login, said: list[str], option: str) -> None:
    place = login.place
    said.append(_told(lambda: NvcompWriter(place.url, **{option: -1}, **place.options)))
    said.append(_told(lambda: NvcompWriter(place.url, paswort=WRONG, **place.options)))


@pytest.mark.ci
@pytest.mark.gcs
def test_a_token_that_was_renewed_is_not_told() -> None:
    """Nothing has said that it must be hidden; aiohttp can't read the answer, and quotes the request's headers."""
    token: Any = Credentials("first")  # type: ignore[no-untyped-call]
    with socket.socket() as server, nothing_tells(WRONG) as said:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        threading.Thread(target=_answer_nonsense, args=(server,), daemon=True).start()
        options = {"token": token, "endpoint_url": f"http://127.0.0.1:{server.getsockname()[1]}"}
        filesystem = open_filesystem("gs://b/a", storage_options=options, deadline_seconds=2)
        token.token = WRONG
        said.append(what_is_said(lambda: filesystem.file_nbytes("x")))


def _answer_nonsense(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 what?\r\n\r\n")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("url", "options"),
    [
        pytest.param(
            *("gs://b/a", {"token": {"refresh_token": WRONG, "client_secret": WRONG, "client_id": "i"}}),
            marks=pytest.mark.gcs,
        ),
        pytest.param(
            *("az://c/a", {"account_name": "a", "client_secret": WRONG, "tenant_id": "t", "client_id": "i"}),
            marks=pytest.mark.azure,
        ),
    ],
)
def test_services_that_log_in_elsewhere_tell_no_secret(url: str, options: dict[str, Any]) -> None:
    endpoint = {"gs": {"endpoint_url": "http://127.0.0.1:9"}, "az": {"endpoint": "http://127.0.0.1:9/a"}}[url[:2]]
    with nothing_tells(WRONG) as said:
        said.append(
            what_is_said(
                lambda: open_filesystem(url, storage_options={**options, **endpoint}, deadline_seconds=2).file_nbytes(
                    "x"
                )
            )
        )
