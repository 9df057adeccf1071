"""The protections of a checkpoint on a local disk: from errors, power loss, corruption, a GPU that fails."""

from __future__ import annotations

from tests.faults.mutations import Mutation

CALLS, POWER, DAMAGE = "N-th filesystem call", "power loss", "every byte flipped"
EVERY_CALL = "tests/faults/test_every_call.py"
POWER_LOSS = "tests/faults/test_power_loss.py"
DAMAGED = "tests/faults/test_damage.py"

MUTATIONS = (
    Mutation(
        row=f"{CALLS}: short writes go on",
        file="dcp_nvcomp/storage/local/output.py",
        old="        view = view[count:]\n",
        new="        return\n",
        tests="tests/storage/test_local.py -k short_writes",
    ),
    Mutation(
        row=f"{CALLS}: short reads go on",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="            data = data + part if data else part  # usually there is only one part\n",
        new="            return part\n",
        tests="tests/storage/test_local.py -k short_writes",
    ),
    Mutation(
        row=f"{CALLS}: short reads of blocks go on",  # else they would be read once more, as if they were damaged
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="            position += done\n",
        new="            return\n",
        tests="tests/storage/test_local.py -k short_writes",
    ),
    Mutation(
        row=f"{CALLS}: a failed close loses no descriptor",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="        _close_quietly(folder)  # an error here",
        new="        os.close(folder)  # an error here",
        tests=f"{EVERY_CALL} -k test_load",
    ),
    Mutation(
        row=f"{CALLS}: a temporary is removed",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="            _remove_temporary(temporary)\n",
        new="            pass\n",
        tests=f"{EVERY_CALL} -k overwriting-EIO",
    ),
    Mutation(
        row=f"{CALLS}: the finished files of a failed save are removed",
        file="dcp_nvcomp/saving/job.py",
        old="            self._remove_files()\n",
        new="",
        tests=f"{EVERY_CALL} -k files-EIO",
    ),
    Mutation(
        row=f"{CALLS}: the unfinished file of a failed save is removed",
        file="dcp_nvcomp/saving/job.py",
        old="            output.stream.abort()\n",
        new="            pass\n",
        tests=f"{EVERY_CALL} -k overwriting-EIO",
    ),
    Mutation(
        row=f"{CALLS}: a failed fsync fails the save",
        file="dcp_nvcomp/storage/local/output.py",
        old="                    os.fsync(self._descriptor)\n",
        new="                    with contextlib.suppress(OSError):\n"
        "                        os.fsync(self._descriptor)\n",
        tests=f"{EVERY_CALL} -k overwriting-EIO",
    ),
    Mutation(
        row=f"{CALLS}: errors are ours",
        file="dcp_nvcomp/storage/local/output.py",
        old='        with storage_errors("create", location):\n',
        new="        with contextlib.nullcontext():\n",
        tests="tests/faults/test_full_disk.py",
    ),
    Mutation(
        row=f"{CALLS}: errors of fsspec's client are ours",
        file="dcp_nvcomp/storage/fsspec_output.py",
        old="        with self._turn, storage_errors(what, self._location, self._redact):\n",
        new="        with contextlib.nullcontext():\n",
        tests="tests/faults/test_fsspec_calls.py -k test_save",
    ),
    Mutation(
        row=f"{CALLS}: on other filesystems the new metadata is moved over the old",
        file="dcp_nvcomp/storage/fsspec_files.py",
        old="        if self._is_object_store or not self._can_move:\n",
        new="        if True:\n",
        tests="tests/faults/test_plain_fsspec.py -k overwriting-full",
    ),
    Mutation(
        row=f"{CALLS}: metadata that was moved aside is moved back",
        file="dcp_nvcomp/storage/fsspec_files.py",
        old=" or self._try_to_move(aside, name) is None:\n",
        new=":\n",
        tests="tests/faults/test_plain_fsspec.py -k refusing-overwriting",
    ),
    Mutation(
        row=f"{CALLS}: fsspec's own mv is a copy",
        file="dcp_nvcomp/storage/fsspec_output.py",
        old='        return None if name == "mv" else',
        new='        return fs if name == "mv" else',
        tests="tests/storage/test_plain.py -k chains",
    ),
    Mutation(
        row=f"{CALLS}: a move that is refused without a word",
        file="dcp_nvcomp/storage/fsspec_files.py",
        old="            return None if self.file_nbytes(source) is None else refusal\n",
        new="            return None if str(refusal.args[-1]).startswith('the storage did not') else refusal\n",
        tests="tests/storage/test_plain.py -k warns",
    ),
    Mutation(
        row=f"{POWER}: fsync of data files",
        file="dcp_nvcomp/storage/local/output.py",
        old="                    os.fsync(self._descriptor)\n",
        new="                    pass\n",
        tests=f"{POWER_LOSS} -k overwriting",
    ),
    Mutation(
        # one rank alone would do without: the directory is fsynced again after `__<save_id>.metadata`
        row=f"{POWER}: fsync of the directory after a data file",
        file="dcp_nvcomp/storage/local/output.py",
        old="                sync_directory(os.path.dirname(self._full))\n",
        new="                pass\n",
        tests="tests/storage/test_local.py -k order_of_data_files",
    ),
    Mutation(
        row=f"{POWER}: fsync of the temporary",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="            write_all(descriptor, data)\n            os.fsync(descriptor)\n",
        new="            write_all(descriptor, data)\n",
        tests=f"{POWER_LOSS} -k overwriting",
    ),
    Mutation(
        row=f"{POWER}: fsync of the directory after publishing",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="            sync_directory(os.path.dirname(final))\n",
        new="            pass\n",
        tests=f"{POWER_LOSS} -k overwriting",
    ),
    Mutation(
        row=f"{POWER}: fsync of new parent directories",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="                self._sync_parents()\n",
        new="",
        tests=f"{POWER_LOSS} -k fresh",
    ),
    Mutation(
        row=f"{POWER}: the old files are removed last",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="                    os.rename(temporary, final)\n                else:\n",
        new="                    os.unlink(final) if os.path.lexists(final) else None\n"
        "                    os.rename(temporary, final)\n                else:\n",
        tests=f"{POWER_LOSS} -k overwriting",
    ),
    Mutation(
        row=f"{DAMAGE}: the CRC of stored blocks",
        file="dcp_nvcomp/engines/cpu.py",
        old='        if verify != "off" and checksum(data) != row.encoded_crc:',
        new="        if False:",
        tests=f"{DAMAGED} -k flipped_bits",
    ),
    Mutation(
        row=f"{DAMAGE}: the CRC of footers",
        file="dcp_nvcomp/format/framing.py",
        old="    if crc32c(bytes(tail[: _TRAILER_HEAD.size]), crc32c(footer)) != trailer.footer_crc:",
        new="    if False:",
        tests=f"{DAMAGED} -k flipped_bits",
    ),
    Mutation(
        row=f"{DAMAGE}: bytes before the first block",
        file="dcp_nvcomp/format/framing.py",
        old="    if reserved or any(memoryview(header)[HEADER_NBYTES:]):",
        new="    if False:",
        tests=f"{DAMAGED} -k flipped_bits",
    ),
    Mutation(
        row=f"{DAMAGE}: the first read begins with the file",
        file="dcp_nvcomp/loading/read_plan.py",
        old="    spans = [(0 if block.number == 0 else block.start, block.stop) for block in blocks]",
        new="    spans = [(block.start, block.stop) for block in blocks]",
        tests=f"{DAMAGED} -k flipped_bits",
    ),
    Mutation(
        row="files swapped between saves",
        file="dcp_nvcomp/format/data_file.py",
        old="    if (trailer_nbytes, trailer_crc) != (footer_nbytes, footer_crc):",
        new="    if False:",
        tests=f"{DAMAGED} -k swap",
    ),
    Mutation(
        row="files grown",
        file="dcp_nvcomp/format/data_file.py",
        old="    if actual is not None and actual > file_nbytes:",
        new="    if False:",
        tests=f"{DAMAGED} -k grown",
    ),
    Mutation(
        row="files truncated",
        file="dcp_nvcomp/storage/local/filesystem.py",
        old="            if not done:\n                raise too_short(self.location(name), start, stop, position)\n",
        new="            if not done:\n                return\n",
        tests="tests/storage/test_local.py -k shrinks",
    ),
    Mutation(
        row="flipped on the way: blocks are read once more",
        file="dcp_nvcomp/loading/decoder.py",
        old="partial(self._decode_again, block, read))",
        new="partial(self._decode_block, block, data, read))",
        tests=f"{DAMAGED} -k healed",
    ),
    Mutation(
        row="flipped on the way: headers are read once more",
        file="dcp_nvcomp/loading/decoder.py",
        old="check_header(self._filesystem.read(read.name, 0, data_offset), path=path)",
        new="check_header(fetched.data[:data_offset], path=path)",
        tests=f"{DAMAGED} -k healed",
    ),
    Mutation(
        row="flipped on the way: footers are read once more",
        file="dcp_nvcomp/format/data_file.py",
        old="twice(lambda: _read_tail(filesystem, name, file_nbytes, footer_nbytes))",
        new="_read_tail(filesystem, name, file_nbytes, footer_nbytes)",
        tests=f"{DAMAGED} -k healed",
    ),
    Mutation(
        row="flipped on the way: `.metadata` is read once more",
        file="dcp_nvcomp/storage/reread.py",
        old="    if crc32c(data) == seen:\n",
        new="    if True:\n",
        tests=f"{DAMAGED} -k healed",
    ),
    Mutation(
        row="GPU out of memory, nvCOMP raising in batch N",
        file="dcp_nvcomp/engines/cuda/engine.py",
        old="        except Exception as error:  # nvCOMP, CuPy and torch raise errors of many types\n",
        new="        except (ValueError, MemoryError) as error:\n",
        tests="tests/faults/test_gpu_faults.py -k batch_n",
    ),
    Mutation(
        row="GPU lost in batch N: what a failed save wrote is removed",
        file="dcp_nvcomp/saving/job.py",
        old="            output.stream.abort()\n",
        new="            pass\n",
        tests="tests/faults/test_gpu_faults.py -k of_a_save",
    ),
)
