"""Random loop nests that run: what passes are tested on besides hand-written programs.

:func:`programs` draws a :class:`Generated`: a program, its arguments, and objects that are made
anew for every run. ``generated.run_and_snapshot()`` runs it by the reference executor and returns
all that can be seen afterwards, so a pass is right on it when the snapshots before and after are
equal::

    @given(programs())
    def test_pass(generated):
        before = generated.run_and_snapshot()
        apply_pass(generated.program)
        assert generated.run_and_snapshot() == before
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx as fx
from hypothesis import strategies as st

from rose_compiler.frontend.record import spec_of
from rose_compiler.ir import facts, interp
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.testing.program_gen import FEATURES as FEATURES
from rose_compiler.testing.program_gen import Generator
from rose_compiler.testing.program_ops import Simulator, World, fresh_objects
from rose_compiler.testing.program_pool import Draw
from rose_compiler.testing.program_state import Net


class Types(interp.Hooks):
    """Notes the type of every value, as a compiled function does in its first call."""

    def value(self, node: fx.Node, value: Any) -> None:
        facts.put(node, spec=spec_of(value))


@dataclass(frozen=True)
class Snapshot:
    """All that can be seen after a run, comparable bit for bit."""

    result: Any
    states: Mapping[str, Any]
    raised: str = ""


@dataclass
class Generated:
    """A runnable program and its arguments."""

    program: Program
    args: dict[str, Any]
    world: World

    @property
    def bind(self) -> dict[str, Callable[..., Any]]:
        """The implementations of its operations, as :func:`parse` takes them."""
        named = self.program.ops.by_name.items()
        return {name: op.impl for name, op in named if op.impl is not None and op.kind != "graph"}

    def clone(self, text: str | None = None) -> Program:
        """The program once more, by way of its text, which is ``text`` if it is known; with types
        where values have graphs, since nothing else tells."""
        program = parse(dump(self.program) if text is None else text, self.bind)
        if "forward" in program.ops.by_name:
            self.run_and_snapshot(program, hooks=Types())
        return program

    def run_and_snapshot(
        self, program: Program | None = None, *, hooks: interp.Hooks | None = None
    ) -> Snapshot:
        """Run it, or another program in its place, on fresh objects and fresh generators."""

        def run(objects: dict[str, Any]) -> Any:
            return interp.run(program or self.program, self.args, objects, hooks=hooks)

        return self.observe(run)

    def observe(self, run: Callable[[dict[str, Any]], Any]) -> Snapshot:
        """What can be seen after ``run`` was called on fresh objects, however it executes them."""
        objects = fresh_objects()
        self.world.live = objects
        self.world.host.clear()
        result, raised = None, ""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(5)  # the CPU's alone: it is much cheaper
            try:
                result = run(objects)
            except Exception as error:  # what a program raises is part of what it does
                raised = f"{type(error).__name__}: {error}"
            states = {name: frozen(value) for name, value in objects.items()}
            states["rng:torch"] = frozen(torch.get_rng_state())
        states["host"] = frozen(self.world.host)
        return Snapshot(frozen(result), states, raised)


def observe(generated: Generated) -> tuple[Any, Mapping[str, Any]]:
    """The result and the final states of one run on fresh objects."""
    seen = generated.run_and_snapshot()
    return seen.result, seen.states


def frozen(value: Any) -> Any:
    """A value as immutable data, equal only to what has the same types, shapes and bits."""
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), array.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return frozen(value.get_state())
    if isinstance(value, np.random.Generator):
        return frozen(value.bit_generator.state)
    if isinstance(value, Simulator):
        return value.x, frozen(value.outputs)
    if isinstance(value, Net):
        return tuple((frozen(p), frozen(p.grad)) for p in value.parameters)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, *(frozen(item) for item in value)
    return type(value).__name__, value


def programs(
    *, without: Set[str] = frozenset(), max_depth: int = 3, size: int = 24
) -> st.SearchStrategy[Generated]:
    """Random programs that run.

    ``without`` names :data:`FEATURES` to leave out; ``size`` bounds the number of statements,
    ``max_depth`` the nesting of loops and branches.

    Raises:
        ValueError: for a feature that does not exist.
    """
    if unknown := without - FEATURES:
        raise ValueError(f"unknown features: {sorted(unknown)}")
    return _programs(FEATURES - without, max_depth, size)


@st.composite
def _programs(draw: Draw, features: frozenset[str], max_depth: int, size: int) -> Generated:
    generator = Generator(draw, features, max_depth, size)
    args = {"a": 5, "b": 8, "x": torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)}
    return Generated(generator.generate(), args, generator.world)
