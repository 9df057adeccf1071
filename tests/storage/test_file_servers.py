"""SFTP and SMB: the suite on real servers of OpenSSH and Samba, and what is their own.

They can't show: Windows' own server, latency, Kerberos, shares of a distributed file system.
"""

from __future__ import annotations

import pytest

from .suite import FilesystemSuite, Place


@pytest.mark.sftp
class TestSftp(FilesystemSuite):
    @pytest.fixture
    def place(self, sftp_store: Place) -> Place:
        return sftp_store


@pytest.mark.smb
class TestSmb(FilesystemSuite):
    @pytest.fixture
    def place(self, smb_store: Place) -> Place:
        return smb_store
