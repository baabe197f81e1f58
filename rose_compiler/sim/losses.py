"""Goes on without the episodes of a shard whose process died or hung: a declared loss.

For environments that can't hand over their state. They are built anew in another process and reset,
and the step that was under way says that their episodes were cut off. Training is not what it would
have been; the environments of other shards are not touched.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from rose_compiler.base.errors import fail
from rose_compiler.base.remarks import Remark
from rose_compiler.runtime.hosts import ProcessHost
from rose_compiler.runtime.hosts.tape import ENDS, LIVES
from rose_compiler.sim import layout
from rose_compiler.sim.body import Traits
from rose_compiler.sim.infos import collect
from rose_compiler.sim.process_shard import ProcessShard
from rose_compiler.sim.shard_vector import BodyResult

#: The key in a step's infos, with a mask beside it as gymnasium's keys have, that tells an episode
#: that was cut off so from one that ended by itself.
LOST = "rose_lost"
#: More than ``LIVES`` ends within so many steps of a shard are no accident, and an error.
STEPS = 1000


class TruncatingShard(ProcessShard):
    """A shard in a process that may be lost together with its episodes.

    Raises ``ConfigError`` (``sim-recover``) for environments that begin episodes in another way
    than gymnasium's next-step and disabled modes.
    """

    def __init__(
        self,
        name: str,
        traits: Traits,
        offset: int,
        host: ProcessHost,
        again: Callable[..., ProcessHost],
        remarks: list[Remark],
    ) -> None:
        super().__init__(name, traits, offset, host, again)
        why = host.call("why_not_anew")
        if why is not None:
            what = f"episodes of {name} can't be cut off at the end of its process: {why}"
            raise fail(
                "sim-recover",
                what,
                help='give factories of single environments, and a mode other than "same-step"',
            )
        self._remarks = remarks
        self._losses = 0
        self._steps = 0
        self._ends: deque[int] = deque(maxlen=LIVES + 1)  # after how many steps
        self._seeds = [offset + i for i in range(self.num_envs)]  # of the last reset with seeds
        self._settings: dict[str, tuple[Any, ...]] = {}  # attributes that were set, by name
        self._last: Any = None  # observations
        self._cut = False  # the next answer to a step is that the episodes were cut off
        self._resetting: tuple[Any, ...] = ()

    def invoke(self, method: str, *args: Any) -> Any:
        """Call a method of the body in its process, or in one that took over."""
        try:
            value = super().invoke(method, *args)
        except ENDS as error:
            self._lose(error)
            value = super().invoke(method, *args)
        if method == "set_attr":
            self._settings[args[0]] = layout.copy(args)
        return value

    def _begin(self, actions: Any) -> None:
        if self._cut:
            return
        try:
            super()._begin(actions)
        except ENDS as error:
            self._lose_step(error)

    def _finish(self) -> BodyResult:
        if not self._cut:
            try:
                result = super()._finish()
            except ENDS as error:
                self._lose_step(error)
            else:
                self._steps += 1
                self._last = layout.copy(result[0])
                return result
        self._cut = False
        rows = range(self.num_envs)
        return (
            self._last,
            np.zeros(self.num_envs),
            np.zeros(self.num_envs, np.bool_),
            np.ones(self.num_envs, np.bool_),
            collect([(i, {LOST: True}) for i in rows], self.num_envs),
        )

    def _begin_reset(self, seed: Any, options: dict[str, Any] | None, mask: Any) -> None:
        self._resetting = layout.copy((seed, options, mask))
        try:
            super()._begin_reset(seed, options, mask)
        except ENDS as error:
            self._lose(error)
            super()._begin_reset(*self._resetting)

    def _finish_reset(self) -> tuple[Any, Any]:
        seed, _, mask = self._resetting
        try:
            found = super()._finish_reset()
        except ENDS as error:
            self._lose(error)
            super()._begin_reset(*self._resetting)
            found = super()._finish_reset()
        self._last = layout.copy(found[0])
        if mask is None:
            self._cut = False  # nobody waits for the end of an episode any more
        given = [None if seed is None else seed + i for i in range(self.num_envs)]
        for i, own in enumerate(seed if isinstance(seed, list) else given):
            if own is not None and (mask is None or mask[i]):
                self._seeds[i] = int(own)
        return found

    def _lose_step(self, error: BaseException) -> None:
        if self._last is None:  # before the first reset: there is no episode to cut off
            raise error
        self._lose(error)

    def _lose(self, error: BaseException) -> None:
        """Build the environments anew, and reset them. Raises ``error`` where its process goes on,
        or where such ends come too close to each other."""
        if self.host.usable:
            raise error
        self._ends.append(self._steps)
        if len(self._ends) > LIVES and self._steps - self._ends[0] < STEPS:
            error.add_note(f"rose: {self.name} ended {len(self._ends)} times in {STEPS} steps")
            raise error
        self._losses += 1
        self._ticket = None
        self.renew()
        for args in self._settings.values():
            self.host.call("set_attr", *args)
        self.host.call("begin_anew", [new_seed(own, self._losses) for own in self._seeds])
        self._cut = self._last is not None
        last = self.offset + self.num_envs - 1
        why = (
            f"{str(error).splitlines()[0]}; a new process took over, and the episodes of "
            f"environments {self.offset} to {last} were cut off: what they and their wrappers "
            "remembered is lost"
        )
        self._remarks.append(Remark("note", "hosts", (), "lost", why))
        warnings.warn(why, RuntimeWarning, stacklevel=2)


def new_seed(seed: int, losses: int) -> int:
    """The seed of an environment whose last seed was ``seed``, or which is the one of that index,
    after so many losses of its shard."""
    return int(np.random.SeedSequence((seed, losses)).generate_state(1)[0])
