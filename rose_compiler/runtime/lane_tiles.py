"""A loss and its gradients as the sum of tiles of rows, on lanes of one thread each.

Operations on a minibatch of small networks gain little from many threads: they wait for each other
at the end of every operation. Tiles of its rows meet once. Each is one call of TorchScript, which
leaves the GIL to the others. Sums are made in the order of the tiles, so results are the same on
every run; they round otherwise than those of the whole.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from rose_compiler.runtime.inductor import (
    PAYS,
    Built,
    Form,
    Refused,
    faster,
    finished,
    instead,
    traced,
)
from rose_compiler.runtime.lanes import ThreadLane
from rose_compiler.runtime.row_places import ALL, SUM, Coupled, Place, Rows
from rose_compiler.runtime.row_tiles import Tiling, tiling
from rose_compiler.runtime.script import SCRIPT, available, script_of

#: Rows that a tile has at least: with fewer, what is done once a call outweighs it.
LEAST_ROWS = 8

_lanes: weakref.WeakValueDictionary[int, ThreadLane] = weakref.WeakValueDictionary()


@functools.cache
def form_of(tiles: int) -> Form:
    """Losses in so many tiles; as a whole by TorchScript where that can't be, or is faster."""

    return Form("tiles", tiled=functools.partial(tiled, tiles), otherwise=SCRIPT)


def tiled(
    tiles: int,
    function: Callable[..., list[Tensor]],
    given: list[Tensor],
    whole: Collection[int],
) -> Built:
    """The function of tensors as a sum of tiles, for tensors like ``given``; those at the positions
    ``whole`` have no rows.

    Raises:
        Refused: where it is no such sum, or is not computed sooner that way.
    """
    if not available():
        raise Refused("this torch has no TorchScript that leaves operations as they are")
    if any(value.device.type != "cpu" for value in given):
        raise Refused("a device that is no CPU has no lanes of one thread")
    with torch.no_grad():
        graph = traced(function, given)
        try:
            found = tiling(graph, whole, LEAST_ROWS * tiles)
        except Coupled as error:
            raise Refused(f"not in tiles: {error}") from None
        run = _Tiles(found, given, tiles)
        all_at_once = script_of(graph, given)
        before, after = faster(lambda: all_at_once(*given), lambda: run(*given), finished)
    if after > PAYS * before:
        raise Refused(f"too little is won in tiles: {instead(before, after)}")
    return Built(run, graph.graph)


class _Tiles:
    """The tiles of a loss, each on a lane but the first, which the caller runs."""

    def __init__(self, found: Tiling, given: list[Tensor], tiles: int) -> None:
        cuts = [found.count * k // tiles for k in range(tiles + 1)]
        self._front = script_of(found.fronts(), given) if found.front else None
        handed = [*given, *(self._front(*given) if self._front else ())]
        self._runs = [script_of(found.tile(a, b - a), handed) for a, b in itertools.pairwise(cuts)]
        self._lanes = [_lane(k) for k in range(1, tiles)]
        self._places = found.made
        made: Any = found.graph.graph.output_node().args[0]
        self._values = [node.meta["val"] for node in made]
        self._sums = [k for k, place in enumerate(found.made) if place == SUM]

    def __call__(self, *given: Tensor) -> list[Tensor]:
        threads = torch.get_num_threads()
        if threads != 1:
            torch.set_num_threads(1)
        try:
            handed = [*given, *self._front(*given)] if self._front else list(given)
            rest = zip(self._lanes, self._runs[1:], strict=True)
            tasks = [lane.submit(0, _caught, run, handed) for lane, run in rest]
            made = [_caught(self._runs[0], handed), *(task.wait() for task in tasks)]
        finally:
            if threads != 1:
                torch.set_num_threads(threads)
        for each in made:
            if isinstance(each, Exception):
                raise each
        return self._joined(made)

    def _joined(self, made: list[Sequence[Tensor]]) -> list[Tensor]:
        sums = [made[0][k] for k in self._sums]
        for each in made[1:]:
            sums = list(torch._foreach_add(sums, [each[k] for k in self._sums]))
        found = iter(sums)
        return [
            next(found) if place == SUM else _join(place, [each[k] for each in made], like)
            for k, (place, like) in enumerate(zip(self._places, self._values, strict=True))
        ]


def _join(place: Place, parts: list[Tensor], like: Tensor) -> Tensor:
    """What the tiles made of one result, as the whole would lie in memory."""
    if isinstance(place, Rows):
        if like.is_contiguous():
            return torch.cat(parts, place.axis)
        whole = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        return torch.cat(parts, place.axis, out=whole)
    if place == ALL:
        return torch.stack(parts).all()
    return parts[0]


def _caught(run: Callable[..., Any], handed: list[Tensor]) -> Any:
    """What a tile makes, or the error: a lane that saw one would run nothing more."""
    try:
        return run(*handed)
    except Exception as error:
        return error


def _lane(number: int) -> ThreadLane:
    """The lane of a tile; one for all losses, and gone with the last of them."""
    found = _lanes.get(number)
    if found is None:
        found = _lanes[number] = ThreadLane(f"tile {number}", threads=1)
    return found
