"""Merging infos by shards gives what gymnasium's merge by environments gives."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from sim_equal import assert_same

from rose_compiler.sim.codec import InfoCodec
from rose_compiler.sim.infos import ShardInfos, collect, expand, merge, snapshot
from rose_compiler.sim.tables import Table


class Reference(VectorEnv):
    def __init__(self, count: int) -> None:
        self.num_envs = count

    def merge(self, infos: list[list[dict[str, Any]]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for i, own in enumerate(infos):
            for info in own:
                merged = self._add_info(merged, info, i)
        return merged


scalars = st.one_of(
    st.integers(-100, 100),
    st.booleans(),
    st.floats(-4, 4, width=32),
    st.floats(-4, 4).map(np.float64),
    st.floats(-4, 4, width=32).map(np.float32),
    st.integers(0, 100).map(np.int16),
    st.booleans().map(np.bool_),
)
arrays = st.one_of(
    st.integers(0, 9).map(lambda v: np.full(3, v)),
    st.integers(0, 9).map(lambda v: np.full((2, 2), v, np.float32)),
    st.integers(0, 9).map(lambda v: np.array(v / 2)),
)
objects = st.one_of(st.sampled_from(["a", "bc", ""]), st.none(), st.just([1, 2]), st.just((1,)))
keys = st.sampled_from(["x", "y", "z", "_x", "note"])


def dicts(values: Any) -> Any:
    return st.dictionaries(keys, values, max_size=3)


values = st.one_of(scalars, arrays, objects)
info = dicts(st.one_of(values, dicts(st.one_of(values, dicts(values)))))
# the same few values over and over, so that environments often agree in kind
uniform = st.sampled_from([{"x": 1.5, "y": np.float32(2)}, {"x": 2.5, "y": np.float32(1)}])
tame = st.one_of(uniform, st.sampled_from([{"x": 3.5, "n": {"x": 1}}, {"x": 1.0}, {}]))


def split(infos: list[Any], sizes: list[int]) -> list[list[Any]]:
    ends = np.cumsum(sizes).tolist()
    return [infos[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def by_shards(infos: list[list[dict[str, Any]]], sizes: list[int], form: str) -> dict[str, Any]:
    parts: list[Any] = []
    for own in split(infos, sizes):
        adds = [(i, snapshot(info)) for i, each in enumerate(own) for info in each]
        part: Any = collect(adds, len(own))
        if form == "expanded":
            try:
                part = expand(part)
            except Exception:
                reject()  # gymnasium can't merge these environments' infos on their own
        if form == "packed":
            one, other = InfoCodec(), InfoCodec()
            other.unpack(one.pack(part))  # the second time, a table goes without pickling
            part = other.unpack(one.pack(part))
        parts.append(part)
    return merge(parts, sizes)


@pytest.mark.parametrize("form", ["collected", "packed", "expanded"])
@settings(max_examples=250, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_shards_merge_as_gymnasium_does(form: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    one = data.draw(st.sampled_from([info, tame, uniform]))
    steps = st.lists(one, min_size=data.draw(st.integers(0, 1)), max_size=2)
    infos = data.draw(st.lists(steps, min_size=sum(sizes), max_size=sum(sizes)))
    try:
        expected = Reference(sum(sizes)).merge(copy.deepcopy(infos))
    except Exception:  # gymnasium can't merge a string into numbers, say
        with pytest.raises((TypeError, ValueError, AttributeError, KeyError)):
            by_shards(infos, sizes, form)
        return
    merged = by_shards(infos, sizes, form)
    if _ordered(infos):
        assert_same(merged, expected)
    else:
        assert_same(_sorted(merged), _sorted(expected))


def _ordered(infos: Any) -> bool:
    """Whether every environment returned one dict: then even the order of keys is the same."""
    return all(len(own) == 1 and list(own[0]) == list(infos[0][0]) for own in infos)


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    return value


@given(infos=st.lists(tame, min_size=1, max_size=4))
def test_a_shards_own_infos_are_gymnasiums(infos: list[dict[str, Any]]) -> None:
    adds = [(i, snapshot(info)) for i, info in enumerate(infos)]
    merged = expand(collect(adds, len(infos)))
    assert_same(dict(merged), Reference(len(infos)).merge([[info] for info in infos]))


def test_infos_that_gymnasium_merges_only_as_a_whole() -> None:
    """The last two alone fail (a list does not fit into integers); after an object they don't."""
    infos = [[{"x": "text"}], [{"x": 1}], [{"x": [1, 2]}]]
    merged = by_shards(infos, [1, 2], "collected")
    assert_same(merged, Reference(3).merge(infos))


def test_the_usual_step_is_a_table_and_packs_without_pickling() -> None:
    infos = [{"x": np.float64(i), "n": i, "pose": np.full(3, i), "ok": True} for i in range(4)]
    table = collect(list(enumerate(infos)), 4)
    assert isinstance(table, Table)
    one, other = InfoCodec(), InfoCodec()
    other.unpack(one.pack(table))
    data = one.pack(table)
    assert len(data) == 2 + 4 * (8 + 8 + 3 * 8 + 1)
    assert_same(expand(other.unpack(data)), expand(table))
    other_step = collect([(i, {"x": 1.0}) for i in range(4)], 4)
    for part in (other_step, table, other_step):
        assert_same(dict(expand(other.unpack(one.pack(part)))), dict(expand(part)))
    assert one.pack({}) == b""
    assert other.unpack(b"") == {}


def test_merged_infos_can_be_written() -> None:
    parts = []
    for start in (0, 2):
        table = collect([(i, {"x": float(start + i)}) for i in range(2)], 2)
        one, other = InfoCodec(), InfoCodec()
        other.unpack(one.pack(table))
        parts.append(other.unpack(one.pack(table)))
    merged = merge(parts, [2, 2])
    merged["x"][0] = 7
    merged["_x"][0] = False
    assert_same(merged["x"], np.array([7.0, 1, 2, 3]))
    own = expand(parts[0])
    own["x"][0] = 9
    assert_same(merged["x"][0], np.float64(7))
    assert isinstance(own, ShardInfos)


def test_an_environment_may_change_its_infos_afterwards() -> None:
    own = {"x": np.zeros(2), "n": {"y": 1}, "final_obs": None}
    kept = snapshot(own)
    own["x"][:] = 5  # type: ignore[index]
    own["n"]["y"] = 5  # type: ignore[index]
    assert_same(kept["x"], np.zeros(2))
    assert kept["n"] == {"y": 1}
