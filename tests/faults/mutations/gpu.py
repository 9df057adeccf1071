"""The protections from a GPU that is wrong, fails or can't be used."""

from __future__ import annotations

from . import Mutation

ENGINE = "dcp_nvcomp/engines/cuda/engine.py"
ENCODE = "dcp_nvcomp/engines/cuda/encode.py"
DECODE = "dcp_nvcomp/engines/cuda/decode.py"
POOL = "dcp_nvcomp/engines/cuda/pool.py"
CHECKED = "tests/engines/test_checked_gpu.py -k "

MUTATIONS = (
    Mutation(
        row="GPU: what was encoded is decoded again",
        file=ENCODE,
        old="        return {*self._decoder.decode_on_device(blocks, run, starts, scratch)}\n",
        new="        return set()\n",
        tests=CHECKED + "wrong_encode",
    ),
    Mutation(
        row="GPU: a decoder that does nothing does not pass",
        file=ENCODE,
        old="        scratch[: int(blocks.layout.scratch_starts[-1])].bitwise_not_()\n",
        new="",
        tests=CHECKED + "does_nothing",
    ),
    Mutation(
        row="GPU: a decoder that does nothing does not pass where the block was before",
        file=ENCODE,
        old="        memory[::_MARK_NBYTES].bitwise_not_()\n",
        new="",
        tests="tests/engines/test_stale_memory.py -k idle",
    ),
    Mutation(
        row="GPU: the memory of the check is held",
        file=ENCODE,
        old="        memory = self._device.arena.empty(int(places[-1]))\n",
        new="        memory = self._device.arena.empty(int(places[-1]))[:]\n",
        tests="tests/engines/test_stale_memory.py -k held",
    ),
    Mutation(
        row="GPU: what arrives on the host is what was checked",
        file=ENCODE,
        old="checksum(encoded[at].data) == encoded[at].row.encoded_crc",
        new="True",
        tests=CHECKED + "arrives_on_the_host",
    ),
    Mutation(
        row="GPU: what arrives on the host are frames",
        file=ENCODE,
        old=", *(whole[number] for number in faults)]",
        new="]",
        tests="tests/engines/test_bad_gpu.py -k a_byte_behind",
    ),
    Mutation(
        row="GPU: frames of other encoders are no fault of the GPU",
        file=ENGINE,
        old="        return doubt.is_known\n",
        new="        return True\n",
        tests="tests/engines/test_slice_coders.py -k other_encoders",
    ),
    Mutation(
        row="GPU: a coder that failed the self-test is not used",
        file="dcp_nvcomp/engines/cuda/slice_coders.py",
        old="        return self._literals if self._works(LITERALS, coder) else None\n",
        new="        return self._literals\n",
        tests="tests/engines/test_slice_coders.py -k do_nothing",
    ),
    Mutation(
        row="GPU: wrong encodes are counted",
        file="dcp_nvcomp/saving/stats.py",
        old="        recoded_blocks=sum(rank.recoded_blocks for rank in ranks),\n",
        new="",
        tests=CHECKED + "statistics",
    ),
    Mutation(
        row="GPU: the CRC of decoded bytes",
        file=DECODE,
        old="np.flatnonzero(found != expected)",
        new="np.flatnonzero(found != found)",
        tests=CHECKED + "wrong_decode",
    ),
    Mutation(
        row="GPU: a second opinion is placed",
        file=ENGINE,
        old="        self._copying.place(host, job)\n        return doubt.is_known\n",
        new="        return doubt.is_known\n",
        tests=CHECKED + "wrong_decode",
    ),
    Mutation(
        row="GPU: an engine that can't be made",
        file=POOL,
        old="        except Exception as error:\n            reason",
        new="        except RuntimeError as error:\n            reason",
        tests=CHECKED + "not_be_made",
    ),
    Mutation(
        row="GPU: the self-test",
        file=POOL,
        old="            self._self_test(made, device)\n",
        new="            pass\n",
        tests=CHECKED + "runs_once",
    ),
    Mutation(
        row="GPU: three failures in a row",
        file="dcp_nvcomp/engines/cuda/health.py",
        old="        if self._failures >= FAILURES_IN_A_ROW:\n",
        new="        if False:\n",
        tests=CHECKED + "in_a_row",
    ),
    Mutation(
        row="GPU: engine='cuda' rules the CPU out",
        file="dcp_nvcomp/engines/cuda/fallback.py",
        old="        if not self._policy.may_fall_back and not chain.needs_gpu:\n",
        new="        if False:\n",
        tests=CHECKED + "does_not_take_over",
    ),
    Mutation(
        row="GPU: memory that was given back is given out again",
        file="dcp_nvcomp/engines/cuda/arena.py",
        old="            self._merge(*self.given_back.popleft())\n",
        new="            self.given_back.popleft()\n",
        tests="tests/engines/test_arena.py",
    ),
    Mutation(
        row="GPU: page-locked memory that can't be had",
        file="dcp_nvcomp/engines/tensors.py",
        old="            except Exception as error:\n",
        new="            except ValueError as error:\n",
        tests="tests/engines/test_notices.py -k page_locked",
    ),
    Mutation(
        row="GPU: a warning that is an error fails no save",
        file="dcp_nvcomp/engines/notices.py",
        old="    except RuntimeWarning:\n",
        new="    except ValueError:\n",
        tests="tests/engines/test_notices.py -k are_errors",
    ),
    Mutation(
        row="GPU: a coder that failed the self-test is left to all CPU threads",
        file="dcp_nvcomp/saving/encode/records.py",
        old="        on_cuda = on_cuda and self._engine.serves(tensor.device, chain, ENCODE)\n",
        new="",
        tests="tests/engines/test_refused_coders.py -k a_save",
    ),
    Mutation(
        row="GPU: a coder that failed the self-test is warned of",
        file="dcp_nvcomp/engines/choice.py",
        old="        health.left_out(chain, refusal)\n",
        new="",
        tests="tests/engines/test_refused_coders.py -k a_load",
    ),
    Mutation(
        row="GPU: a smaller budget counts from then on",
        file="dcp_nvcomp/engines/cuda/arena.py",
        old="        self.shrink(self._limit_nbytes)\n\n    def shrink",
        new="\n    def shrink",
        tests="tests/engines/test_arena.py",
    ),
    Mutation(
        row="GPU: an engine that a job does not need gives memory back",
        file=POOL,
        old="                    engine.memory.settle(device_memory_budget // ENGINES_PER_DEVICE)\n",
        new="                    pass\n",
        tests="tests/engines/test_engine_memory.py -k gives_back",
    ),
    Mutation(
        row="GPU: what a large block took is given back",
        file=POOL,
        old="                engine.memory.settle()\n",
        new="                pass\n",
        tests="tests/engines/test_engine_memory.py -k for_a_while",
    ),
    Mutation(
        row="GPU: scratch memory is within the budget",
        file="dcp_nvcomp/engines/cuda/engine.py",
        old="        self._scratch_nbytes = scratch.numel()\n",
        new="",
        tests="tests/engines/test_engine_memory.py",
    ),
    Mutation(
        row="GPU: scratch memory is the engine's",
        file="dcp_nvcomp/engines/cuda/engine.py",
        old="            return self._arena.empty(nbytes)\n",
        new="            return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)\n",
        tests="tests/engines/test_engine_memory.py -k scratch",
    ),
    Mutation(
        row="GPU: memory that is not there is asked for once",
        file="dcp_nvcomp/engines/cuda/arena.py",
        old="                self._refused_nbytes = nbytes\n",
        new="                pass\n",
        tests="tests/engines/test_engine_memory.py -k asked_for_once",
    ),
    Mutation(
        row="GPU: a forked child leaves the parent's engines alone",
        file=POOL,
        old="        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_pool))\n",
        new="",
        tests="tests/engines/test_forked_pool.py",
    ),
    Mutation(
        row="GPU: one engine does the work of two",
        file=POOL,
        old="            if engines.has_other(engine):\n",
        new="            if False:\n",
        tests="tests/engines/test_engine_memory.py -k work_of_two",
    ),
    Mutation(
        row="GPU: blocks that were placed are not placed again",
        file="dcp_nvcomp/loading/decoder.py",
        old="                del todo[:count]\n",
        new="                todo = todo[count:]\n",
        tests="tests/engines/test_load_again.py",
    ),
)
