"""The protections of SFTP and SMB: what a lost connection leaves open is looked up, and never guessed."""

from __future__ import annotations

from tests.faults.mutations import Mutation

ROOM = "dcp_nvcomp/storage/file_servers/"
FILE = "tests/storage/test_file_servers.py"
TESTS = FILE + " -k "
TROUBLE = "tests/storage/test_file_server_trouble.py -k "
CUT = FILE + "::test_whichever_connection_is_cut_all_goes_on -k "

MUTATIONS = (
    Mutation(
        row="SFTP and SMB, a publish whose answer was lost was done if its temporary is gone",
        file=ROOM + "writing.py",
        old="        is_gone = may_be_done and await connection.look_up(source) is None\n",
        new="        is_gone = False\n        may_be_done = False\n",
        tests=CUT + "publish_twice",
    ),
    Mutation(
        row="SFTP and SMB, a publish whose temporary the server lost was not done",
        file=ROOM + "writing.py",
        old="        if is_gone and not await is_ours(connection):\n",
        new="        if False:\n",
        tests=TROUBLE + "lost_was_not",
    ),
    Mutation(
        row="SFTP, a link is what it leads to",
        file=ROOM + "filesystem.py",
        old='                if entry.kind != "directory" and nbytes is not None:\n',
        new='                if entry.kind == "file":\n',
        tests=TROUBLE + "behind_a_link",
    ),
    Mutation(
        row="SFTP and SMB, an exclusive publish that was interrupted half-way is ours",
        file=ROOM + "writing.py",
        old="                if not (may_be_done and await is_ours(connection)):\n",
        new="                if True:\n",
        tests=TESTS + "interrupted_half_way",
    ),
    Mutation(
        row="SFTP and SMB, an exclusive publish that was interrupted half-way is not ours",
        file=ROOM + "writing.py",
        old="        if await connection.file_nbytes(target) != nbytes:\n            return False\n",
        new="        return True\n",
        tests=TESTS + "interrupted_half_way",
    ),
    Mutation(
        row="SFTP and SMB, what a publish leaves is removed",
        file=ROOM + "writing.py",
        old="    except BaseException:\n        remove_quietly(client, path, where)\n        raise\n",
        new="    except BaseException:\n        raise\n",
        tests=TESTS + "without_openssh",
    ),
    Mutation(
        row="SFTP and SMB, a server that forgot what it had confirmed",
        file=ROOM + "writing.py",
        old="may_be_forgotten and ",
        new="False and ",
        tests=TESTS + "forgot",
    ),
    Mutation(
        row="SFTP and SMB, a file of another is never written into",
        file=ROOM + "writing.py",
        old="            if not (may_be_ours and isinstance(error, FileExistsError)):\n",
        new="            if not isinstance(error, FileExistsError):\n",
        tests=TESTS + "of_another",
    ),
    Mutation(
        row="SFTP, files are made exclusively",
        file=ROOM + "sftp.py",
        old='self._file(path, "xb" if create else "r+b")',
        new='self._file(path, "wb" if create else "r+b")',
        tests=TESTS + "of_another",
    ),
    Mutation(
        row="SFTP and SMB, a lost connection is made again",
        file=ROOM + "client.py",
        old="isinstance(error, ConnectionLostError | HeldOpenError | TimeoutError)",
        new="isinstance(error, HeldOpenError | TimeoutError)",
        tests=CUT + "upload",
    ),
    Mutation(
        row="SMB, a publish waits for readers",
        file=ROOM + "smb.py",
        old="if _status(error) in _HELD_OPEN and self._is_held_open(target):",
        new="if False:",
        tests=TESTS + "waits_for_readers",
    ),
    Mutation(
        row="SMB, of several publishes to a name that must be free one succeeds",
        file=ROOM + "smb.py",
        old="            smbclient.link(self._path(source), self._path(target), **self._login)\n",
        new="            self._rename(source, target, replace=False)\n            return\n",
        tests="tests/stores/test_two_writers.py -k one_of_many_wins_without_overwriting",
    ),
    Mutation(
        row="SMB, a file is as long as the one that is open, not as the one that has its name",
        file=ROOM + "smb.py",
        old="            nbytes = file.fd.end_of_file\n",
        new="            nbytes = self._look_up(path, follow_symlinks=True).nbytes\n",
        tests=FILE + " -m smb -k atomic_for_readers",
    ),
    Mutation(
        row="SFTP, a server that does not let us in is not asked again",
        file=ROOM + "sftp.py",
        old="    if isinstance(error, asyncssh.PermissionDenied):\n",
        new="    if False:\n",
        tests=TESTS + "wrong_key",
    ),
    Mutation(
        row="SFTP and SMB, a forked process uses no connection of its parent's",
        file=ROOM + "client.py",
        old="        if self._process != os.getpid():\n            self._inherited",
        new="        if False:\n            self._inherited",
        tests=TESTS + "forked",
    ),
)
