"""The protections against killed saves and failing ranks."""

from __future__ import annotations

from tests.faults.mutations import Mutation

COMMIT, SAVING = "dcp_nvcomp/saving/commit.py", "dcp_nvcomp/saving/job.py"
KILLED, RAISES = "tests/faults/test_killed.py -k ", "tests/faults/test_rank_raises.py -k "

MUTATIONS = (
    Mutation(
        row="SIGKILL: the old files stay until the new checkpoint is published",
        file=COMMIT,
        old="    try:\n        filesystem.publish(METADATA_NAME, save.data, overwrite=overwrite)\n",
        new='    remove_files(filesystem, replaced, "")\n'
        "    try:\n        filesystem.publish(METADATA_NAME, save.data, overwrite=overwrite)\n",
        tests=KILLED + "sync-overwrite-before_the_rename-rank_0",
    ),
    Mutation(
        row="SIGKILL: the new metadata takes the place of the old in one step",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="                    os.rename(temporary, final)\n",
        new="                    self.remove([name])\n                    os.rename(temporary, final)\n",
        tests=KILLED + "sync-overwrite-before_the_rename-rank_0",
    ),
    Mutation(
        row="SIGKILL: no save writes into another one's files",
        file="dcp_nvcomp/storage/local/output.py",
        old="os.O_WRONLY | os.O_CREAT | os.O_EXCL |",
        new="os.O_WRONLY | os.O_CREAT | os.O_TRUNC |",
        tests="tests/saving/test_lifecycle.py -k name_that_is_taken",
    ),
    Mutation(
        row="SIGKILL: file names that no other save has",
        file="dcp_nvcomp/format/names.py",
        old='    return f"__{rank}_{number}_{file_id}{DATA_FILE_SUFFIX}"\n',
        new="    return f\"__{rank}_{number}_{'0' * 32}{DATA_FILE_SUFFIX}\"\n",
        tests=KILLED + "sync-overwrite-encode",
    ),
    Mutation(
        row="SIGKILL: the immutable copy goes before the files that it names",
        file="dcp_nvcomp/saving/commit.py",
        old="        filesystem.remove(sorted(names - data_files))\n        filesystem.remove(sorted(data_files))\n",
        new="        filesystem.remove(sorted(data_files))\n        filesystem.remove(sorted(names - data_files))\n",
        tests=KILLED + "sync-overwrite-one_old_file_removed-rank_0",
    ),
    Mutation(
        row="SIGKILL: what was replaced is removed",
        file=COMMIT,
        old='    remove_files(filesystem, replaced - kept, "the checkpoint that was replaced")\n',
        new="",
        tests=KILLED + "sync-overwrite-local_plan",
    ),
    Mutation(
        row="one rank raises: the first error of any thread is raised",
        file="dcp_nvcomp/engines/threads.py",
        old="            raise self.error\n",
        new="            pass\n",
        tests=RAISES + "test_save[encode-1]",
    ),
    Mutation(
        row="one rank raises: errors of encode threads are kept",
        file=SAVING,
        old="                    recoded += sum(block.was_wrong for block in task.blocks)\n"
        "            except BaseException as error:\n                self._workers.fail(error)\n",
        new="                    recoded += sum(block.was_wrong for block in task.blocks)\n"
        "            except BaseException as error:\n                pass\n",
        tests=RAISES + "test_save[encode-1]",
    ),
    Mutation(
        row="one rank raises: errors of write threads are kept",
        file=SAVING,
        old="                    output = self._handle(message, output)\n"
        "            except BaseException as error:\n                self._workers.fail(error)\n",
        new="                    output = self._handle(message, output)\n"
        "            except BaseException as error:\n                pass\n",
        tests=RAISES + "test_save[fsync-1]",
    ),
    Mutation(
        row="one rank raises: it removes its own files",
        file=SAVING,
        old="            self._remove_files()\n            raise\n",
        new="            raise\n",
        tests=RAISES + "test_save[close-1]",
    ),
    Mutation(
        row="one rank raises: the others remove theirs at the next save",
        file="dcp_nvcomp/saving/writer.py",
        old="        if plan.storage_data is True:\n",
        new="        if False:\n",
        tests=RAISES + "test_save[fsync-1]",
    ),
    Mutation(
        row="one rank raises: the coordinator removes what it could not publish",
        file=COMMIT,
        old='            remove_files(filesystem, {copy, *save.own_files}, "a save that could not be published")\n',
        new="            pass\n",
        tests=RAISES + "test_save[publish-0]",
    ),
    Mutation(
        row="one rank raises: what fails after publication fails no save",
        file="dcp_nvcomp/saving/commit.py",
        old='        logger.warning("Files of %s could not be removed: %s", whose, error)\n',
        new="        raise\n",
        tests=RAISES + "can_not_be_removed",
    ),
    Mutation(
        row="one rank raises: metadata that can't be read on one rank",
        file="dcp_nvcomp/loading/reader.py",
        old="            raise self._failure\n",
        new="            pass\n",
        tests=RAISES + "test_load[read_metadata-1]",
    ),
    Mutation(
        row="one rank raises: errors of load threads are kept",
        file="dcp_nvcomp/loading/job.py",
        old="                                self._finished.put(target)\n"
        "            except BaseException as error:\n                self._workers.fail(error)\n",
        new="                                self._finished.put(target)\n"
        "            except BaseException as error:\n                pass\n",
        tests=RAISES + "test_load[fetch-1]",
    ),
    Mutation(
        row="one rank raises, without collectives: the path is refused",
        file="dcp_nvcomp/saving/writer.py",
        old="            refuse_existing(filesystem, rank=save.rank)\n",
        new="            pass\n",
        tests=RAISES + "without_collectives",
    ),
)
