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
        old="        return sorted(decoder.decode_on_device(jobs, run, bounds[:-1], scratch))\n",
        new="        return []\n",
        tests=CHECKED + "wrong_encode",
    ),
    Mutation(
        row="GPU: a decoder that does nothing does not pass",
        file=ENCODE,
        old="        scratch.bitwise_not_()\n",
        new="",
        tests=CHECKED + "does_nothing",
    ),
    Mutation(
        row="GPU: what arrives on the host is what was checked",
        file=ENCODE,
        old="checksum(block.data) == block.row.encoded_crc",
        new="True",
        tests=CHECKED + "arrives_on_the_host",
    ),
    Mutation(
        row="GPU: wrong encodes are counted",
        file="dcp_nvcomp/saving/stats.py",
        old="        recoded_blocks += rank.recoded_blocks\n",
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
        old="        self._copying.place(host, job)\n        return True\n",
        new="        return True\n",
        tests=CHECKED + "wrong_decode",
    ),
    Mutation(
        row="GPU: an engine that can't be made",
        file=POOL,
        old="        except Exception as error:\n            engines.health.broken",
        new="        except RuntimeError as error:\n            engines.health.broken",
        tests=CHECKED + "not_be_made",
    ),
    Mutation(
        row="GPU: the self-test",
        file=POOL,
        old="                self._self_test(engine, device)\n",
        new="",
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
        file=ENGINE,
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
)
