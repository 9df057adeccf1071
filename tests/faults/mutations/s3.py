"""The protections of S3: conditions, retries within a time limit, and the handling of a lost response."""

from __future__ import annotations

from tests.faults.mutations import Mutation

FAULTS = "tests/faults/test_s3_faults.py -k "
STORES = "tests/faults/test_object_store_faults.py -m s3 -k "

MUTATIONS = (
    Mutation(
        row="S3, two writers: If-None-Match",
        file="dcp_nvcomp/storage/s3/filesystem.py",
        old='put(data, IfNoneMatch="*")',
        new="put(data)",
        tests="tests/stores/test_two_writers.py -m s3 -k one_of_many_wins",
    ),
    Mutation(
        row="S3, two writers: 412 is a refusal",
        file="dcp_nvcomp/storage/s3/object.py",
        old='        return status == 412 or code == "NoSuchKey"\n',
        new="        return False\n",
        tests="tests/stores/test_two_writers.py -m s3 -k one_of_many_wins",
    ),
    Mutation(
        row="S3, two writers: a server that ignores conditions is found out",
        file="dcp_nvcomp/storage/s3/filesystem.py",
        old="            if not refuses_conditions(error):\n                raise\n        return False\n",
        new="            if not refuses_conditions(error):\n                raise\n        return True\n",
        tests=FAULTS + "ignores_conditions",
    ),
    Mutation(
        row="S3, lost reply on the commit: read back",
        file="dcp_nvcomp/storage/s3/filesystem.py",
        old="        if not self._is_there(name, data):\n",
        new="        if not created:\n",
        tests=FAULTS + "lost_conditional_reply",
    ),
    Mutation(
        row="S3, lost reply on the commit: not repeated over another save",
        file="dcp_nvcomp/storage/conditional.py",
        old="            if self.unsure and await self._target.version() != self._before:\n",
        new="            if False:\n",
        tests=FAULTS + "over_another",
    ),
    Mutation(
        row="S3, lost reply on the commit: it can't land after another save",
        file="dcp_nvcomp/storage/s3/object.py",
        old='            condition["IfMatch"] = form.format(before)\n',
        new="            pass\n",
        tests=FAULTS + "land_over_another",
    ),
    Mutation(
        row="S3, lost reply on the commit: nor where there was nothing",
        file="dcp_nvcomp/storage/s3/object.py",
        old='            condition["IfNoneMatch"] = "*"\n',
        new="            pass\n",
        tests=FAULTS + "land_over_another",
    ),
    Mutation(
        row="S3, no reply to the commit: files stay while it may yet be done",
        file="dcp_nvcomp/saving/commit.py",
        old="if published is False and not error.outcome_unknown:",
        new="if published is False:",
        tests=FAULTS + "lands_after",
    ),
    Mutation(
        row="S3, no reply to the commit: the error says so",
        file="dcp_nvcomp/storage/conditional.py",
        old="        error.outcome_unknown = publication.unsure\n",
        new="        error.outcome_unknown = False\n",
        tests=FAULTS + "lands_after",
    ),
    Mutation(
        row="S3, lost reply on completing an upload",
        file="dcp_nvcomp/storage/s3/object.py",
        old="            if answer_of(error)[0] != 404 or not self._is_complete():\n                raise\n",
        new="            raise\n",
        tests=STORES + "upload_that_is_gone",
    ),
    Mutation(
        row="S3, lost reply on beginning an upload: it is ended",
        file="dcp_nvcomp/storage/s3/object.py",
        old="        if self._uploads_lost:\n            self._clean_up(self._abort_lost_uploads)\n\n",
        new="\n",
        tests=STORES + "moto-POST-uploads",
    ),
    Mutation(
        row="S3, 503s: retried",
        file="dcp_nvcomp/storage/attempts.py",
        old="                if not self._is_transient(error) or took + pause >= seconds:",
        new="                if True:",
        tests=STORES + "bad_network",
    ),
    Mutation(
        row="S3, dead server: the deadline",
        file="dcp_nvcomp/storage/attempts.py",
        old="took + pause >= seconds:",
        new="took + pause >= 60:",
        tests=FAULTS + "outage",
    ),
    Mutation(
        row="S3, silent server: one attempt is limited",
        file="dcp_nvcomp/storage/attempts.py",
        old="limit = max(0.0, min(longest_seconds, end - time.monotonic()))",
        new="limit = 60",
        tests=FAULTS + "silent_server",
    ),
    Mutation(
        row="S3, refusals are not retried",
        file="dcp_nvcomp/storage/s3/client.py",
        old="        return _is_transient(error)\n",
        new="        return True\n",
        tests=FAULTS + "refusal",
    ),
    Mutation(
        row="S3, truncated replies",
        file="dcp_nvcomp/storage/s3/client.py",
        old='        raise ShortReplyError(f"the reply to a range has {len(data)} bytes, but should be {where}")\n',
        new="        pass\n",
        tests=STORES + "truncated",
    ),
    Mutation(
        row="S3, flipped bits: a footer is read again",
        file="dcp_nvcomp/format/data_file.py",
        old="twice(lambda: _read_tail(filesystem, name, file_nbytes, footer_nbytes))",
        new="_read_tail(filesystem, name, file_nbytes, footer_nbytes)",
        tests=FAULTS + "flipped_is_read_again",
    ),
    Mutation(
        row="S3, flipped bits: a block is read again",
        file="dcp_nvcomp/loading/decoder.py",
        old="partial(self._decode_again, block, read))",
        new="partial(self._decode_block, block, data, read))",
        tests=FAULTS + "flipped_is_read_again",
    ),
    Mutation(
        row="S3, a failed save ends its uploads",
        file="dcp_nvcomp/storage/s3/object.py",
        old="        if self._upload_id is not None:\n            self._clean_up(self._abort_upload)\n",
        new="",
        tests="tests/storage/test_s3.py -k abort_ends_the_upload",
    ),
)
