"""What meets the schedule that is settled on: it with bound cores, with TorchScript, in
tiles of rows, compiled, as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from rose_compiler.api.verdicts import Verdicts
from rose_compiler.base.decision import Decision
from rose_compiler.runtime.script import available
from rose_compiler.tune.chooser import Chooser
from rose_compiler.tune.space import with_compiled, with_script, with_tiles

#: Seconds that Inductor is expected to take. It is asked for no more than that long a training has
#: gone on: one that ends soon after has lost half of its time at worst, and a short one nothing.
COMPILE_S = 10.0


class FollowUps:
    """Lets schedules that follow from the one that a search settled on meet it, each at its time.

    ``plain`` is program order with what every candidate has.
    """

    def __init__(self, verdicts: Verdicts, plain: Decision) -> None:
        self.verdicts = verdicts
        self._plain = plain
        self._asked_to_compile = False
        self._bound_after = -1  # drifts after which simulators bound to cores were tried
        self._asked_for_script = False
        self._asked_for_tiles = False
        #: Whether there are losses or graphs to compile.
        self.compilable: Callable[[], bool] = lambda: False
        #: Whether bits may change.
        self.close = False
        #: A schedule with processes bound to cores, where that may pay.
        self.bound: Callable[[Decision | None], Decision | None] = lambda _: None
        #: Told of such a schedule, and the seconds of an iteration expected without and with cores.
        self.foreseen: Callable[[Decision, float, float], None] = lambda *_: None

    def next(self, chooser: Chooser, adopted: bool) -> None:
        """Let what is to follow meet what is settled on, if anything is. ``adopted``: that comes
        from an earlier run."""
        if chooser.settled:
            self._bind(chooser, adopted)
        for follow in (self._script, self._tiles, self._compile, self._capture):
            if chooser.settled:
                follow(chooser)

    def _bind(self, chooser: Chooser, adopted: bool) -> None:
        """Let what is settled on meet the same with simulators bound to cores: once, and after each
        drift, when it may also be that without them it has become the faster one."""
        drifted = chooser.drifts > 0
        if self._bound_after == chooser.drifts or chooser.ended_early:
            return
        if adopted and not drifted:
            return
        self._bound_after = chooser.drifts
        kept = _chosen(chooser)
        if (
            kept is not None
            and kept.cores
            and all(lane.startswith("shard") for lane, _ in kept.cores)
        ):
            kept = replace(kept, cores=())
        decision = self.bound(kept)
        if decision == _chosen(chooser):
            decision = kept
        if decision is not None and (drifted or decision not in chooser.candidates):
            self._foresee(chooser, decision, kept)
            chooser.challenge(decision)

    def _foresee(self, chooser: Chooser, decision: Decision, kept: Decision | None) -> None:
        """Say what an iteration with bound simulators should take, before one has run: as much less
        than what is settled on was measured to take as the predictor has it."""
        row = next((r for r in chooser.reports() if r.decision == kept), None)
        if not decision.cores or kept is None or row is None or not row.seconds_per_work:
            return
        ahead, without = self.verdicts.forecast(decision), self.verdicts.forecast(kept)
        if not ahead or not without:
            return
        seconds = row.seconds_per_work
        self.verdicts.quotas[decision] = seconds, seconds * ahead / without
        self.foreseen(decision, *self.verdicts.quotas[decision])

    def _script(self, chooser: Chooser) -> None:
        """Let what is settled on meet the same with its losses and graphs run by TorchScript, once;
        that takes no time to speak of."""
        if self._asked_for_script or chooser.ended_early:
            return
        self._asked_for_script = True
        decision = with_script(_chosen(chooser), self._plain)
        if decision not in chooser.candidates and self.compilable() and available():
            chooser.challenge(decision)

    def _tiles(self, chooser: Chooser) -> None:
        """Let what is settled on, if TorchScript runs its losses, meet the same with them in as
        many tiles of rows as there are cores, once, where bits may change."""
        decision = with_tiles(_chosen(chooser), torch.get_num_threads())
        if self._asked_for_tiles or not self.close or chooser.ended_early or decision is None:
            return
        self._asked_for_tiles = True
        if decision not in chooser.candidates and self.compilable() and available():
            chooser.challenge(decision)

    def _compile(self, chooser: Chooser) -> None:
        """Let what is settled on meet the same with its losses compiled, once, where the training
        is long enough to win back what compiling takes."""
        if self._asked_to_compile or not self.close or chooser.total_s < COMPILE_S:
            return
        if (decision := self.to_compile(chooser)) is not None:
            chooser.challenge(decision)
        self._asked_to_compile |= not chooser.ended_early and chooser.allows(COMPILE_S)

    def to_compile(self, chooser: Chooser) -> Decision | None:
        """The compiled form that is to be tried at its time, if any."""
        if self._asked_to_compile or chooser.ended_early or not self.close:
            return None
        if not chooser.allows(COMPILE_S):
            return None
        decision = with_compiled(_chosen(chooser), self._plain)
        return None if decision in chooser.candidates or not self.compilable() else decision

    def _capture(self, chooser: Chooser) -> None:
        """Let what is settled on, if it is compiled, meet the same replayed as CUDA graphs, once,
        where there is a CUDA device."""
        found = _chosen(chooser)
        if found is None or not found.compile or found.cuda_graphs or chooser.ended_early:
            return
        decision = replace(found, cuda_graphs=True)
        if decision not in chooser.candidates and torch.cuda.is_available():
            chooser.challenge(decision)


def _chosen(chooser: Chooser) -> Decision | None:
    return chooser.candidates[chooser.best]
