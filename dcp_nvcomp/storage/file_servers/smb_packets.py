"""The bytes of SMB2's READ and WRITE, without a copy of the data in between, and their signatures.

smbprotocol packs and signs every message field by field, with some ten copies of all that is sent, which takes more
time than sending it. Its messages are used for all else.

Source: Microsoft, "[MS-SMB2]: Server Message Block (SMB) Protocol Versions 2 and 3", sections 2.2.1.2, 2.2.19 to 2.2.22
and 3.1.4.1.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.cmac import CMAC
from smbprotocol.connection import Dialects, SigningAlgorithms
from smbprotocol.header import Commands, Smb2Flags

Buffer = bytes | bytearray | memoryview
Signer = Callable[[int, bool, Sequence[Buffer]], bytes]

_HEADER: Final = struct.Struct("<4sHHIHHIIQIIQ16s")
_READ: Final = struct.Struct("<HBBIQ16sIIIHHB")
_WRITE: Final = struct.Struct("<HHIQ16sIIHHI")
_READ_ANSWER: Final = struct.Struct("<HBBII")
_PROTOCOL: Final = b"\xfeSMB"
_UNSIGNED: Final = bytes(16)
_SIGNATURE: Final = slice(48, 64)
ANSWER_NBYTES: Final = _HEADER.size + 16  # of the part of an answer that is not data


@dataclass(frozen=True)
class Route:
    """What the header of each request says, and how it is signed.

    Attributes:
        session_id: of the login.
        tree_id: of the share.
        flags: of all requests.
        sign: makes the signature of a message, given its id, whether it is an answer, and its parts; None if messages
            are not signed.
    """

    session_id: int
    tree_id: int
    flags: int
    sign: Signer | None


@dataclass(frozen=True)
class Answer:
    """The beginning of an answer.

    Attributes:
        command: what was asked for.
        status: the NTSTATUS.
        credits: how many more the server gives.
        flags: of the header.
        next_command: where the next message begins; 0 if this is the last.
        message_id: of the question.
        signature: of the message.
        data_start: where the data of a READ are, from the header's beginning.
        data_nbytes: how many there are.
    """

    command: int
    status: int
    credits: int
    flags: int
    next_command: int
    message_id: int
    signature: bytes
    data_start: int
    data_nbytes: int

    @classmethod
    def read(cls, prefix: Buffer) -> Answer | None:
        """Return what the first `ANSWER_NBYTES` bytes of a message say; None if it is encrypted, or none.

        An error is shorter, and has no data.
        """
        if len(prefix) < _HEADER.size or bytes(prefix[:4]) != _PROTOCOL:
            return None
        _, _, _, status, command, granted, flags, next_command, message_id, _, _, _, signature = _HEADER.unpack_from(
            prefix
        )
        start = nbytes = 0
        if len(prefix) == ANSWER_NBYTES:
            _, start, _, nbytes, _ = _READ_ANSWER.unpack_from(prefix, _HEADER.size)
        return cls(command, status, granted, flags, next_command, message_id, signature, start, nbytes)


def read_request(
    route: Route, message_id: int, charge: int, wanted: int, *, file_id: bytes, start: int, nbytes: int
) -> bytearray:
    """Return the message that asks for bytes of a file."""
    body = _READ.pack(49, ANSWER_NBYTES, 0, nbytes, start, file_id, 0, 0, 0, 0, 0, 0)
    return _request(route, Commands.SMB2_READ, message_id, charge, wanted, body, ())


def write_request(
    route: Route, message_id: int, charge: int, wanted: int, *, file_id: bytes, start: int, data: memoryview
) -> bytearray:
    """Return what must be sent before the bytes that are written to a file; see `read_request`."""
    body = _WRITE.pack(49, _HEADER.size + _WRITE.size, len(data), start, file_id, 0, 0, 0, 0, 0)
    return _request(route, Commands.SMB2_WRITE, message_id, charge, wanted, body, (data,))


def _request(
    route: Route, command: int, message_id: int, charge: int, wanted: int, body: bytes, data: Sequence[memoryview]
) -> bytearray:
    flags = route.flags | (Smb2Flags.SMB2_FLAGS_SIGNED if route.sign else 0)
    fields = (_PROTOCOL, 64, charge, 0, command, wanted, flags, 0, message_id, 0, route.tree_id, route.session_id)
    message = bytearray(_HEADER.pack(*fields, _UNSIGNED) + body)
    if route.sign:
        message[_SIGNATURE] = route.sign(message_id, False, (message, *data))
    return message


def is_signed_well(sign: Signer, answer: Answer, parts: Sequence[Buffer]) -> bool:
    """Return whether an answer has the signature that it should have."""
    first = bytearray(parts[0])
    first[_SIGNATURE] = _UNSIGNED
    return hmac.compare_digest(sign(answer.message_id, True, (first, *parts[1:])), answer.signature)


def signer(dialect: int, algorithm: int | None, key: bytes) -> Signer:
    """Return what signs messages as a connection has agreed to."""
    if dialect < Dialects.SMB_3_0_0:
        return lambda message_id, is_answer, parts: _hmac(key, parts)
    if dialect < Dialects.SMB_3_1_1 or algorithm in (None, SigningAlgorithms.AES_CMAC):
        return lambda message_id, is_answer, parts: _updated(CMAC(algorithms.AES(key)), parts).finalize()
    if algorithm == SigningAlgorithms.HMAC_SHA256:
        return lambda message_id, is_answer, parts: _hmac(key, parts)
    return lambda message_id, is_answer, parts: _gmac(key, message_id, is_answer, parts)


def _updated(made: Any, parts: Sequence[Buffer]) -> Any:
    for part in parts:
        made.update(part)
    return made


def _hmac(key: bytes, parts: Sequence[Buffer]) -> bytes:
    return bytes(_updated(hmac.new(key, digestmod="sha256"), parts).digest()[:16])


def _gmac(key: bytes, message_id: int, is_answer: bool, parts: Sequence[Buffer]) -> bytes:
    nonce = struct.pack("<QI", message_id, is_answer)
    made = Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()
    for part in parts:
        made.authenticate_additional_data(part)
    made.finalize()
    return made.tag
