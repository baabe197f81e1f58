"""Operations of generated programs: small, deterministic, and truthful about what they touch.

Integers stay below 1009 and rows are float64 vectors of 4, so that a run is fast and its bits show
every change of order. Lists and grids have :data:`SIZE` entries; indices stay below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.ir.ops import Op, Signature
from rose_compiler.testing.program_state import STATE_OPS, Net

SIZE = 8
WIDTH = 4
_MODULUS = 1009

Objects = dict[str, Any]


class World:
    """What operations reach without being handed it: the objects of the run, and the host's log."""

    def __init__(self) -> None:
        self.live: Objects = {}
        self.host: list[int] = []


class Simulator:
    """A simulator that hands out its own observation buffer, which the next step overwrites."""

    def __init__(self) -> None:
        self.x = 3
        self.outputs = torch.zeros(WIDTH, dtype=torch.float64)

    def step(self, action: int) -> tuple[torch.Tensor, int, bool, bool, dict[str, int]]:
        self.x = (self.x * 5 + action) % _MODULUS
        self.outputs += torch.arange(WIDTH, dtype=torch.float64) * self.x
        self.outputs %= 32.0
        return self.outputs, self.x, self.x % 5 == 0, False, {}


def fresh_objects() -> Objects:
    """The objects of the state roots as every run finds them."""
    return {
        "cells": [(7 * i + 2) % 50 for i in range(SIZE)],
        "bag": {"left": list(range(SIZE)), "right": [9] * SIZE},
        "grid": torch.arange(SIZE * WIDTH, dtype=torch.float64).reshape(SIZE, WIDTH) / 3,
        "table": {"hits": 1, "last": 0},
        "gen": torch.Generator().manual_seed(11),
        "sim": Simulator(),
        "net": Net(),
        "chance": np.random.default_rng(13),
    }


OPS: dict[str, Op] = dict(STATE_OPS)


