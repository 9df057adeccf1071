"""NvcompReader: a load, from top to bottom."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_nvcomp.calls.progress import ProgressBar, report_to
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError, CheckpointReplacedError, ConfigurationError, MetadataError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.rank_metadata import merge_rank_metadata, prefer_rank
from dcp_nvcomp.format.metadata.roots import Root, is_missing, nothing_there, read_current, read_root
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.format.metadata.shards import ShardIndex, StoredAt
from dcp_nvcomp.format.names import METADATA_NAME, rank_of_metadata_name
from dcp_nvcomp.loading.items import load_items
from dcp_nvcomp.loading.job import LoadOptions, LoadStats
from dcp_nvcomp.loading.local_plans import Seen, check_same_save
from dcp_nvcomp.loading.planner import with_own_keys
from dcp_nvcomp.loading.read_plan import Wanted
from dcp_nvcomp.loading.safe_objects import SafeLoader
from dcp_nvcomp.loading.sharing.replicas import Replicas
from dcp_nvcomp.options import (
    DEADLINE_SECONDS,
    STOCK_READER,
    Engine,
    Verify,
    check_budget,
    check_choice,
    check_device_budget,
    check_flag,
    check_path,
    check_seconds,
    check_thread_count,
    drop_stock_arguments,
    option_names,
    shown,
)
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem

logger = logging.getLogger(__name__)


class _Unread(Metadata):
    """What DCP has in place of metadata that could not be read: the failure, raised where it is used."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    def _raise(self) -> Any:
        raise self.failure

    state_dict_metadata = planner_data = storage_data = storage_meta = property(_raise)

    def __repr__(self) -> str:
        return f"<no metadata: {self.failure}>"


