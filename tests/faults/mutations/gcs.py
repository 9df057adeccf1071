"""The protections of Google Cloud Storage: conditions, upload sessions that go on where they are, checksums."""

from __future__ import annotations

from tests.faults.mutations import Mutation

FAULTS = "tests/faults/test_object_store_faults.py -m gcs -k "
STORAGE = "tests/storage/test_gcs.py -k "
BOTH = "tests/storage/test_objects.py -m gcs -k "

MUTATIONS = (
    Mutation(
        row="GCS, a publish that lands late can't undo another save's",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old="self._upload(key, data, ifGenerationMatch=_NO_GENERATION if version is None else version)",
        new="self._upload(key, data)",
        tests=FAULTS + "lands_late_does_not_undo",
    ),
    Mutation(
        row="GCS, a publish without an answer is looked for before it is another save's",
        file="dcp_nvcomp/storage/conditional.py",
        old="                if await self._is_ours():\n                    return\n",
        new="",
        tests=BOTH + "without_an_answer",
    ),
    Mutation(
        row="GCS, a publish without an answer never takes another save's place",
        file="dcp_nvcomp/storage/conditional.py",
        old="            elif self.unsure or not self._overwrite:\n",
        new="            elif not self._overwrite:\n",
        tests=BOTH + "publishes_after_the_look",
    ),
    Mutation(
        row="GCS, a publish without an answer is not sent before it was looked for",
        file="dcp_nvcomp/storage/conditional.py",
        old="            if self.unsure and await self._target.version() != self._before:\n",
        new="            if False:\n",
        tests=BOTH + "unless_it_was_done",
    ),
    Mutation(
        row="GCS, a part without an answer: the server is asked what it has",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old="        if self._unsure:\n",
        new="        if False:\n",
        tests=FAULTS + "goes_on_where_the_server_has_it",
    ),
    Mutation(
        row="GCS, a part of which the server kept less",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old="            self._received = int(match[1]) + 1 if match else 0\n",
        new="            self._received += len(body)\n",
        tests=STORAGE + "did_not_keep",
    ),
    Mutation(
        row="GCS, aiohttp repeats no part",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old="data=_once(body) if body else body,",
        new="data=body,",
        tests=FAULTS + "goes_on_where_the_server_has_it",
    ),
    Mutation(
        row="GCS, a session that is gone although it was completed",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old="            if status_of(error) not in _GONE or not self._unsure:\n",
        new="            if True:\n",
        tests=FAULTS + "gone_but_complete",
    ),
    Mutation(
        row="GCS, what arrives changed: small files",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old='{"name": key, "crc32c": checksum}',
        new='{"name": key}',
        tests=STORAGE + "arrives_changed",
    ),
    Mutation(
        row="GCS, what arrives changed: large files",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old='        headers = {"X-Goog-Hash": f"crc32c={checksum}"}\n',
        new="        headers: dict[str, str] = {}\n",
        tests=STORAGE + "arrives_changed",
    ),
    Mutation(
        row="GCS, an aborted upload makes no object later",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old='            self._clean_up(lambda: self._end("abort an unfinished upload of", self._cancel))\n',
        new="            pass\n",
        tests=FAULTS + "lands_after_the_abort",
    ),
    Mutation(
        row="GCS, truncated replies",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old=" or int(match[2]) + 1 - start != len(answer.body)",
        new="",
        tests=FAULTS + "bad_network",
    ),
    Mutation(
        row="GCS, errors do not tell the token",
        file="dcp_nvcomp/storage/objects/gcs.py",
        old='            failure = NoAnswerError(f"{type(error).__name__}: {error.message}")\n',
        new='            raise NoAnswerError(f"{type(error).__name__}: {error!r}") from error\n',
        tests=STORAGE + "no_secret",
    ),
)
