"""Infos of single environments, of a shard and of the whole batch.

gymnasium merges the infos of n environments into one dict of arrays with a ``_key`` mask each. It
does so one environment at a time, and the first value of a key decides the array's type. The same
result is put together here from shards: a shard merges its own environments, and remembers enough
to tell when the order over the whole batch would have mattered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

#: One environment's infos: (its index in the shard, the dict it returned).
Add = tuple[int, dict[str, Any]]

_SCALARS = (int, float, bool)


class ShardInfos(dict[str, Any]):
    """A shard's infos, merged as gymnasium would merge them for these environments alone.

    ``tags`` says for every key what its values are, in the order in which the keys appeared:
    a scalar type, ``(dtype, shape)`` of an array, ``None`` for objects, a dict of tags for a
    dict. ``adds`` is what the environments returned where the values of one key differ in kind;
    the tags say nothing then.
    """

    __slots__ = ("adds", "size", "tags")

    def __init__(
        self,
        data: dict[str, Any],
        size: int,
        tags: dict[str, Any],
        adds: list[Add] | None = None,
    ) -> None:
        super().__init__(data)
        self.size = size
        self.tags = tags
        self.adds = adds

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardInfos, (dict(self), self.size, self.tags, self.adds)


class Table:
    """Infos in which every environment has the same keys, each a number or an array of one type.

    The usual case of a step without episode ends, kept as a few arrays: ``blocks`` has one array
    of (keys of one type, environments) for each scalar type, then one for each array key.
    """

    __slots__ = ("blocks", "schema")

    def __init__(self, schema: Schema, blocks: list[np.ndarray]) -> None:
        self.schema = schema
        self.blocks = blocks


@dataclass(frozen=True)
class Schema:
    """The keys of a :class:`Table` in their order, and the tag of each."""

    size: int
    keys: tuple[str, ...]
    tags: tuple[Any, ...]

    @cached_property
    def groups(self) -> list[tuple[type, list[int]]]:
        """Scalar types, each with the places of its keys."""
        found: dict[type, list[int]] = {}
        for i, tag in enumerate(self.tags):
            if isinstance(tag, type):
                found.setdefault(tag, []).append(i)
        return list(found.items())

    @cached_property
    def arrays(self) -> list[int]:
        """The places of keys whose values are arrays."""
        return [i for i, tag in enumerate(self.tags) if not isinstance(tag, type)]

    @cached_property
    def shapes(self) -> list[tuple[np.dtype, tuple[int, ...], int]]:
        """Type, shape and size in bytes of each block."""
        scalars = [(np.dtype(kind), (len(at), self.size)) for kind, at in self.groups]
        arrays = [(self.tags[i][0], (self.size, *self.tags[i][1])) for i in self.arrays]
        return [(d, shape, d.itemsize * math.prod(shape)) for d, shape in scalars + arrays]

    def columns(self, blocks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Each key's array, a view of its block."""
        out: list[Any] = [None] * len(self.keys)
        for (_, at), block in zip(self.groups, blocks, strict=False):
            for i, row in zip(at, block, strict=True):
                out[i] = row
        for i, block in zip(self.arrays, blocks[len(self.groups) :], strict=True):
            out[i] = block
        return out

    def infos(self, blocks: Sequence[np.ndarray], size: int) -> dict[str, Any]:
        """The infos of ``size`` environments as gymnasium gives them."""
        masks = np.ones((len(self.keys), size), dtype=np.bool_)
        merged: dict[str, Any] = {}
        for key, column, mask in zip(self.keys, self.columns(blocks), masks, strict=True):
            merged[key] = column
            merged[f"_{key}"] = mask
        return merged


class _Mixed(Exception):
    """One key has values of several kinds, or a key looks like another one's mask."""


def snapshot(info: dict[str, Any]) -> dict[str, Any]:
    """An environment's infos, safe from what it writes into its own dicts and arrays later.

    ``final_obs`` is left alone: it is kept by reference, as gymnasium keeps it.
    """
    copied = dict(info)
    for key, value in copied.items():
        if isinstance(value, np.ndarray):
            if key != "final_obs":
                copied[key] = value.copy()
        elif isinstance(value, dict) and key != "final_obs":
            copied[key] = snapshot(value)
    return copied


def collect(adds: list[Add], size: int) -> ShardInfos | Table:
    """Merge what the environments of a shard returned in one step."""
    if not adds:
        return ShardInfos({}, size, {})
    table = _tabulate(adds, size)
    if table is not None:
        return table
    try:
        data, tags = _collect(adds, size)
    except _Mixed:
        return ShardInfos(_add_all([(0, adds)], size), size, {}, adds)
    return ShardInfos(data, size, tags)


