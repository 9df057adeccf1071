"""The protections of asynchronous saves."""

from __future__ import annotations

from tests.faults.mutations import Mutation

STAGING = "dcp_nvcomp/saving/asynchronous/staging.py"
COPIED = "dcp_nvcomp/saving/asynchronous/copied_write.py"
SEQUENCE = "dcp_nvcomp/saving/asynchronous/sequence.py"
TESTS = "tests/saving/asynchronous"

MUTATIONS = (
    Mutation(
        row="asynchronous: an interrupted wait fails the save",
        file=STAGING,
        old="            raise self._interrupt\n",
        new="            pass\n",
        tests=f"{TESTS}/test_async_save.py -k interrupted",
    ),
    Mutation(
        row="asynchronous: saves are published in order",
        file=STAGING,
        old="            self._before.wait()\n",
        new="            pass\n",
        tests=f"{TESTS}/test_async_save.py -k published_in_order",
    ),
    Mutation(
        row="asynchronous: the state is let go once it is staged",
        file=STAGING,
        old="            self._release()\n",
        new="",
        tests=f"{TESTS}/test_async_save.py -k let_go",
    ),
    Mutation(
        row="asynchronous: a save that fails gives back the memory of its copy",
        file=STAGING,
        old="        self._complete(error)\n        if self._copied is not None:\n            self._copied.end()\n",
        new="        self._complete(error)\n",
        tests=f"{TESTS}/test_copies.py -k gives_the_memory_back",
    ),
    Mutation(
        row="asynchronous: the files of a background process that died go",
        file=COPIED,
        old="            _remove_files(part)\n",
        new="",
        tests="tests/faults/test_background_killed.py",
    ),
    Mutation(
        row="asynchronous: tensors are resolved one after the other",
        file=COPIED,
        old="            values = (objects[id(item)] if id(item) in objects else resolve(item) for item in items)\n",
        new="            values = [objects[id(item)] if id(item) in objects else resolve(item) for item in items]\n",
        tests=f"{TESTS}/test_background_trouble.py -k one_after_the_other",
    ),
    Mutation(
        row="asynchronous: an error that nobody saw is raised by the next save",
        file=SEQUENCE,
        old="        if any(failed):\n",
        new="        if False:\n",
        tests=f"{TESTS}/test_async_save.py -k nobody_looked_at",
    ),
    Mutation(
        row="asynchronous: ranks at different saves are told",
        file=SEQUENCE,
        old="        if len(set(counts)) > 1:\n",
        new="        if False:\n",
        tests="tests/distributed/test_async_save.py -k same_save_are_told",
    ),
    Mutation(
        row="asynchronous: ranks that do not make the same call are told",
        file="dcp_nvcomp/calls/ranks.py",
        old="    expect_same([called for called, _ in everyones], group)\n",
        new="",
        tests="tests/field/test_ranks.py",
    ),
    Mutation(
        row="asynchronous: a forked child destructs no process group",
        file="dcp_nvcomp/saving/kept.py",
        old="    _of_parents.append(before)\n",
        new="",
        tests="tests/distributed/test_async_save.py -k forked",
    ),
)
