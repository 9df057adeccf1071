"""The protections of SFTP and SMB: what a lost connection leaves open is looked up, and never guessed."""

from __future__ import annotations

from tests.faults.mutations import Mutation

ROOM = "dcp_nvcomp/storage/file_servers/"
FILE = "tests/storage/test_file_servers.py"
TESTS = FILE + " -k "
CUT = FILE + "::test_whichever_connection_is_cut_all_goes_on -k "

MUTATIONS = (
    Mutation(
        row="SFTP and SMB, a publish whose answer was lost was done if its temporary is gone",
        file=ROOM + "publish.py",
        old="        return session.look_up(self._source) is None\n",
        new="        return False\n",
        tests=CUT + "publish_twice",
    ),
    Mutation(
        row="SFTP, an exclusive publish that was interrupted half-way is ours",
        file=ROOM + "publish.py",
        old="if not (self._is_repeated and self._is_ours(session)):",
        new="if True:",
        tests=TESTS + "interrupted_half_way",
    ),
    Mutation(
        row="SFTP, an exclusive publish that was interrupted half-way is not ours",
        file=ROOM + "publish.py",
        old="        return found[:nbytes] == self._data\n",
        new="        return True\n",
        tests=TESTS + "interrupted_half_way",
    ),
    Mutation(
        row="SFTP and SMB, what a publish leaves is removed",
        file=ROOM + "publish.py",
        old="            remove_quietly(pool, self._source, where)\n",
        new="            pass\n",
        tests=TESTS + "without_openssh",
    ),
    Mutation(
        row="SFTP and SMB, a server that forgot what it had confirmed",
        file=ROOM + "output.py",
        old="        self._compare(session, file)\n",
        new="",
        tests=TESTS + "forgot",
    ),
    Mutation(
        row="SFTP and SMB, what a lost connection did not confirm is sent again",
        file=ROOM + "output.py",
        old="            part.begun = None\n",
        new="            pass\n",
        tests=CUT + "upload",
    ),
    Mutation(
        row="SFTP and SMB, a file of another is never written into",
        file=ROOM + "output.py",
        old="            if not (may_be_ours and isinstance(error, FileExistsError)):\n",
        new="            if not isinstance(error, FileExistsError):\n",
        tests=TESTS + "of_another",
    ),
    Mutation(
        row="SFTP, files are made exclusively",
        file=ROOM + "sftp.py",
        old=" | asyncssh.FXF_EXCL",
        new="",
        tests=TESTS + "of_another",
    ),
    Mutation(
        row="SFTP and SMB, a lost connection is made again",
        file=ROOM + "pool.py",
        old="                if took + pause >= seconds:\n",
        new="                if True:\n",
        tests=CUT + "upload",
    ),
    Mutation(
        row="SFTP and SMB, a frozen server is told within the deadline",
        file=ROOM + "pool.py",
        old="max(min(seconds * _SILENT_SHARE, left), _LEAST_SILENT_SECONDS)",
        new="20 * seconds",
        tests=TESTS + "frozen",
    ),
    Mutation(
        row="SMB, a publish waits for readers",
        file=ROOM + "smb.py",
        old="if _status(error) in _HELD_OPEN and self._is_held_open(target):",
        new="if False:",
        tests=TESTS + "waits_for_readers",
    ),
    Mutation(
        row="SMB, a file is as long as the one that is open, not as the one that has its name",
        file=ROOM + "smb.py",
        old='int(self._query(file.handle, FileStandardInformation)["end_of_file"].get_value())',
        new="self.look_up(file.path).nbytes",
        tests=FILE + "::TestSmb -k atomic_for_readers",
    ),
    Mutation(
        row="SFTP, a server that does not let us in is not asked again",
        file=ROOM + "sftp_login.py",
        old="    if isinstance(error, asyncssh.PermissionDenied):\n",
        new="    if False:\n",
        tests=TESTS + "wrong_key",
    ),
    Mutation(
        row="SFTP and SMB, a forked process uses no connection of its parent's",
        file=ROOM + "pool.py",
        old="        if self._process != os.getpid():\n            self._inherited",
        new="        if False:\n            self._inherited",
        tests=TESTS + "forked",
    ),
)