def expand(infos: Any) -> dict[str, Any]:
    """A shard's infos as a dict."""
    if isinstance(infos, Table):
        schema = infos.schema
        # copied: the blocks of a table that came by message are read-only views of it
        data = schema.infos([np.array(block) for block in infos.blocks], schema.size)
        return ShardInfos(data, schema.size, dict(zip(schema.keys, schema.tags, strict=True)))
    merged: dict[str, Any] = infos
    return merged


#: Schemas by size, keys and types of values; None where infos of these types make no table.
_schemas: dict[Any, Schema | None] = {}


def _tabulate(adds: list[Add], size: int) -> Table | None:
    if len(adds) != size:
        return None
    first = adds[0][1]
    keys = tuple(first)
    kinds = tuple(map(type, first.values()))
    values = []
    for i, (row, info) in enumerate(adds):
        if row != i or tuple(info) != keys or tuple(map(type, info.values())) != kinds:
            return None
        values.append(list(info.values()))
    shapes = tuple((v.dtype, v.shape) for v in values[0] if type(v) is np.ndarray)
    try:
        schema = _schemas[size, keys, kinds, shapes]
    except KeyError:
        schema = _schema(size, keys, values[0])
        if len(_schemas) < 1024:
            _schemas[size, keys, kinds, shapes] = schema
    if schema is None:
        return None
    blocks: list[np.ndarray] = []
    for kind, at in schema.groups:
        if len(at) == len(keys):
            blocks.append(np.array(values, kind).T)
        else:
            blocks.append(np.array([[row[i] for i in at] for row in values], kind).T)
    for i in schema.arrays:
        if any((row[i].dtype, row[i].shape) != schema.tags[i] for row in values):
            return None
        blocks.append(np.stack([row[i] for row in values]))
    return Table(schema, blocks)


def _schema(size: int, keys: tuple[str, ...], values: list[Any]) -> Schema | None:
    tags = tuple(_tag(key, value) for key, value in zip(keys, values, strict=True))
    for key, tag in zip(keys, tags, strict=True):
        # a key that begins with an underscore may be taken for another one's mask
        if tag is None or isinstance(tag, dict) or key.startswith("_"):
            return None
        if isinstance(tag, tuple) and tag[0].hasobject:
            return None
    return Schema(size, keys, tags) if keys else None


