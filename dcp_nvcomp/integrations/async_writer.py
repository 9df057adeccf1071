"""The writer that the asynchronous saves of Megatron-core and nvidia-resiliency-ext ask for, one for each save."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_nvcomp.errors import CheckpointError, ConfigurationError, StorageError
from dcp_nvcomp.saving.process_state import process_state
from dcp_nvcomp.saving.rank_save import RankResults
from dcp_nvcomp.saving.saves import PreparedWrite
from dcp_nvcomp.saving.writer import NvcompWriter

_Data: TypeAlias = list[Any]
_Failure: TypeAlias = tuple[BaseException, traceback.StackSummary]


class NvcompAsyncWriter(NvcompWriter):
    """A writer for `AsyncCallsQueue` of nvidia-resiliency-ext and of Megatron-core.

    The data is copied to host memory while training waits, and encoded by the CPU engine in the queue's process.

    Args:
        path: local path or fsspec URL of the checkpoint.
        **options: those of `NvcompWriter`. `engine="cuda"` is refused: a forked process cannot use CUDA. With
            `progress=True` nothing is shown.

    Raises:
        ConfigurationError: an option is unknown or has an invalid value.

    Examples:
        writer = NvcompAsyncWriter("/checkpoints/step-1000")
        planned = save_state_dict_async_plan(state, writer, None, 0, planner=DefaultSavePlanner())
        write, copy, arguments = writer.get_save_function_and_args()
        request = AsyncRequest(write, arguments, [lambda: save_state_dict_async_finalize(*planned)], preload_fn=copy)
        queue.schedule_async_request(request)
    """

    can_run_decentralized_global_plan = False

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        if options.get("engine", "cpu") not in ("cpu", "auto"):
            raise ConfigurationError(
                f"engine={options['engine']!r} can't be had here: the data is encoded in a forked process, which "
                "cannot use CUDA. Leave the option out."
            )
        super().__init__(path, **{**options, "engine": "cpu"})
        self._prepared: PreparedWrite | None = None
        self._copy: _Copy | None = None
        self._answers: tempfile.TemporaryDirectory[str] | None = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Plan the writing; the framework calls it, and copies the data when the save function is scheduled."""
        self._prepared = self.prepare(plan)
        self._copy = _Copy([planner.resolve_data(item) for item in plan.items])
        self._answers = tempfile.TemporaryDirectory(prefix="dcp-nvcomp-", ignore_cleanup_errors=True)

    def get_save_function_and_args(self) -> tuple[Callable[..., None], Callable[[], _Data], list[Any]]:
        """Return the function that writes, the one that copies the data before, and the arguments of the first.

        The second argument is replaced by what the second function returns; called by the framework.
        """
        prepared, copy, answers = self._begun()
        return _write, copy, [prepared, None, str(_answer(answers))]

    def retrieve_write_results(self) -> RankResults | _Failure:
        """Return what this rank has written, or how it failed; called by the framework after the save function."""
        prepared, _, answers = self._begun()
        self._copy = None
        result = _read(_answer(answers), prepared)
        answers.cleanup()
        if isinstance(result, BaseException):
            return result, traceback.extract_tb(result.__traceback__)
        self.written(prepared, result)
        return result

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the save; called by the framework on the coordinator. As `NvcompWriter.finish`."""
        prepared, _, _ = self._begun(needs_data=False)
        self.finish_prepared(prepared, metadata, results)

    def _begun(self, *, needs_data: bool = True) -> tuple[PreparedWrite, Any, tempfile.TemporaryDirectory[str]]:
        if self._prepared is None or self._answers is None or (needs_data and self._copy is None):
            raise ConfigurationError(
                "This NvcompAsyncWriter has no save under way: it is for one asynchronous save, between "
                "prepare_write_data and retrieve_write_results. Use a new one for each; use NvcompWriter with dcp.save."
            )
        return self._prepared, self._copy, self._answers

    def __getstate__(self) -> dict[str, Any]:
        own = {"_prepared": None, "_copy": None, "_answers": None}
        return {**super().__getstate__(), **own}


class _Copy:
    """The data of a save as it is, which a call copies to host memory. It may be called in another process."""

    def __init__(self, data: Sequence[Any]) -> None:
        self._data = data

    @torch.no_grad()
    def __call__(self) -> _Data:
        copies = [
            one.detach().to("cpu", copy=True, non_blocking=True) if isinstance(one, torch.Tensor) else one
            for one in self._data
        ]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return copies


def _answer(directory: tempfile.TemporaryDirectory[str]) -> Path:
    return Path(directory.name) / "results"


def _write(prepared: PreparedWrite, data: _Data | None, answer: str) -> None:
    """Write what was prepared, and put the results, or the error, into the file `answer`."""
    result: RankResults | BaseException
    try:
        assert data is not None
        data_of = {id(item): one for item, one in zip(prepared.rank_save.items, data, strict=True)}

        def resolve(item: WriteItem) -> Any:
            return data_of[id(item)]

        with _one_torch_thread(elsewhere=os.getpid() != prepared.process_id):
            result = prepared.write(resolve, process_state().choices)
    except BaseException as error:
        result = error
    temporary = f"{answer}.tmp"
    with open(temporary, "wb") as file:
        file.write(_pickled(result))
    os.replace(temporary, answer)
    if isinstance(result, BaseException) and not isinstance(result, Exception):
        raise result


def _pickled(result: RankResults | BaseException) -> bytes:
    value = (list(result), result.totals) if isinstance(result, RankResults) else result
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:
        assert isinstance(value, BaseException)
        return pickle.dumps(CheckpointError(f"{type(value).__name__}: {value}"))
    return data


def _read(answer: Path, prepared: PreparedWrite) -> RankResults | BaseException:
    try:
        value = pickle.loads(answer.read_bytes())
    except OSError as error:
        failure = StorageError(
            f"Rank {prepared.save.rank} wrote nothing: the process that was to write ended before it was done. Look "
            "for its messages and for what killed it, such as a lack of memory. The files of this save, if it left "
            "any, are removed by `dcp-nvcomp clean`.",
            path=prepared.save.path,
        )
        failure.__cause__ = error
        return failure
    return value if isinstance(value, BaseException) else RankResults(*value)


@contextlib.contextmanager
def _one_torch_thread(*, elsewhere: bool) -> Iterator[None]:
    """Let torch use one thread in the queue's process: a forked child has none of its parent's other ones."""
    if not elsewhere:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