class NvcompReader(StorageReader):
    """Load checkpoints of `NvcompWriter`, under any world size and placement, and checkpoints of stock DCP.

    Pass it as `storage_reader=` to `dcp.load`. One reader can be used for any number of loads.

    Args:
        path: local path or fsspec URL of the checkpoint. `checkpoint_id=` of `dcp.load` overrides it.
        thread_count: number of decoding threads; by default one per CPU core, at most 8.
        verify: `"stored"` checks the stored bytes of each block before they are decoded, `"full"` checks the decoded
            bytes too, `"off"` checks neither. Footers are always checked, and what a GPU decodes always on both sides.
        trusted_globals: dotted names that stored objects may use in addition to those that are safe by themselves: in
            `.metadata`, in tensors stored as `torch.save` payloads, and, with `safe_objects`, in Python objects.
        safe_objects: if True, stored Python objects are checked with `weights_only=True` before DCP's planner unpickles
            them. If False, a checkpoint from someone else can execute code.
        metadata_limit_nbytes: how large `.metadata` may be, 4 GiB by default. Reading it takes three times the limit
            of memory at most, and one that asks for more is refused. Genuine metadata takes eight to ten times its own
            size, so from about 0.3 times the limit on (1.2 GiB by default) it needs a larger one: pass three and a half
            times the file's size.
        host_memory_budget: bytes of host memory for fetched data.
        device_memory_budget: bytes of memory on each GPU for decoding; by default as for `NvcompWriter`.
        engine: `"auto"` decodes what goes to a GPU on that GPU if nvCOMP is installed, `"cuda"` fails the load
            if that is impossible on this machine, `"cpu"` never uses the GPU. Read checkpoints from someone else with
            `"cpu"`.
        progress: if True, rank 0 draws a progress bar; where standard error is no terminal, it logs a line every 10 s.
        on_load: called with the `LoadStats` of this rank after each load. An exception that it raises becomes a
            warning.
        storage_deadline_seconds: time limit of one storage operation (reading a range, say) with all its retries, after
            which it raises `StorageError`. It holds for S3, Azure, Google Cloud Storage, SFTP and SMB; elsewhere
            retries are up to the client.
        **storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3. Arguments of stock DCP's
            readers that have no counterpart here are accepted if their value changes nothing.

    Attributes:
        path: the checkpoint of the next load.
        load_id: the id of this load; `reset` draws another one.
        load_options: the options, as load jobs take them.
        last_load: the `LoadStats` of the last load of this rank; None before the first, and while one is under way.
        storage_data: where each shard of the checkpoint is stored, from `set_up_storage_reader` on; not to be changed.

    Raises:
        ConfigurationError: an option is unknown or has an invalid value.

    Examples:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from dcp_nvcomp import NvcompReader, NvcompWriter
        >>> path = tempfile.mkdtemp()
        >>> _ = dcp.save({"w": torch.arange(3)}, storage_writer=NvcompWriter(path), no_dist=True)
        >>> sorted(NvcompReader(path).read_metadata().state_dict_metadata)
        ['w']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int | None = None,
        verify: Verify = "stored",
        trusted_globals: Sequence[str] = (),
        safe_objects: bool = False,
        metadata_limit_nbytes: int = MAX_METADATA_NBYTES,
        host_memory_budget: int = 1 << 30,
        device_memory_budget: int | None = None,
        engine: Engine = "auto",
        progress: bool = False,
        on_load: Callable[[LoadStats], None] | None = None,
        storage_deadline_seconds: float = DEADLINE_SECONDS,
        **storage_options: Any,
    ) -> None:
        super().__init__()
        drop_stock_arguments(storage_options, STOCK_READER, type(self))
        self.path = check_path(path)
        self.trusted_globals = tuple(trusted_globals)
        self.metadata_limit_nbytes = check_budget("metadata_limit_nbytes", metadata_limit_nbytes)
        self.storage_deadline_seconds = check_seconds("storage_deadline_seconds", storage_deadline_seconds)
        self.storage_options = storage_options
        self.load_options = LoadOptions(
            thread_count=check_thread_count(thread_count),
            host_memory_budget=check_budget("host_memory_budget", host_memory_budget),
            device_memory_budget=check_device_budget(device_memory_budget),
            verify=check_choice("verify", verify, Verify),
            engine=check_choice("engine", engine, Engine),
            safe=SafeLoader(self.trusted_globals, check_objects=check_flag("safe_objects", safe_objects)),
        )
        self.progress = check_flag("progress", progress)
        if on_load is not None and not callable(on_load):
            raise ConfigurationError(f"on_load={on_load!r} is not callable.")
        self.on_load = on_load
        self.last_load: LoadStats | None = None
        self._rank = 0
        self.load_id = uuid.uuid4().hex
        self.storage_data: Mapping[MetadataIndex, Any] = {}
        self._state_dict_metadata: dict[str, Any] = {}
        self._rank_parts: dict[int, Metadata] = {}
        self._failure: Exception | None = None
        self.given_metadata: Metadata | None = None  # what all ranks of a load share
        self.replicas: Replicas | None = None  # the ranks of a load, where they may share reads
        self._save_id: str | None = None
        self.open_storage()  # fail fast on invalid options

    def __repr__(self) -> str:
        values = {**vars(self.load_options), **vars(self), "safe_objects": self.load_options.safe.checks_objects}
        return shown(type(self), self.path, values, self.storage_options)

    def open_storage(self) -> Filesystem:
        """Open the checkpoint's storage: for each use, so that no connection is carried into another process."""
        return open_filesystem(
            self.path,
            deadline_seconds=self.storage_deadline_seconds,
            storage_options=self.storage_options,
            known_options=option_names(type(self)),
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, perhaps from another place; called by DCP. The options are kept."""
        if checkpoint_id:
            self.path = os.fspath(checkpoint_id)
        self.load_id = uuid.uuid4().hex
        self.storage_data, self._rank_parts, self._failure, self._save_id = {}, {}, None, None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata. Nothing that the file names is executed or imported.

        Args:
            *args: unused.
            **kwargs: `rank`: read that rank's own metadata, of a save with `use_collectives=False`.

        Returns:
            The metadata. If there is no `.metadata`, all rank-local metadata merged.
            After a failure, and asked for a rank's as DCP does then, what raises that failure where it is used.

        Raises:
            CheckpointNotFoundError: there is nothing.
            IncompleteCheckpointError: there are data files only: the save never finished.
            MetadataError: it cannot be read, or asks for something unsafe.
        """
        rank = kwargs.get("rank")
        if rank is None:
            self._rank_parts, self._failure = {}, None
        elif self._failure is not None:
            # DCP asks for a rank's metadata after the read for all ranks failed, of which it keeps the text at most.
            # One rank's part of an incomplete checkpoint would leave rows of the destinations as they were.
            return _Unread(self._failure)
        if self.given_metadata is not None:
            metadata = self.given_metadata
        else:
            try:
                with closing(self.open_storage()) as filesystem:
                    metadata = self._read_metadata(filesystem, rank)
            except Exception as error:
                self._failure = error
                raise
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @property
    def reads_alone(self) -> bool:
        """True if other ranks may have other metadata."""
        return False

    @property
    def looks_at_plans(self) -> bool:
        """True if a subclass may look at the plans of ranks: then they travel, as in `dcp.load`."""
        kind, usual = type(self), NvcompReader
        return (kind.prepare_local_plan, kind.prepare_global_plan) != (
            usual.prepare_local_plan,
            usual.prepare_global_plan,
        )

    def read_root(self) -> Root | None:
        """Read `.metadata` as it is; None if there is none."""
        with closing(self.open_storage()) as filesystem:
            if filesystem.file_nbytes(METADATA_NAME) is None:
                return None
            return read_current(
                filesystem, trusted_globals=self.trusted_globals, limit_nbytes=self.metadata_limit_nbytes
            )

    def parsed(self, data: bytes) -> Metadata:
        """Parse `.metadata` that another rank has read."""
        return parse_metadata(
            data,
            path=self.checkpoint_id,
            trusted_globals=self.trusted_globals,
            limit_nbytes=self.metadata_limit_nbytes,
        )

    def _read_metadata(self, filesystem: Filesystem, rank: int | None) -> Metadata:
        if filesystem.file_nbytes(METADATA_NAME) is not None:
            # also if DCP asks for a rank's: rank-local metadata next to an unreadable `.metadata` is of another save
            return self._parsed(filesystem, METADATA_NAME)
        names = filesystem.list_names()
        ranks = {number: name for name in names if (number := rank_of_metadata_name(name)) is not None}
        if not ranks:
            raise nothing_there(filesystem, names)
        if rank is not None and rank in ranks:
            return self._parsed(filesystem, ranks[rank])
        parts = {number: self._parsed(filesystem, name) for number, name in sorted(ranks.items())}
        merged = merge_rank_metadata(parts, path=filesystem.path)
        self._rank_parts = parts
        return merged

    def _parsed(self, filesystem: Filesystem, name: str) -> Metadata:
        limit_nbytes = self.metadata_limit_nbytes
        if name == METADATA_NAME:
            return read_current(filesystem, trusted_globals=self.trusted_globals, limit_nbytes=limit_nbytes).metadata
        return read_root(filesystem, name, trusted_globals=self.trusted_globals, limit_nbytes=limit_nbytes).metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare to load from a checkpoint with this metadata; called by DCP.

        Raises:
            MetadataError: the metadata does not list where the data is.
            CheckpointError: it could not be read, as `read_metadata` raised.
        """
        if isinstance(metadata, _Unread):
            raise metadata.failure
        if metadata.storage_data is None:
            raise MetadataError(
                "`.metadata` has no storage_data: it was not written by a storage writer.", path=self.path
            )
        self._state_dict_metadata = metadata.state_dict_metadata
        self.storage_data = metadata.storage_data
        self._rank, self.last_load = kwargs.get("rank") or 0, None
        own = self._rank_parts.get(self._rank)
        if own is not None:
            self.storage_data = prefer_rank(metadata, own)
        self._save_id = metadata.storage_meta.save_id if metadata.storage_meta is not None else None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan which save this rank saw, and where; called by DCP.

        Raises:
            CodecUnavailableError: `engine="cuda"` needs a GPU or a package that is not available.
        """
        EngineChoice(self.load_options.engine).begin(self.load_options.device_memory_budget)
        return dataclasses.replace(plan, storage_data=Seen(self._save_id, self.checkpoint_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks saw the same save; called by DCP on the coordinator.

        Raises:
            CheckpointReplacedError: another save replaced the checkpoint between two ranks' reads.
            ConfigurationError: the ranks load different checkpoints.
        """
        check_same_save(plans, self.path)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load this rank's items; called by DCP.

        Raises:
            BaseException: the first error of any thread. The contents of the destinations are undefined then.
        """
        start = time.perf_counter()
        filesystem = self.open_storage()
        shards = ShardIndex(self._state_dict_metadata)
        with collector_paused():
            wanted = [Wanted.of(item, self._find(item), shards) for item in plan.items]
        stored_nbytes = sum(
            file.nbytes for file in {one.stored.file for one in wanted if isinstance(one.stored, StoredAt)}
        )
        try:
            planner = with_own_keys(planner)
            with ProgressBar("loading", stored_nbytes, enabled=self.progress and self._rank == 0) as bar:
                loaded = load_items(
                    filesystem, wanted, planner, self.load_options, progress=bar.update, replicas=self.replicas
                )
        except CheckpointError as error:
            error.message += " The contents of the destinations are undefined now: load again before using them."
            if is_missing(error):
                self._raise_if_replaced(filesystem, error)
            raise
        finally:
            filesystem.close()
        seconds = time.perf_counter() - start
        nbytes, fetched_nbytes, received_nbytes, stages = loaded
        stats = LoadStats(
            self.checkpoint_id, len(wanted), nbytes, fetched_nbytes, seconds, self._rank, stages, received_nbytes
        )
        self._report(stats)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _report(self, stats: LoadStats) -> None:
        self.last_load = stats
        if self._rank == 0:
            logger.info("%s", stats)
        report_to(self.on_load, stats, done="loaded", name="on_load")

    def _raise_if_replaced(self, filesystem: Filesystem, error: CheckpointError) -> None:
        """Raise a clearer error if a data file is missing because another save has replaced the checkpoint."""
        try:
            meta = self._read_metadata(filesystem, None).storage_meta
        except CheckpointError:
            return
        if meta is not None and meta.save_id != self._save_id:
            raise CheckpointReplacedError(
                f"Another save replaced the checkpoint during the load: load again. {error.message}", path=error.path
            ) from error

    def _find(self, item: ReadItem) -> Any:
        found = self.storage_data.get(item.storage_index)
        if found is None:
            raise MetadataError(
                f"`.metadata` does not say where the shard at {item.storage_index.offset} is.",
                path=self.path,
                fqn=item.storage_index.fqn,
            )
        return found

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint of the next load, without passwords: DCP logs it."""
        return without_secrets(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if a reader could load from there; called by DCP."""
        try:
            open_filesystem(checkpoint_id)
        except (ConfigurationError, TypeError):
            return False
        return True
