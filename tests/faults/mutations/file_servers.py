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
        file=ROOM + "publish.py",
        old="        if session.look_up(self._source) is not None:\n",
        new="        if True:\n",
        tests=CUT + "publish_twice",
    ),
    Mutation(
        row="SFTP and SMB, a publish whose temporary the server lost was not done",
        file=ROOM + "publish.py",
        old="        if self._content.is_all_of(session, self._target):\n            return True\n",
        new="        return True\n",
        tests=TROUBLE + "lost_was_not",
    ),
    Mutation(
        row="SFTP, a link is what it leads to",
        file=ROOM + "filesystem.py",
        old="                if nbytes is not None:\n",
        new="                if False:\n",
        tests=TROUBLE + "behind_a_link",
    ),
    Mutation(
        row="SMB, what was changed on the way is not believed",
        file=ROOM + "smb_transfers.py",
        old="        if sign is not None and not is_signed_well(sign, answer, parts):\n",
        new="        if False:\n",
        tests=TROUBLE + "flips_on_the_way",
    ),
    Mutation(
        row="SMB, nothing is written into a buffer that was given up",
        file=ROOM + "smb.py",
        old="            self._transfers.abandon(begun for _, _, begun in waiting)\n",
        new="            pass\n",
        tests=TROUBLE + "given_up",
    ),
    Mutation(
        row="SMB, requests wait for the server's credits",
        file=ROOM + "smb_transfers.py",
        old="            if not self._wait_for_an_answer():\n",
        new="            if True:\n",
        tests=TROUBLE + "few_credits",
    ),
    Mutation(
        row="SFTP, an exclusive publish that was interrupted half-way is ours",
        file=ROOM + "publish.py",
        old="if not (self._is_repeated and self._content.is_all_of(session, self._target)):",
        new="if True:",
        tests=TESTS + "interrupted_half_way",
    ),
    Mutation(
        row="SFTP, an exclusive publish that was interrupted half-way is not ours",
        file=ROOM + "content.py",
        old="        if session.file_nbytes(path) != self.nbytes:\n            return False\n",
        new="        return True\n",
        tests=TESTS + "interrupted_half_way",
    ),
    Mutation(
        row="SFTP and SMB, what a publish leaves is removed",
        file=ROOM + "publish.py",
        old="            remove_quietly(pool, self._source, self._where)\n",
        new="            pass\n",
        tests=TESTS + "without_openssh",
    ),
    Mutation(
        row="SFTP and SMB, a server that forgot what it had confirmed",
        file=ROOM + "output.py",
        old="        if not self._confirmed.begins(session, file):\n",
        new="        if False:\n",
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
        old="if ntstatus_of(error) in _HELD_OPEN and self._is_held_open(target):",
        new="if False:",
        tests=TESTS + "waits_for_readers",
    ),
    Mutation(
        row="SMB, a file is as long as the one that is open, not as the one that has its name",
        file=ROOM + "smb.py",
        old='int(self._requests.query(file.handle, FileStandardInformation)["end_of_file"].get_value())',
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