def _collect(adds: list[Add], size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    columns: dict[str, tuple[list[int], list[Any]]] = {}
    for i, info in adds:
        for key, value in info.items():
            column = columns.get(key)
            if column is None:
                column = columns[key] = ([], [])
            column[0].append(i)
            column[1].append(value)
    data: dict[str, Any] = {}
    tags: dict[str, Any] = {}
    for key, (rows, values) in columns.items():
        if key.startswith("_") and key[1:] in columns:
            raise _Mixed
        tag = _tag(key, values[0])
        if isinstance(tag, type):
            same = all(type(value) is tag for value in values)
        else:
            same = all(_tag(key, value) == tag for value in values)
        if not same:
            raise _Mixed
        if isinstance(tag, dict):
            data[key], tags[key] = _collect(list(zip(rows, values, strict=True)), size)
        else:
            array = data[key] = _empty(tag, size)
            tags[key] = tag
            if array.dtype.hasobject:
                for i, value in zip(rows, values, strict=True):
                    array[i] = value
            elif len(rows) == size and rows[0] == 0 and rows[-1] == size - 1:
                array[:] = values
            else:
                array[rows] = values
        mask = data[f"_{key}"] = np.zeros(size, dtype=np.bool_)
        mask[rows] = True
    return data, tags


def _tag(key: str, value: Any) -> Any:
    kind = type(value)
    if key == "final_obs":
        return None
    if kind in _SCALARS or issubclass(kind, np.number):
        return kind
    if isinstance(value, dict):
        return {}
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    return None


def _empty(tag: Any, size: int) -> np.ndarray:
    if tag is None:
        return np.full(size, fill_value=None, dtype=object)
    if isinstance(tag, tuple):
        return np.zeros((size, *tag[1]), dtype=tag[0])
    return np.zeros(size, dtype=tag)


class _Adder(VectorEnv):
    """gymnasium's own rule, for the cases in which the order of environments matters."""

    def __init__(self, size: int) -> None:
        self.num_envs = size


def _add_all(parts: list[tuple[int, list[Add]]], size: int) -> dict[str, Any]:
    adder = _Adder(size)
    infos: dict[str, Any] = {}
    for offset, adds in parts:
        for i, info in adds:
            infos = adder._add_info(infos, info, offset + i)
    return infos


def merge(parts: Sequence[Any], sizes: Sequence[int]) -> dict[str, Any]:
    """The whole batch's infos from those of its shards, which have ``sizes`` environments."""
    if not any(parts):
        return {}
    total = sum(sizes)
    first = parts[0]
    if isinstance(first, Table) and all(_alike(part, first) for part in parts):
        schema = first.schema
        blocks: list[np.ndarray] = []
        for i in range(len(first.blocks)):
            axis = 1 if i < len(schema.groups) else 0
            blocks.append(np.concatenate([part.blocks[i] for part in parts], axis))
        return schema.infos(blocks, total)
    parts = [expand(part) for part in parts]
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    ours = [part for part in parts if isinstance(part, ShardInfos)]
    if len(ours) < len(parts):
        return _merge_plain(list(zip(parts, offsets, sizes, strict=True)), total)
    try:
        if any(part.adds is not None for part in ours):
            raise _Mixed
        tagged: list[_Tagged] = [
            (part, part.tags, i, n) for part, i, n in zip(ours, offsets, sizes, strict=True)
        ]
        return _merge_tagged(tagged, total)
    except _Mixed:
        adds = [part.adds if part.adds is not None else _undo(part, part.tags) for part in ours]
        return _add_all(list(zip(offsets, adds, strict=True)), total)


def _alike(part: Any, first: Table) -> bool:
    if not isinstance(part, Table):
        return False
    mine, other = part.schema, first.schema
    return mine is other or (mine.keys == other.keys and mine.tags == other.tags)


_Tagged = tuple[dict[str, Any], dict[str, Any], int, int]


def _merge_tagged(parts: list[_Tagged], total: int) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    nested: dict[str, list[_Tagged]] = {}
    for data, tags, offset, size in parts:
        rows = slice(offset, offset + size)
        for key, tag in tags.items():
            is_dict = isinstance(tag, dict)
            if key not in merged:
                if f"_{key}" in kinds or (key.startswith("_") and key[1:] in kinds):
                    raise _Mixed
                kinds[key] = {} if is_dict else tag
                merged[key] = None if is_dict else _empty(tag, total)
                merged[f"_{key}"] = np.zeros(total, dtype=np.bool_)
            elif kinds.get(key, _Mixed) != ({} if is_dict else tag):
                raise _Mixed
            if is_dict:
                nested.setdefault(key, []).append((data[key], tag, offset, size))
            else:
                merged[key][rows] = data[key]
            merged[f"_{key}"][rows] = data[f"_{key}"]
    for key, inner in nested.items():
        merged[key] = _merge_tagged(inner, total)
    return merged


def _undo(data: dict[str, Any], tags: dict[str, Any]) -> list[Add]:
    """What the environments returned, from their merged infos."""
    adds: dict[int, dict[str, Any]] = {}
    for key, tag in tags.items():
        rows = np.flatnonzero(data[f"_{key}"]).tolist()
        if isinstance(tag, dict):
            inner = dict(_undo(data[key], tag))
            for i in rows:
                adds.setdefault(i, {})[key] = inner.get(i, {})
            continue
        # numpy hands out its own scalars, and for Python's types the exact Python value
        plain = tag in _SCALARS if isinstance(tag, type) else False
        for i in rows:
            value = data[key][i]
            adds.setdefault(i, {})[key] = value.item() if plain else value
    return sorted(adds.items())


_Plain = tuple[dict[str, Any], int, int]


def _merge_plain(parts: list[_Plain], total: int) -> dict[str, Any]:
    """Infos of vector environments that are not gymnasium's own, row by row.

    A value with one entry for each environment of the shard is laid out by rows, anything else
    is repeated for the shard's rows. A ``_key`` mask appears where a shard has one, or where a
    shard lacks the key.
    """
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for data, _, _ in parts for key in data):
        if key.startswith("_") and any(key[1:] in data for data, _, _ in parts):
            continue
        having = [part for part in parts if key in part[0]]
        if all(isinstance(data[key], dict) for data, _, _ in having):
            merged[key] = _merge_plain([(data[key], i, n) for data, i, n in having], total)
        else:
            merged[key] = _rows([(data[key], i, n) for data, i, n in having], total)
        masks = [(data.get(f"_{key}"), i, n) for data, i, n in having]
        if len(having) < len(parts) or any(mask is not None for mask, _, _ in masks):
            mask = merged[f"_{key}"] = np.zeros(total, dtype=np.bool_)
            for part, offset, size in masks:
                mask[offset : offset + size] = True if part is None else part
    return merged


def _rows(values: list[tuple[Any, int, int]], total: int) -> Any:
    arrays = [
        (np.asarray(value), offset, size)
        for value, offset, size in values
        if hasattr(value, "shape") and tuple(value.shape[:1]) == (size,)
    ]
    shapes = {array.shape[1:] for array, _, _ in arrays}
    if len(arrays) == len(values) and len(shapes) == 1:
        kind = np.result_type(*(array.dtype for array, _, _ in arrays))
        out = _empty((kind, shapes.pop()), total)
        if kind.hasobject:
            out[...] = None
        for array, offset, size in arrays:
            out[offset : offset + size] = array
        return out
    out = _empty(None, total)
    for value, offset, size in values:
        listed = isinstance(value, list | tuple) and len(value) == size
        for i in range(size):
            out[offset + i] = value[i] if listed else value
    return out
