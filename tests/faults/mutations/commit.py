"""The protections of the commit protocol."""

from __future__ import annotations

from tests.faults.mutations import Mutation

COMMIT = "dcp_nvcomp/saving/commit.py"

MUTATIONS = (
    Mutation(
        row="commit: published once it is unknown whether it was",
        file=COMMIT,
        old="        if published is not True:\n",
        new="        if True:\n",
        tests="tests/saving/test_lifecycle.py -k published_but_not_confirmed",
    ),
    Mutation(
        row="commit: all data files are there",
        file=COMMIT,
        old="        _check_present(filesystem, save.files)\n",
        new="",
        tests="tests/faults/test_commit.py -k gone_before",
    ),
    Mutation(
        row="commit: metadata that no load could read",
        file="dcp_nvcomp/format/metadata/publishing.py",
        old="        _check_readable(normal, doubtful, data, path=path)\n",
        new="",
        tests="tests/saving/test_unreadable_metadata.py -k leaves_the_old",
    ),
    Mutation(
        row="commit: a listing may be old",
        file=COMMIT,
        old="""        filesystem.read(name, nbytes - 1, nbytes)
""",
        new="""        return "is not there"
""",
        tests="tests/faults/test_commit.py -k stale_listing",
    ),
    Mutation(
        row="commit: metadata is removed before data files",
        file="dcp_nvcomp/saving/commit.py",
        old="        filesystem.remove(sorted(names - data_files))\n        filesystem.remove(sorted(data_files))\n",
        new="        filesystem.remove(sorted(data_files))\n        filesystem.remove(sorted(names - data_files))\n",
        tests="tests/faults/test_commit.py -k metadata_first",
    ),
    Mutation(
        row="commit: a file that both checkpoints name stays",
        file=COMMIT,
        old="    remove_files(filesystem, replaced - kept, ",
        new="    remove_files(filesystem, replaced - {METADATA_NAME}, ",
        tests="tests/faults/test_commit.py -k names_the_same",
    ),
    Mutation(
        row="commit: a writer knows its own metadata by all of its bytes",
        file="dcp_nvcomp/saving/commit.py",
        old="return set(known[2]) if _digest(data) == known[1] else None",
        new="return set(known[2])",
        tests="tests/saving/test_lifecycle.py -k same_size",
    ),
    Mutation(
        row="commit: old metadata can't have just anything removed",
        file="dcp_nvcomp/format/metadata/roots.py",
        old="name.endswith(DATA_FILE_SUFFIX) and",
        new="",
        tests="tests/saving/test_lifecycle.py -k anything_removed",
    ),
    Mutation(
        row="commit: old metadata can't have anything in folders removed",
        file="dcp_nvcomp/format/metadata/roots.py",
        old=' and "/" not in name}',
        new="}",
        tests="tests/saving/test_lifecycle.py -k anything_removed",
    ),
    Mutation(
        row="two writers, one path: overwrite=False",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="            os.link(temporary, final)\n",
        new="            os.rename(temporary, final)\n",
        tests="tests/storage/test_local.py",
    ),
    Mutation(
        row="two writers, one path: a link whose reply was lost",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="            if _same_file(temporary, final):",
        new="            if False:",
        tests="tests/storage/test_local.py -k link",
    ),
    Mutation(
        row="power loss: directories above the checkpoint",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="                self._sync_parents()\n",
        new="",
        tests="tests/storage/test_local.py -k durable",
    ),
    Mutation(
        row="every byte flipped: the CRC of `.metadata`",
        file="dcp_nvcomp/format/metadata/summary.py",
        old="    if crc32c(memoryview(data)[:end]) != crc:",
        new="    if False:",
        tests="tests/format/metadata/test_serialize.py -k flipped",
    ),
    Mutation(
        row="commit: ranks' own metadata is replaced too",
        file=COMMIT,
        old=" | _files_of_ranks(filesystem)",
        new="",
        tests="tests/faults/test_commit.py -k without_collectives",
    ),
    Mutation(
        row="commit: what was not answered may be done",
        file="dcp_nvcomp/storage/base.py",
        old="        failure.outcome_unknown = may_be_done and failure.errno not in REFUSALS\n",
        new="",
        tests="tests/faults/test_commit.py -k lands_later",
    ),
)
