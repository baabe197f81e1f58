"""What could run in a window: work of the program that depends on nothing that runs there."""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.base.profile import Profile
from rose_compiler.ir.deps import Dependences, title_name, why
from rose_compiler.ir.keys import nodes_by_key
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import Program, is_call, is_exit
from rose_compiler.tune.windows import loop_times

#: Work shorter than this many seconds is not worth a hand-over.
LEAST_S = 1e-4


class Fits:
    """Answers what could fit into a window, from dependences and measured times.

    Work fits if it is at least :data:`LEAST_S` and at most as long as the window, and neither
    depends on what runs there nor the other way round. Independent of each other or not, each
    candidate is judged alone: which of them go together is the scheduler's question.
    """

    def __init__(self, program: Program, profile: Profile) -> None:
        self.deps = Dependences(program)
        self.nodes = nodes_by_key(program)
        self.labels = {o.op: o.label for o in profile.ops}
        self.seconds = {o.op: o.median_s for o in profile.ops}
        if profile.timeline is not None:
            self.seconds.update(loop_times(profile.timeline))
        self._free: dict[tuple[fx.Node, fx.Node], bool] = {}

    def __call__(
        self, path: tuple[str, ...], running: tuple[str, ...], seconds: float
    ) -> tuple[str, ...]:
        """Labels of what could run, the longest first."""
        beside = [self.nodes[key] for key in running if key in self.nodes]
        if not beside:
            return ()
        found: list[tuple[float, str]] = []
        for key, cost in self.seconds.items():
            node = self.nodes.get(key)
            if node is None or node in beside or not LEAST_S <= cost <= seconds:
                continue
            if is_exit(node) or is_call(node, BRANCH):
                continue
            around = key.split("/")[:-1]
            # deeper than the window there is a trip to choose, so only whole inner loops count
            if tuple(around) != path[: len(around)]:
                continue
            if is_call(node, LOOP) and node.name in path:
                continue
            if all(self._independent(node, other) for other in beside):
                found.append((cost, self.labels.get(key) or f"loop {title_name(node)}"))
        return tuple(dict.fromkeys(label for _, label in sorted(found, reverse=True)))

    def _independent(self, a: fx.Node, b: fx.Node) -> bool:
        pair = (a, b)
        if pair not in self._free:
            self._free[pair] = why(self.deps, a, b) is None
        return self._free[pair]
