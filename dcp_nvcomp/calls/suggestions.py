"""What to say of a key that is not there, or of an option or storage that a call does not take: what may be meant."""

from __future__ import annotations

import difflib
import heapq
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, cast

from dcp_nvcomp.errors import ConfigurationError

S = TypeVar("S")

# A key is near if as much of it is alike, of 1.
_LIKENESS = 0.6
# Of many keys only these are compared letter by letter, which takes 0.1 ms for each.
_MOST_COMPARED = 200
_NUMBER = re.compile(r"[0-9]{1,9}")


def missing_key(wanted: str, there: Collection[str], *, nests: bool = True) -> str:
    longer = sorted(key for key in there if key.endswith(f".{wanted}"))
    if longer and nests:
        prefix = longer[0].removesuffix(wanted)
        nested = "".join(f'{{"{part}": ' for part in prefix.split(".")[:-1])
        return (
            f"There is no {wanted!r}; the checkpoint has {_listed(longer)}: pass {nested}...{'}' * nested.count('{')}."
        )
    if longer:
        return f"There is no {wanted!r}; the checkpoint has {_listed(longer)}."
    shorter = max((key for key in there if wanted.endswith(f".{key}")), key=len, default=None)
    if shorter is not None:
        extra = wanted.removesuffix(shorter)
        return f"There is no {wanted!r}; the checkpoint has {shorter!r}, without {extra!r} before it."
    below = sorted(key for key in there if key.startswith(f"{wanted}."))
    if below:
        return f"There is no {wanted!r} itself; the checkpoint has {_listed(below)} below it."
    return f"There is no {wanted!r}; the checkpoint has {_nearest_or_all(wanted, there)}."


def missing_below_prefix(name: str, prefix: str, names: Collection[str], there: Collection[str]) -> str:
    """Return what to say of a module's key that is missing: which prefix would have been right, if another one is."""
    right = _prefix_of(name, prefix, names, there)
    if right is not None:
        example = f"{right}{name}"
        return f"There is no {prefix + name!r}; the checkpoint has {example!r}: pass prefix={right!r}."
    return missing_key(prefix + name, there, nests=False)


def missing_prefix(prefix: str, there: Collection[str]) -> str:
    prefixes = {key[: dot.end()] for key in there for dot in re.finditer(r"\.", key)}
    # where the prefix is part of a longer one, that is what was meant
    longer = sorted(one for one in prefixes if one.endswith(f".{prefix}"))
    found = longer or _nearest(prefix, prefixes) or sorted({one for one in prefixes if one.count(".") == 1})
    if not found:
        return f"No key begins with {prefix!r}; the checkpoint has {_nearest_or_all(prefix, there)}."
    return f"No key begins with {prefix!r}, but with {_listed(found)}."


def _prefix_of(name: str, given: str, names: Collection[str], there: Collection[str]) -> str | None:
    """Return the prefix below which the checkpoint has a key, and most of the others beside it."""
    ends = [key for key in there if key.endswith(name) and (key == name or key[-len(name) - 1] == ".")]
    keys = there if isinstance(there, Mapping) else set(there)
    counts = {prefix: sum(prefix + one in keys for one in names) for prefix in (key.removesuffix(name) for key in ends)}
    most = max(counts.values(), default=0)
    best = sorted(prefix for prefix, count in counts.items() if count == most)
    return max(best, key=lambda prefix: (_common_ends(given, prefix), -_number_gap(given, prefix)), default=None)


def _nearest_or_all(wanted: str, there: Collection[str]) -> str:
    near = _nearest(wanted, there)
    if near:
        return _listed(near)
    if len(there) <= 3:
        return _listed(sorted(there)) if there else "no keys at all"
    tops = Counter(key.split(".")[0] for key in there)
    some = [f"{top!r}" if count == 1 else f"{count} below {top!r}" for top, count in tops.most_common(3)]
    return f"{_counted(there)}, none of them like it: {', '.join(some)}{', ...' if len(tops) > 3 else ''}"


def _nearest(wanted: str, there: Collection[str]) -> list[str]:
    """Return up to three keys that are like the wanted one, the most alike first; those of other layers before all."""
    if _NUMBER.search(wanted):
        shape = _NUMBER.sub("0", wanted)
        others = [key for key in there if _NUMBER.sub("0", key) == shape]
        if others:
            return heapq.nsmallest(3, others, key=lambda key: (_number_gap(wanted, key), key))
    alike = heapq.nlargest(_MOST_COMPARED, there, key=lambda key: _common_ends(wanted, key))
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)
    found = []
    for key in alike:
        matcher.set_seq1(key)
        likeness = matcher.ratio()
        if likeness >= _LIKENESS:
            found.append((-round(likeness, 2), _number_gap(wanted, key), key))
    return [key for *_, key in sorted(found)[:3]]


def _common_ends(one: str, other: str) -> float:
    """Return which part of two keys is the same at their beginnings and ends: quick, and good enough to choose by."""
    most = min(len(one), len(other))
    front = next((at for at in range(most) if one[at] != other[at]), most)
    back = next((at for at in range(most - front) if one[-1 - at] != other[-1 - at]), most - front)
    return 2 * (front + back) / (len(one) + len(other) or 1)


def _number_gap(one: str, other: str) -> int:
    """Return how far apart the numbers in two keys are, as those of layers."""
    numbers = [[int(found) for found in _NUMBER.findall(key)] for key in (one, other)]
    return sum(abs(a - b) for a, b in zip(*numbers, strict=False))


def _counted(there: Collection[str]) -> str:
    return f"{len(there)} key{'' if len(there) == 1 else 's'}"


def _listed(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:3]))
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"


# Options of `NvcompWriter` that `NvcompReader` does not have, and the other way round.
ONLY_SAVES: Final = (
    *("codec", "overwrite", "single_file_per_rank", "sync_files", "on_save", "check_encodes"),
    *("staging_budget_nbytes", "finish_within_seconds", "reference", "derived"),
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
    for option in _PATHS:
        if option in options:
            raise unknown_option(option, call=call)


def storage_of(
    call: str,
    kind: type[S],
    given: S | None,
    checkpoint_id: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
    known_options: Collection[str],
) -> S:
    """Return the storage writer or reader that was given, or one made from the options."""
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter  # `ls` needs the rest without torch

    role = "writer" if issubclass(kind, StorageWriter) else "reader"
    if given is None:
        refuse_path(options, known_options)
        if checkpoint_id is None:
            raise ConfigurationError(f"{call} needs a checkpoint_id or a storage_{role}.")
        made: S = cast(Any, kind)(checkpoint_id, **options)
        return made
    if not isinstance(given, kind):
        is_other = isinstance(given, StorageReader if role == "writer" else StorageWriter)
        does = "loading" if role == "writer" else "saving"
        advice = f"it is for {does}" if is_other else f"use dcp.{call} with other {role}s"
        raise ConfigurationError(f"{call} needs an {kind.__name__}, not a {type(given).__name__}: {advice}.")
    if options:
        raise ConfigurationError(f"Give {', '.join(sorted(options))} to the {role}: there is a storage_{role}.")
    return given


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
