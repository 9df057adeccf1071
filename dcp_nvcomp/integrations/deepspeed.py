"""DeepSpeed: a `CheckpointEngine` that writes each file of a checkpoint compressed and checked.

    deepspeed.initialize(...) -> engine;  engine.checkpoint_engine = NvcompCheckpointEngine()
    engine.save_checkpoint
        create   on all ranks         a save id, the same on all
        save     once for each file   the state and the save id, as one file (dcp_nvcomp/one_file.py)
        commit   on all ranks         waits for all; raises on all what failed on any
                                      DeepSpeed writes `latest`
    engine.load_checkpoint
        load     once for each file   ours or a plain one; files of several saves are refused

DeepSpeed's own engine does not wait: rank 0 writes `latest` when its own files are there. File names and `latest` stay
DeepSpeed's, and so do directories, which it makes on a local disk.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from dcp_nvcomp.errors import CheckpointError, RankFailedError
from dcp_nvcomp.format.framing import HEADER_MAGIC, TRAILER_MAGIC
from dcp_nvcomp.one_file import load_compressed_checkpoint, save_compressed_checkpoint
from dcp_nvcomp.saving.writer import NvcompWriter

_SAVE_ID = "dcp_nvcomp_save_id"
# What ZeRO's states have beside tensors and plain values.
_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class NvcompCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """Write the files of `engine.save_checkpoint` compressed, and load these and plain ones.

    Give it to a DeepSpeed engine before the first save or load. `save_16bit_model` also writes a file of
    `save_compressed_checkpoint`. A file appears once it is complete and on the disk, and `latest` is written only once
    the files of all ranks are there. Plain files are loaded as DeepSpeed loads them, with `weights_only=False`.

    Args:
        trusted_globals: dotted names that values of `client_state` may use, as for `NvcompReader`.
        **options: of `NvcompWriter`, such as `codec` and `thread_count`.

    Raises:
        ConfigurationError: an option can't work or is unknown.

    Examples:
        >>> from dcp_nvcomp.integrations.deepspeed import NvcompCheckpointEngine
        >>> engine, *_ = deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
        >>> engine.checkpoint_engine = NvcompCheckpointEngine()  # doctest: +SKIP
        >>> engine.save_checkpoint("checkpoints")  # doctest: +SKIP
    """

    def __init__(self, *, trusted_globals: Sequence[str] = (), **options: Any) -> None:
        super().__init__()
        NvcompWriter(os.curdir, **options)  # fail at once on wrong ones
        self.name = type(self).__name__
        self._options, self._trusted = options, [*_CLASSES, *trusted_globals]
        self._directory, self._save_id = "", ""
        self._failure: Exception | None = None
        self._loaded: dict[str, dict[str, str]] = {}  # by directory the files of one load and their save ids

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save. All ranks call this."""
        ids = [uuid.uuid4().hex]
        if dist.is_initialized():
            dist.broadcast_object_list(ids, src=0)
        self._directory, self._save_id = os.path.join(info.save_dir, info.tag), ids[0]
        self._failure = None
        self._loaded.clear()

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file. What fails is raised by `commit`, where no rank waits for another any more."""
        if os.path.dirname(path) == self._directory and isinstance(state_dict, dict):
            state_dict = {**state_dict, _SAVE_ID: self._save_id}
        try:
            save_compressed_checkpoint(state_dict, path, **self._options)
        except Exception as error:  # whatever it is, the other ranks wait in `commit`
            self._failure = self._failure or error

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Wait until the files of all ranks are there.

        Raises:
            CheckpointError: a file of this rank was not written, or what else `save` met.
            RankFailedError: one of another rank was not.
        """
        failure, self._failure = self._failure, None
        words = None if failure is None else f"{type(failure).__name__}: {failure}"
        everyones: list[str | None] = [words]
        if dist.is_initialized():
            everyones *= dist.get_world_size()
            dist.all_gather_object(everyones, words)
        failed = {rank: one for rank, one in enumerate(everyones) if one is not None}
        if failure is not None:
            raise failure
        if failed:
            raise RankFailedError.of(failed, is_alone=False)
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file.

        Raises:
            UnsafeObjectError: a value needs a class that is not in `trusted_globals`.
            CheckpointError: the file is damaged, or comes from another save than those that were loaded with it.
        """
        if not _is_ours(path):
            return super().load(path, map_location)
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        state = load_compressed_checkpoint(path, device=device, trusted_globals=self._trusted)
        if isinstance(state, dict) and (save_id := state.pop(_SAVE_ID, None)) is not None:
            directory = os.path.dirname(path)
            if path in self._loaded.get(directory, {}):  # another load, maybe of what was saved since
                del self._loaded[directory]
            beside = self._loaded.setdefault(directory, {})
            beside[path] = save_id
            other, other_id = next(iter(beside.items()))
            if save_id != other_id:
                raise CheckpointError(
                    f"This file and {other} come from two saves with the same tag, the later of which did not end: "
                    "load another tag.",
                    path=path,
                )
        return state

    def preserves_storage_sharing(self) -> bool:
        """Return False: a tensor is written without what else is in its storage, so DeepSpeed need not copy it."""
        return False


def _is_ours(path: str) -> bool:
    """Return whether a file has the beginning or the end of our data files: damage may be in one of them."""
    with open(path, "rb") as file:
        head = file.read(len(HEADER_MAGIC))
        file.seek(-min(len(TRAILER_MAGIC), os.fstat(file.fileno()).st_size), os.SEEK_END)
        return head == HEADER_MAGIC or file.read() == TRAILER_MAGIC
