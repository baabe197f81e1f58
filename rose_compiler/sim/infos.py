"""Infos of single environments, of a shard and of the whole batch.

gymnasium merges the infos of n environments into one dict of arrays with a ``_key`` mask each. It
does so one environment at a time, and the first value of a key decides the array's type. The same
result is put together here from shards: a shard merges its own environments, and remembers enough
to tell when the order over the whole batch would have mattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rose_compiler.sim.tables import SCALARS, Add, Table, empty, tabulate, tag_of


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


@dataclass(frozen=True)
class Raw:
    """Infos whose values differ in kind, as the environments returned them."""

    adds: list[Add]
    size: int


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


def collect(adds: list[Add], size: int) -> ShardInfos | Table | Raw:
    """Merge what the environments of a shard returned in one step."""
    if not adds:
        return ShardInfos({}, size, {})
    table = tabulate(adds, size)
    if table is not None:
        return table
    try:
        data, tags = _collect(adds, size)
    except _Mixed:
        # not merged yet: it may fail for these environments alone, and not for the whole batch
        return Raw(adds, size)
    return ShardInfos(data, size, tags)


def expand(infos: Any) -> dict[str, Any]:
    """A shard's infos as a dict."""
    if isinstance(infos, Table):
        schema = infos.schema
        # copied: the blocks of a table that came by message are read-only views of it
        data = schema.infos([np.array(block) for block in infos.blocks], schema.size)
        return ShardInfos(data, schema.size, dict(zip(schema.keys, schema.tags, strict=True)))
    if isinstance(infos, Raw):
        return ShardInfos(_add_all([(0, infos.adds)], infos.size), infos.size, {}, infos.adds)
    merged: dict[str, Any] = infos
    return merged


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
        tag = tag_of(key, values[0])
        if isinstance(tag, type):
            same = all(type(value) is tag for value in values)
        else:
            same = all(tag_of(key, value) == tag for value in values)
        if not same or len(set(rows)) < len(rows):
            raise _Mixed
        if isinstance(tag, dict):
            data[key], tags[key] = _collect(list(zip(rows, values, strict=True)), size)
        else:
            array = data[key] = empty(tag, size)
            tags[key] = tag
            if array.dtype.hasobject:
                for i, value in zip(rows, values, strict=True):
                    array[i] = value
            else:
                array[rows] = values
        mask = data[f"_{key}"] = np.zeros(size, dtype=np.bool_)
        mask[rows] = True
    return data, tags


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
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    known: list[Any] = [part if isinstance(part, Raw) else expand(part) for part in parts]
    # empty infos fit any kind
    known = [part or ShardInfos({}, n, {}) for part, n in zip(known, sizes, strict=True)]
    if not all(isinstance(part, Raw | ShardInfos) for part in known):
        return _merge_plain(list(zip(map(expand, known), offsets, sizes, strict=True)), total)
    if not any(isinstance(part, Raw) or part.adds is not None for part in known):
        try:
            placed = zip(known, offsets, sizes, strict=True)
            return _merge_tagged([(part, part.tags, i, n) for part, i, n in placed], total)
        except _Mixed:
            pass
    return _add_all([(i, _adds(part)) for part, i in zip(known, offsets, strict=True)], total)


def _adds(part: Any) -> list[Add]:
    found: list[Add] | None = part.adds
    return _undo(part, part.tags) if found is None else found


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
                merged[key] = None if is_dict else empty(tag, total)
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
        for i in rows:
            value = data[key][i]
            if isinstance(tag, tuple):
                value = np.asarray(value)  # an array of no dimensions came out as a scalar
            elif tag in SCALARS:
                value = value.item()
            adds.setdefault(i, {})[key] = value
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
        out = empty((kind, shapes.pop()), total)
        if kind.hasobject:
            out[...] = None
        for array, offset, size in arrays:
            out[offset : offset + size] = array
        return out
    out = empty(None, total)
    for value, offset, size in values:
        listed = isinstance(value, list | tuple) and len(value) == size
        for i in range(size):
            out[offset + i] = value[i] if listed else value
    return out
