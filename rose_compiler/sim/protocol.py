"""What a simulator must offer for its batch of environments to advance in parts.

A simulator whose environments are independent has a method ``shards()`` that returns its parts in
order of their first environment; together they cover the batch. :class:`ShardedEnv` has it, and a
simulator that users bring may have it: nothing needs to be inherited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

#: What a step returns: observations, rewards, terminated, truncated, infos. The leading axis of
#: every array counts environments.
StepResult = tuple[Any, Any, Any, Any, dict[str, Any]]


@runtime_checkable
class Shard(Protocol):
    """Environments ``offset`` to ``offset + num_envs`` of a batch, with a state of their own.

    Nothing that one shard does may change what another one returns: no shared generator, physics
    step or statistics. Two threads may drive two shards at once; one shard is driven by one thread
    at a time.

    ``native_async`` says that :meth:`step_async` returns at once while the environments step
    elsewhere. Otherwise it may take as long as the step itself.
    """

    num_envs: int
    offset: int
    native_async: bool

    def step_async(self, actions: Any) -> None:
        """Begin a step with this shard's rows of the actions.

        The caller may reuse ``actions`` as soon as this returns. What the step raises is raised
        by :meth:`step_wait`.
        """

    def step_wait(self) -> StepResult:
        """End the step that was begun, and return results that no later step changes."""

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset this shard's environments: (observations, infos)."""


@runtime_checkable
class Sharded(Protocol):
    """A simulator made of independent shards."""

    num_envs: int

    def shards(self) -> Sequence[Shard]:
        """The parts, in order of their offsets; the same objects on every call."""

    def merge(self, results: Sequence[StepResult]) -> StepResult:
        """The result of a step of the whole batch, from one result of each shard in order."""
