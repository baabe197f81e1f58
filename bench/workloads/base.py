"""What a workload is: a training iteration in plain Python, and other ways to run the same one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bench.handwritten import Clock
from rose_compiler.sim.torch_envs import TorchSimulator

Function = Callable[..., Any]


@dataclass
class Training:
    """A live training: one iteration as a function, and what it is called with.

    `carried`: which arguments are replaced by what an iteration returns, in the order returned.
    """

    fn: Function
    args: list[Any]
    carried: tuple[int, ...] = ()
    closers: list[Callable[[], object]] = field(default_factory=list)

    def run(self, fn: Function | None = None) -> None:
        """Advance the training by one iteration, by `fn` in place of the function as written."""
        result = (fn or self.fn)(*self.args)
        if self.carried:
            for at, value in zip(self.carried, result, strict=False):
                self.args[at] = value

    def close(self) -> None:
        """Stop the simulator's hosts."""
        for closer in self.closers:
            with suppress(Exception):
                closer()


@dataclass(frozen=True)
class Size:
    """How large a training is built. `part`: only the environments of the largest shard."""

    tiny: bool = False
    one_core: bool = False
    part: bool = False


class Workload(ABC):
    """One row of the table."""

    name: str
    about: str
    #: Phases of `timed` that follow upon each other in a rollout of the largest shard alone.
    chain: tuple[str, ...] = ("rollout",)
    #: Phases that begin when the rollout has ended.
    tail: tuple[str, ...] = ("update",)
    #: Whether steps and updates alternate, so that neither chain has to wait for the other's end.
    interleaved: bool = False

    @abstractmethod
    def make(self, size: Size = Size(), seed: int = 1) -> Training:
        """Build a training; everything random in it derives from `seed`."""

    @abstractmethod
    def sequential(self, rollout: int, update: int, clock: Clock | None = None) -> Function:
        """The iteration as written, with a torch thread count for either phase."""

    def timed(self, threads: int, clock: Clock) -> Function:
        """The leanest sequential iteration there is; the clock gets its phases."""
        return self.sequential(threads, threads, clock)

    def simulators(self) -> Mapping[str, Callable[[], Training]]:
        """Other ways to run the simulator that a user can choose from, for E1."""
        return {}

    def by_hand(self, training: Training) -> Function | None:
        """C: act and update compiled by hand, the optimizer fused, advantages vectorized.

        Changes the training's own objects. `None` where there is none.
        """
        return None

    def overlapped(self) -> Mapping[str, Function]:
        """H: overlaps written by hand, to choose the fastest from."""
        return {}

    def state(self, training: Training) -> dict[str, Any]:
        """Everything that training has changed, as tensors, arrays and numbers."""
        found: dict[str, Any] = {"rng": torch.get_rng_state()}
        for at, value in enumerate(training.args):
            found.update(_leaves(f"arg{at}", value))
        return found


def _leaves(name: str, value: Any, seen: frozenset[int] = frozenset()) -> dict[str, Any]:
    """The tensors, arrays and numbers in a value, by path; not what leads back to itself."""
    if isinstance(value, torch.Tensor):
        return {name: value.detach()}
    if isinstance(value, np.ndarray | np.generic | int | float):
        return {name: value}
    inside: Any = ()
    if id(value) in seen:
        return {}
    seen |= {id(value)}
    if isinstance(value, torch.nn.Module):
        inside = value.state_dict()
    elif isinstance(value, torch.optim.Optimizer):
        inside = value.state_dict()["state"]
    elif isinstance(value, TorchSimulator):
        inside = value.get_state()
    elif isinstance(value, np.random.Generator):
        inside = {"drawn": value.bit_generator.state["state"]["state"] % (1 << 62)}
    elif isinstance(value, list | tuple):
        inside = dict(enumerate(value))
    elif isinstance(value, dict):
        inside = value
    elif type(value).__module__.startswith("bench."):
        inside = vars(value)
    return {k: v for i in inside for k, v in _leaves(f"{name}.{i}", inside[i], seen).items()}


class Threads:
    """Sets torch's thread count at the start of a phase and charges the phase before to a clock."""

    def __init__(self, rollout: int, update: int, clock: Clock | None) -> None:
        self.counts = {"rollout": rollout, "update": update}
        self.clock = clock

    def start(self) -> None:
        """The rollout begins."""
        torch.set_num_threads(self.counts["rollout"])
        if self.clock is not None:
            self.clock.start()

    def update(self) -> None:
        """The rollout has ended, the update begins."""
        if self.clock is not None:
            self.clock.mark("rollout")
        torch.set_num_threads(self.counts["update"])

    def end(self) -> None:
        """The update has ended."""
        if self.clock is not None:
            self.clock.mark("update")