def _op(
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    results: int = 1,
    *,
    kind: str = "block",
    params: tuple[str, ...] | None = None,
    **more: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        code = function.__code__
        names = params if params is not None else code.co_varnames[: code.co_argcount]
        name = function.__name__.strip("_")
        signature = Signature(
            name, tuple(names), reads, writes, results=results, may_raise=False, **more
        )
        attributes = {"step": {"env": "sim", "action": "a"}} if kind == "step" else {}
        OPS[name] = Op(signature, function, kind=kind, attributes=attributes)
        return function

    return register


# Values only.


@_op()
def mix(a: int, b: int) -> int:
    return (a * 31 + b * 17 + 5) % _MODULUS


@_op(kind="component")
def twist(a: int) -> int:
    return (a * a + 11) % _MODULUS


@_op()
def odd(a: int) -> bool:
    return a % 2 == 1


@_op()
def small(a: int) -> int:
    return a % 6


@_op(results=2)
def pair(a: int) -> tuple[int, int]:
    return a // 7, a % 7


@_op()
def items(a: int) -> tuple[int, ...]:
    return tuple((a + 3 * i) % 40 for i in range(a % 4))


@_op()
def spread(a: int) -> torch.Tensor:
    return torch.arange(WIDTH, dtype=torch.float64) + a / 7


@_op()
def weigh(x: torch.Tensor) -> int:
    return int(x.sum().item() * 16) % _MODULUS


@_op()
def grad_mode() -> int:
    """Shows the thread-local mode that the operation runs under."""
    return int(torch.is_grad_enabled())


# Lists.


@_op(writes=("cells[i]",), results=0)
def store(cells: list[int], i: int, v: int) -> None:
    cells[i] = v


@_op(reads=("cells[i]",))
def load(cells: list[int], i: int) -> int:
    return cells[i]


@_op(reads=("cells[i]",), writes=("cells[i]",), results=0)
def add_to(cells: list[int], i: int, v: int) -> None:
    cells[i] = (cells[i] + v) % _MODULUS


@_op(reads=("cells",))
def total(cells: list[int]) -> int:
    return sum((i + 1) * v for i, v in enumerate(cells)) % _MODULUS


@_op()
def new_cells(v: int) -> list[int]:
    return [v] * SIZE


@_op(reads=("bag",))
def digest(bag: dict[str, list[int]]) -> int:
    return (total(bag["left"]) * 3 + total(bag["right"])) % _MODULUS


# Grids and their rows.


@_op(writes=("grid[i]",), results=0)
def store_row(grid: torch.Tensor, i: int, x: torch.Tensor) -> None:
    grid[i] = x


@_op(reads=("grid[i]",))
def load_row(grid: torch.Tensor, i: int) -> torch.Tensor:
    return grid[i].clone()


@_op(reads=("grid[i]",))
def view_row(grid: torch.Tensor, i: int) -> torch.Tensor:
    """A view: its node aliases the grid."""
    return grid[i]


@_op(reads=("x",), writes=("x",), results=0)
def scale(x: torch.Tensor) -> None:
    x.mul_(0.5).add_(1)


@_op(reads=("grid",))
def norm(grid: torch.Tensor) -> int:
    weights = torch.arange(1, SIZE + 1, dtype=torch.float64)
    return int((grid.sum(1) * weights).sum().item()) % _MODULUS


@_op()
def new_grid() -> torch.Tensor:
    return torch.zeros(SIZE, WIDTH, dtype=torch.float64)


# A dict of which two entries are states of their own.


@_op(reads=("table.hits",), writes=("table.hits",), results=0)
def hit(table: dict[str, int]) -> None:
    table["hits"] += 1


@_op(reads=("table.hits",))
def peek(table: dict[str, int]) -> int:
    return table["hits"] % _MODULUS


@_op(writes=("table.last",), results=0)
def remember(table: dict[str, int], v: int) -> None:
    table["last"] = v


@_op(reads=("table",))
def recall(table: dict[str, int]) -> int:
    return (table["hits"] * 100 + table["last"]) % _MODULUS


# Generators: one that is handed over, and torch's global one.


@_op(reads=("gen",), writes=("gen",))
def roll(gen: torch.Generator) -> int:
    return int(torch.randint(_MODULUS, (), generator=gen))


@_op(reads=("rng:torch",), writes=("rng:torch",))
def dice() -> int:
    return int(torch.randint(_MODULUS, ()))


@_op(reads=("rng:torch",), writes=("rng:torch",))
def noise() -> torch.Tensor:
    return torch.randn(WIDTH, dtype=torch.float64)


# A simulator.


@_op(reads=("sim",), writes=("sim",), kind="step")
def step(a: int, sim: Simulator) -> tuple[Any, ...]:
    return sim.step(a)


@_op(results=5)
def unpack(r: tuple[Any, ...]) -> tuple[Any, ...]:
    return r


def _graph(name: str, body: fx.GraphModule, **more: Any) -> None:
    params = tuple(n.name for n in body.graph.nodes if n.op == "placeholder")
    signature = Signature(name, params, (), (), may_raise=False, **more)
    OPS[name] = Op(signature, body, kind="graph", body=body)


def _blend(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.add(x * 0.5, y.fmod(8.0), alpha=2)


def _couple(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x - x.mean()) + torch.nn.functional.relu(x[0:1])


_graph(
    "blend",
    fx.symbolic_trace(_blend),
    batch=(("x", 0), ("y", 0), ("return.0", 0)),
    exact=True,
)
_graph("couple", fx.symbolic_trace(_couple))


def world_ops(world: World) -> dict[str, Op]:
    """The operations that reach beyond their arguments, for one program."""

    def log(v: int) -> None:
        world.host.append(v)

    def meddle(a: int) -> int:
        live = world.live
        live["cells"][a % SIZE] += a
        live["table"]["hits"] += 1
        live["grid"][a % SIZE] += 1
        live["net"].w.data[a % WIDTH] = a % 4
        live["bag"]["right"][0] = live["bag"]["left"][a % SIZE]
        world.host.append(-1)
        return (live["cells"][0] + int(torch.randint(9, (), generator=live["gen"]))) % _MODULUS

    return {
        "log": Op(Signature("log", ("v",), (), ("host",), results=0, may_raise=False), log),
        # nothing is said about it, so it reads and writes everything
        "meddle": Op(Signature("meddle", ("a",), may_raise=False), meddle),
    }
