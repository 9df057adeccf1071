"""What the NTSTATUS codes of an SMB server mean."""

from __future__ import annotations

import errno
from typing import Final

from smbprotocol.header import NtStatus

__all__ = ["ERRNO", "LOST"]

ERRNO: Final = {
    NtStatus.STATUS_ACCESS_DENIED: errno.EACCES,
    NtStatus.STATUS_CANNOT_DELETE: errno.EACCES,
    NtStatus.STATUS_DELETE_PENDING: errno.ENOENT,  # removed, but somebody still has it open
    NtStatus.STATUS_DIRECTORY_NOT_EMPTY: errno.ENOTEMPTY,
    NtStatus.STATUS_DISK_FULL: errno.ENOSPC,
    NtStatus.STATUS_FILE_IS_A_DIRECTORY: errno.EISDIR,
    NtStatus.STATUS_INVALID_DEVICE_REQUEST: errno.ENOTSUP,
    NtStatus.STATUS_INVALID_INFO_CLASS: errno.ENOTSUP,
    NtStatus.STATUS_INVALID_PARAMETER: errno.EINVAL,
    NtStatus.STATUS_NO_SUCH_FILE: errno.ENOENT,
    NtStatus.STATUS_NOT_A_DIRECTORY: errno.ENOTDIR,
    NtStatus.STATUS_NOT_FOUND: errno.ENOENT,
    NtStatus.STATUS_NOT_SUPPORTED: errno.ENOTSUP,
    NtStatus.STATUS_OBJECT_NAME_COLLISION: errno.EEXIST,
    NtStatus.STATUS_OBJECT_NAME_INVALID: errno.EINVAL,
    NtStatus.STATUS_OBJECT_NAME_NOT_FOUND: errno.ENOENT,
    NtStatus.STATUS_OBJECT_PATH_INVALID: errno.EINVAL,
    NtStatus.STATUS_OBJECT_PATH_NOT_FOUND: errno.ENOENT,
    NtStatus.STATUS_OBJECT_PATH_SYNTAX_BAD: errno.EINVAL,
    NtStatus.STATUS_PRIVILEGE_NOT_HELD: errno.EPERM,
    NtStatus.STATUS_SHARING_VIOLATION: errno.EBUSY,
    0xC0000044: errno.EDQUOT,  # STATUS_QUOTA_EXCEEDED
    0xC00000A2: errno.EROFS,  # STATUS_MEDIA_WRITE_PROTECTED
}
# The login, or the handle, is gone: a new one will do.
LOST: Final = (
    NtStatus.STATUS_NETWORK_NAME_DELETED,
    NtStatus.STATUS_USER_SESSION_DELETED,
    NtStatus.STATUS_FILE_CLOSED,
    NtStatus.STATUS_IO_TIMEOUT,
    NtStatus.STATUS_INSUFFICIENT_RESOURCES,
    NtStatus.STATUS_INSUFF_SERVER_RESOURCES,
    NtStatus.STATUS_SERVER_UNAVAILABLE,
    NtStatus.STATUS_REQUEST_NOT_ACCEPTED,
    0xC000020C,  # STATUS_CONNECTION_DISCONNECTED
    0xC000035C,  # STATUS_NETWORK_SESSION_EXPIRED
)
