"""What to say of an option that nothing takes, such as one of `torch.save`, `torch.load` or safetensors."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Final, Literal

from dcp_nvcomp.errors import ConfigurationError

# Options of `NvcompWriter` that `NvcompReader` does not have, and the other way round.
ONLY_SAVES: Final = (
    *("codec", "overwrite", "single_file_per_rank", "sync_files", "on_save", "check_encodes"),
    *("staging_budget_nbytes", "finish_within_seconds"),
)
ONLY_LOADS: Final = ("verify", "trusted_globals", "safe_objects", "metadata_limit_nbytes", "on_load")

_CODEC: Final = "codec= chooses the compression: 'auto', 'planes-zstd', 'zstd', 'none' or a CodecChain"
_ITSELF: Final = "a load finds it in the checkpoint: leave it out"
_DEVICE: Final = "a load fills tensors where they are, and open_checkpoint(path, device=...) reads them to a device"
_RANKS: Final = "the ranks are those of torch.distributed, or of process_group=; no_dist=True is for one process alone"
_PARTIAL: Final = (
    "to load what the checkpoint has of a state, pass planner=DefaultLoadPlanner(allow_partial_load=True) of "
    "torch.distributed.checkpoint to load; open_checkpoint reads any part of one"
)
_SOME: Final = (
    "give load a state dict that has only the wanted keys, or use read(keys) or load_into(module, prefix=...) of "
    "open_checkpoint(path)"
)
_STATE: Final = "the state dict comes first, such as {'model': model.state_dict()}, then the path"
_PATH: Final = "the path comes by its place: second in save and load, first in NvcompWriter, NvcompReader and the rest"
_STEP: Final = "the step is part of the path, such as 'run/step-100'; CheckpointManager keeps the steps of a run"
_CALL: Final = "it is an argument of save and load, and of dcp.save and dcp.load, not of what writes or reads for them"

_PATHS: Final = ("path", "url", "checkpoint", "checkpoint_path", "checkpoint_id", "directory", "dirname", "filename")

# (names, what to do in a save, what to do in a load)
_ADVICE: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "level compression compression_level compress compress_level compressor zstd_level algorithm algo cname",
        f"{_CODEC}; Zstd(level=...) in such a chain has a level",
        _ITSELF,
    ),
    ("num_workers workers max_workers num_threads n_threads nthreads n_jobs threads", "thread_count", "thread_count"),
    (
        "async_ asynchronous async_save non_blocking blocking block is_async wait",
        "async_save saves while training goes on",
        "a load is complete when it returns",
    ),
    ("world_size rank local_rank ranks nprocs num_ranks dist distributed", _RANKS, _RANKS),
    ("group pg", "process_group", "process_group"),
    ("map_location device device_map", "tensors are saved from where they are: leave it out", _DEVICE),
    (
        "weights_only pickle_module allow_pickle trust_remote_code safe",
        "objects are pickled by torch.save: leave it out",
        "safe_objects=True refuses objects that could run code, and trusted_globals= names what they may use",
    ),
    (
        "strict partial allow_partial allow_partial_load ignore_missing allow_missing missing_ok assign",
        "a save takes all of the state dict: leave it out",
        _PARTIAL,
    ),
    ("keys only include exclude filter prefix subset", "give a state dict that has only what is to be saved", _SOME),
    (
        "dtype torch_dtype cast",
        "a save keeps the dtypes; convert(source, destination, dtype=...) writes another one",
        "load and load_into convert with dtype='cast'",
    ),
    ("step epoch iteration global_step tag", _STEP, _STEP),
    (
        "keep keep_last keep_last_n max_to_keep save_total_limit",
        "CheckpointManager(run, keep=Keep(last=3)) removes old steps",
        "it is of CheckpointManager",
    ),
    (
        "metadata metrics extra user_metadata",
        "put it into the state dict; CheckpointManager.save takes metrics=",
        "open_checkpoint(path).metadata is what a checkpoint says of itself",
    ),
    (
        "timeout retries max_retries num_retries deadline",
        "storage_deadline_seconds= limits each operation of the storage, with its retries",
        "storage_deadline_seconds= limits each operation of the storage, with its retries",
    ),
    (
        "storage_options fs_kwargs storage_kwargs fsspec_kwargs filesystem fs",
        "give the storage's options by name, as endpoint_url=...",
        "give the storage's options by name, as endpoint_url=...",
    ),
    (" ".join(_PATHS), _PATH, _PATH),
    ("state state_dict model module optimizer", _STATE, _STATE),
    ("fsync sync durable", "sync_files", "a load writes nothing: leave it out"),
    ("exist_ok force replace clobber allow_overwrite", "overwrite", "a load writes nothing: leave it out"),
    ("verbose show_progress progress_bar use_tqdm", "progress", "progress"),
    ("callback callbacks hook on_done on_finish", "on_save", "on_load"),
    ("gpu cuda use_gpu use_cuda backend", "engine", "engine"),
    ("max_memory memory_limit memory_budget memory ram", "host_memory_budget", "host_memory_budget"),
    (
        "max_shard_size shard_size max_file_size max_shard_nbytes",
        "convert(source, destination, to='safetensors', max_shard_nbytes=...) has it; a checkpoint has a file per rank",
        _ITSELF,
    ),
    (
        "safe_serialization format file_format to",
        "convert(source, destination, to=...) writes other formats",
        "convert(source, destination, to=...) makes other formats of a checkpoint",
    ),
    ("pickle_protocol mmap", "it has no counterpart here: leave it out", "it has no counterpart here: leave it out"),
    (
        "checksum checksums crc check validate",
        "every block has its checksum; tools.verify(path) compares all of them",
        "verify",
    ),
    ("planner process_group no_dist storage_writer storage_reader async_stager async_checkpointer_type", _CALL, _CALL),
    (
        "use_collectives",
        "it is an argument of dcp.save: dcp.save(state, storage_writer=NvcompWriter(path), use_collectives=False)",
        "a load finds out itself whether ranks saved without collectives: leave it out",
    ),
    (" ".join(ONLY_SAVES), "", "it is an option of saves: leave it out"),
    (" ".join(ONLY_LOADS), "it is an option of loads: leave it out", ""),
)
_SAVING: Final = {name: advice for names, advice, _ in _ADVICE for name in names.split() if advice}
_LOADING: Final = {name: advice for names, _, advice in _ADVICE for name in names.split() if advice}

# Where options belong that are given to another storage.
_STORAGES: Final = (
    ("s3://", "endpoint_url key secret anon profile client_kwargs config_kwargs s3_additional_kwargs requester_pays"),
    ("az://", "account_name account_key connection_string sas_token credential tenant_id client_id client_secret"),
    ("gs://", "project token"),
    ("sftp:// and smb://", "username password host port known_hosts client_keys"),
)
_STORAGE_OF: Final = {name: storage for storage, names in _STORAGES for name in names.split()}


def refuse_path(options: Collection[str], call: Collection[str]) -> None:
    """Refuse a path that is given by a name of its own to a call that takes it by its place."""
    for option in _PATHS:
        if option in options:
            raise unknown_option(option, call=call)


def advice_for(option: str, call: Collection[str]) -> str | None:
    """Return what to do instead of giving this option; None if nothing is known of it."""
    kind: Literal["save", "load"] | None = "save" if "codec" in call else "load" if "safe_objects" in call else None
    if kind is None or option in call:
        return None
    advice = (_SAVING if kind == "save" else _LOADING).get(option)
    return f"did you mean {advice!r}?" if advice is not None and " " not in advice else advice


def refuse_unknown(options: Collection[str], takes: Sequence[str], call: Sequence[str], storage: str) -> None:
    """Raise if a storage does not take one of these options."""
    for option in sorted(set(options) - set(takes)):
        close = difflib.get_close_matches(option, [*call, *takes], n=1, cutoff=0.75)
        raise unknown_option(option, close, call=call, storage=storage, takes=takes)


def unknown_option(
    option: str,
    close: Sequence[str] = (),
    *,
    call: Collection[str] = (),
    storage: str = "",
    takes: Collection[str] = (),
) -> ConfigurationError:
    """Return the error for an unknown option."""
    hint = advice_for(option, call)
    if hint is None and close:
        hint = f"did you mean {close[0]!r}?"
    elsewhere = _STORAGE_OF.get(option)
    if hint is None and elsewhere is not None and storage and storage not in elsewhere:
        hint = f"it is an option of {elsewhere}, not of {storage}"
    if hint is None:
        theirs = f"{storage} takes {', '.join(sorted(takes)) or 'none'}" if storage else ""
        ours = f"this call takes {', '.join(sorted(call))}" if call else ""
        hint = ", and ".join(filter(None, (ours, theirs))) or "nothing takes it"
    return ConfigurationError(f"Unknown option {option!r}: {hint}{'' if hint.endswith('?') else '.'}")
