"""Where shards are stored, as columns: a dict of half a million shards would take longer to make than to load them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_nvcomp.errors import MetadataError
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.metadata.shards import StoredAt

_Numbers = npt.NDArray[np.int64]


class ShardPlaces(Mapping[MetadataIndex, Any]):
    """What a dict of `StoredAt` by index says, made for each shard when it is asked for; read-only."""

    def __init__(
        self,
        fqns: Sequence[str],
        offsets: Sequence[torch.Size | None],
        files: Sequence[DataFileRef],
        columns: Sequence[_Numbers],
        others: Mapping[MetadataIndex, Any],
    ) -> None:
        """Take the distinct names, offsets and files, and of each shard what it has of these.

        Args:
            fqns: names of tensors and objects.
            offsets: of shards; None for objects.
            files: the data files.
            columns: of each shard the number of its name, offset and file in these, its hint (-1 for none) and record.
            others: shards that are in no column.

        Raises:
            MetadataError: two shards have one name and offset.
        """
        self._fqns, self._offsets, self._files, self._others = fqns, offsets, files, others
        self._name, self._offset, self._file, self._hint, self._record = columns
        self._name_numbers = {fqn: number for number, fqn in enumerate(fqns)}
        self._offset_numbers = {offset: number for number, offset in enumerate(offsets)}
        self._order = np.argsort(self._name, kind="stable")  # of all shards, those of a name together
        self._begins = np.searchsorted(self._name[self._order], np.arange(len(fqns) + 1))
        self._known: dict[int, dict[int, int]] = {}  # shards of a name by their offset, once it was asked for
        both = np.sort(self._name * len(offsets) + self._offset)
        if (both[1:] == both[:-1]).any() or any(self._at(index) is not None for index in others):
            raise MetadataError("storage_data has a key twice.")

    def _at(self, index: MetadataIndex) -> int | None:
        if not isinstance(index, MetadataIndex):
            return None
        name, offset = self._name_numbers.get(index.fqn), self._offset_numbers.get(index.offset)
        if name is None or offset is None:
            return None
        shards = self._known.get(name)
        if shards is None:
            own = self._order[self._begins[name] : self._begins[name + 1]]
            shards = self._known[name] = dict(zip(self._offset[own].tolist(), own.tolist(), strict=True))
        return shards.get(offset)

    def __getitem__(self, index: MetadataIndex) -> Any:
        at = self._at(index)
        if at is None:
            return self._others[index]
        return StoredAt(self._files[self._file[at]], int(self._record[at]))

    def __len__(self) -> int:
        return len(self._name) + len(self._others)

    def __iter__(self) -> Iterator[MetadataIndex]:
        fqns, offsets = self._fqns, self._offsets
        columns = (column.tolist() for column in (self._name, self._offset, self._hint))
        for name, offset, hint in zip(*columns, strict=True):
            yield MetadataIndex(fqns[name], offsets[offset], None if hint < 0 else hint)
        yield from self._others

    def items(self) -> ItemsView[MetadataIndex, Any]:
        """Return the pairs of index and place."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """Return the places."""
        return _Values(self)

    def places(self) -> Iterator[Any]:
        for file, record in zip(self._file.tolist(), self._record.tolist(), strict=True):
            yield StoredAt(self._files[file], record)
        yield from self._others.values()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)


class _Items(ItemsView[MetadataIndex, Any]):
    """Pairs that are not looked up one by one."""

    _mapping: ShardPlaces

    def __iter__(self) -> Iterator[tuple[MetadataIndex, Any]]:
        return zip(self._mapping, self._mapping.places(), strict=True)


class _Values(ValuesView[Any]):
    _mapping: ShardPlaces

    def __iter__(self) -> Iterator[Any]:
        return self._mapping.places()
