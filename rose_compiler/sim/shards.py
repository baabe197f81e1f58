"""A shard of a :class:`ShardedEnv`, and the one that lives in the caller's thread.

Those in hosts are in ``hosted_shards.py`` and ``process_shard.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rose_compiler.base.errors import RoseError, RuntimeFault, fail, register
from rose_compiler.sim import layout
from rose_compiler.sim.body import Body, Traits
from rose_compiler.sim.infos import expand
from rose_compiler.sim.protocol import StepResult
from rose_compiler.sim.shard_vector import BodyResult
from rose_compiler.sim.tables import Table

register(
    "sim-order",
    RuntimeFault,
    "a shard's step was begun twice, or ended without being begun",
    "call `step_async` and `step_wait` in turn",
)
register(
    "sim-unusable",
    RuntimeFault,
    "a simulator is used after one of its steps or resets failed",
    "build the simulator anew: its environments are no longer in step with each other",
)


class BaseShard:
    """Environments ``offset`` to ``offset + num_envs`` of a :class:`ShardedEnv`.

    Follows :class:`rose_compiler.sim.protocol.Shard`. After a failed step or reset the shard
    refuses further ones; other shards go on, until the whole simulator is used again. A step that
    fails before the first reset only raises, as in gymnasium: a reset begins the episodes then.
    """

    def __init__(self, name: str, traits: Traits, offset: int) -> None:
        self.name = name
        self.traits = traits
        self.num_envs = traits.num_envs
        self.offset = offset
        #: True if ``step_async`` returns at once.
        self.native_async = traits.native_async
        #: What a step or reset raised, in one line; not the object, whose traceback holds this.
        self.fault: str | None = None
        #: True between ``step_async`` and ``step_wait``.
        self.busy = False
        #: True once the environments were reset: there is something to lose from then on.
        self.started = False

    def step(self, actions: Any) -> StepResult:
        """One step, from begin to end."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step; ``actions`` may be reused as soon as this returns."""
        self.check()
        try:
            self._begin(actions)
        except BaseException as error:
            self._fail_step(error)
            raise
        self.busy = True

    def step_wait(self) -> StepResult:
        """End the step, and return its results in fresh arrays.

        Raises what an environment raised, ``HostDied`` or ``HostTimeout``. After Ctrl-C the step
        is still under way, and may be waited for again.
        """
        *rest, infos = self.step_wait_packed()
        return (*rest, layout.copy(expand(infos)))

    def step_wait_packed(self) -> BodyResult:
        """As :meth:`step_wait`, with infos that only ``merge`` of the whole simulator reads.

        Most steps need the infos of the whole batch or none; each shard's own cost time.
        """
        obs, reward, terminated, truncated, infos = self.collect()
        return (
            layout.copy(obs),
            np.array(reward),
            np.array(terminated),
            np.array(truncated),
            infos if isinstance(infos, Table) else layout.copy(expand(infos)),
        )

    def collect(self) -> BodyResult:
        """End the step, and return results that the shard's next step may overwrite."""
        self.check_begun()
        try:
            result = self._finish()
        except BaseException as error:
            if not self._under_way():
                self._fail_step(error)
            raise
        self.busy = False
        return result

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset this shard's environments; arguments as for a vector environment of its size."""
        self.reset_async(seed, options, None)
        obs, infos = self.reset_collect()
        return layout.copy(obs), layout.copy(expand(infos))

    def reset_async(self, seed: Any, options: dict[str, Any] | None, mask: Any) -> None:
        """Begin a reset of all environments, or of those in ``mask``."""
        self.check()
        try:
            self._begin_reset(seed, options, mask)
        except BaseException as error:
            self._fail(error)
            raise

    def reset_collect(self) -> tuple[Any, Any]:
        """End the reset; the observations may be overwritten by the next step."""
        try:
            result = self._finish_reset()
        except BaseException as error:
            self._fail(error)
            raise
        self.started = True
        return result

    def check(self) -> None:
        """Raise ``RuntimeFault`` if the shard is lost or in a step."""
        if self.fault is not None:
            raise lost(self)
        if self.busy:
            raise fail("sim-order", f"a step of {self.name} is already under way")

    def check_begun(self) -> None:
        """Raise ``RuntimeFault`` if there is no step to wait for."""
        if not self.busy:
            raise fail("sim-order", f"no step of {self.name} has been begun")

    def invoke(self, method: str, *args: Any) -> Any:
        """Call a method of the shard's body where it lives."""
        raise NotImplementedError

    def batch_wrappers(self, on: bool) -> None:
        """Let the environments' wrappers advance at once in steps from now on, or one by one; not
        while a step is under way. Waits for nobody."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the environments and end the host."""

    def _begin(self, actions: Any) -> None:
        raise NotImplementedError

    def _finish(self) -> BodyResult:
        raise NotImplementedError

    def _under_way(self) -> bool:
        """Whether what was begun runs on after waiting for it was interrupted."""
        return False

    def _begin_reset(self, seed: Any, options: dict[str, Any] | None, mask: Any) -> None:
        raise NotImplementedError

    def _finish_reset(self) -> tuple[Any, Any]:
        raise NotImplementedError

    def give_up(self, error: BaseException) -> None:
        """Refuse further steps because of ``error``."""
        self.fault = f"{type(error).__name__}: {error}".splitlines()[0]

    def _fail_step(self, error: BaseException) -> None:
        """Refuse further steps, unless a reset makes up for this one: before the first reset the
        environments have no state yet that another shard's could be out of step with."""
        if self.started or not isinstance(error, Exception) or not self._answers():
            self._fail(error)
            return
        self.busy = False
        self._note(error)

    def _answers(self) -> bool:
        """Whether the host of the environments still runs."""
        return True

    def _fail(self, error: BaseException) -> None:
        self.busy = False
        self.give_up(error)
        self._note(error)

    def _note(self, error: BaseException) -> None:
        last = self.offset + self.num_envs - 1
        error.add_note(f"raised in {self.name}, environments {self.offset} to {last} of the batch")


def lost(shard: BaseShard) -> RoseError:
    """The error of using a simulator one shard of which is lost."""
    what = f"{shard.name} failed and its simulator is lost"
    return fail("sim-unusable", what, found=shard.fault)


class InlineShard(BaseShard):
    """A shard in the caller's thread, or one whose simulator has threads of its own."""

    def __init__(self, name: str, traits: Traits, offset: int, body: Body) -> None:
        super().__init__(name, traits, offset)
        self._body = body
        self._result: BodyResult | None = None
        self._error: Exception | None = None
        self._reset: tuple[Any, Any] | None = None

    def invoke(self, method: str, *args: Any) -> Any:
        """Call a method of the body."""
        return getattr(self._body, method)(*args)

    def batch_wrappers(self, on: bool) -> None:
        """Let the environments' wrappers advance at once from now on, or one by one."""
        self._body.batch_wrappers(on)

    def close(self) -> None:
        """Close the environments."""
        self._body.close()

    def _begin(self, actions: Any) -> None:
        if self.native_async:
            self._body.begin(actions)
            return
        # stepping here and not in _finish: the caller may reuse the actions
        try:
            self._result = self._body.step(actions)
        except Exception as error:
            self._error = error

    def _finish(self) -> BodyResult:
        if self.native_async:
            return self._body.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error
        result, self._result = self._result, None
        assert result is not None
        return result

    def _begin_reset(self, seed: Any, options: dict[str, Any] | None, mask: Any) -> None:
        self._reset = self._body.reset(seed, options, mask)

    def _finish_reset(self) -> tuple[Any, Any]:
        result, self._reset = self._reset, None
        assert result is not None
        return result
