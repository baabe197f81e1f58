"""A shard's body in a process: actions and results go through shared memory."""

from __future__ import annotations

import mmap
import pickle
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode

from rose_compiler.base import phases
from rose_compiler.sim import layout, states
from rose_compiler.sim.body import Body, BodyFactory, Traits
from rose_compiler.sim.codec import InfoCodec
from rose_compiler.sim.shard_vector import BodyResult, ShardVector
from rose_compiler.sim.together import Batched

#: Places in a shard's clock (:class:`layout.Layout`).
TIMED, BEGIN, END, CPU, NAMED = range(5)

#: What does not fit into the shared arrays, by place, and the packed infos.
Message = bytes | tuple[dict[Any, Any], bytes] | None


@dataclass(frozen=True)
class SharedBodyFactory:
    """Builds the body that a process host runs."""

    factory: BodyFactory

    def __call__(self) -> SharedBody:
        return SharedBody(self.factory())


class SharedBody:
    """Runs a body on one side of the memory; its shard reads and writes on the other."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._tree = layout.Tree(body.traits().single_observation_space)
        self._codec = InfoCodec()
        self._ended: list[phases.Ended] = []

    def traits(self) -> Traits:
        """Spaces and metadata of the shard."""
        return self.body.traits()

    def attach(self, memory: mmap.mmap, plan: layout.Layout, offset: int) -> None:
        """Take up the shared memory. ``offset`` is the index of the shard's first environment."""
        self.body.place(offset)
        self._memory = memory
        self._plan = plan
        self._obs = [None if slot is None else slot.view(memory) for slot in plan.obs]
        self._reward = plan.reward.view(memory)
        self._reward_type = plan.reward_type.view(memory)
        self._flags = plan.terminated.view(memory), plan.truncated.view(memory)
        self._clock = plan.clock.numbers(memory)
        self._at_once = plan.at_once.view(memory)
        env = self.body.env
        if type(env) is ShardVector:
            own = self._tree.flatten(env._observations)
            pairs = zip(self._obs, own, strict=True)
            shared = [mine if view is None else view for view, mine in pairs]
            env.write_into(self._tree.unflatten(shared))

    def actions_are(self, dtype: str, shape: tuple[int, ...]) -> None:
        """The type of the actions in shared memory from now on."""
        self._actions = layout.Slot(dtype, shape, self._plan.actions.offset).view(self._memory)

    def step(self) -> Message:
        """Step with the actions in shared memory."""
        # an environment may keep its action, and the memory is written anew for the next step
        return self.step_with(self._actions.copy())

    def step_with(self, actions: Any) -> Message:
        """Step with actions that came by message."""
        clock = self._clock
        self.body.batch_wrappers(bool(self._at_once[0]))
        if not clock[TIMED]:
            return self._publish(*self.body.step(actions))
        ended: list[phases.Ended] = []
        self._ended = ended
        before = phases.divert(ended)
        try:
            # the monotonic clock is the same in all processes of a machine
            start, cpu = perf_counter(), process_time()
            message = self._publish(*self.body.step(actions))
            clock[CPU], clock[END] = process_time() - cpu, perf_counter()
        finally:
            phases.divert(before)
        clock[BEGIN], clock[NAMED] = start, len(ended)
        return message

    def phases(self) -> list[phases.Ended]:
        """The phases in the last step that was timed."""
        return self._ended

    def reset(self, seed: Any, options: dict[str, Any] | None, mask: Any) -> Message:
        """Reset all environments, or those of the mask."""
        obs, infos = self.body.reset(seed, options, mask)
        return self._message(self._publish_obs(obs), infos)

    def why_no_state(self) -> str | None:
        """Why the environments can't hand over their state; None if they can."""
        return states.why_none(self.body.env)

    def why_not_anew(self) -> str | None:
        """Why episodes can't be cut off here and begun anew; None if they can."""
        env = self.body.env
        if type(env) is not ShardVector:
            return f"{type(env).__qualname__} begins its environments' episodes by its own code"
        if env.autoreset_mode == AutoresetMode.SAME_STEP:
            return "the step that ends an episode has to return its last observation, which is lost"
        return None

    def begin_anew(self, seeds: list[int]) -> None:
        """Reset all environments, just built; their episodes begin as they do after a step that
        has ended the ones before."""
        self.body.reset(seeds, None, None)
        ended = np.ones(self.body.num_envs, np.bool_)
        self.body.env._truncations, self.body.env._autoreset_envs = ended, ended.copy()

    def get_state(self) -> bytes:
        """The environments' state, which only another such process has to understand."""
        return cloudpickle.dumps((states.take(self.body.env), self.body._last is None))

    def set_state(self, blob: bytes) -> None:
        """Let the environments, just built, go on from there."""
        state, unused = pickle.loads(blob)
        env = self.body.env
        states.put(env, state)
        if not unused and type(env) is ShardVector:
            self.body._last = env._observations

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Each environment's attribute, or the result of its method."""
        return self.body.call(name, args, kwargs)

    def set_attr(self, name: str, values: list[Any]) -> None:
        """Set an attribute of each environment."""
        self.body.set_attr(name, values)

    def batchable(self) -> Batched:
        """Which wrappers can advance at once."""
        return self.body.batchable()

    def render(self) -> tuple[Any, ...]:
        """Each environment's frame."""
        return self.body.render()

    def close(self) -> None:
        """Close the environments."""
        self.body.close()

    def _publish(
        self, obs: Any, reward: Any, terminated: Any, truncated: Any, infos: Any
    ) -> Message:
        extra = self._publish_obs(obs)
        count = self._plan.count
        reward = np.asarray(reward)
        if reward.shape == (count,) and reward.dtype.itemsize <= 8 and not reward.dtype.hasobject:
            self._reward_type[0] = ord(reward.dtype.char)
            self._reward[: reward.nbytes].view(reward.dtype)[:] = reward
        else:
            extra["reward"] = reward
        for name, view, value in zip(
            ("terminated", "truncated"), self._flags, (terminated, truncated), strict=True
        ):
            if getattr(value, "dtype", None) == np.bool_ and value.shape == (count,):
                view[:] = value
            else:
                extra[name] = value
        return self._message(extra, infos)

    def _publish_obs(self, obs: Any) -> dict[Any, Any]:
        extra: dict[Any, Any] = {}
        leaves = self._tree.flatten(obs)
        for i, (view, leaf) in enumerate(zip(self._obs, leaves, strict=True)):
            if leaf is view:
                continue
            if (
                view is None
                or not isinstance(leaf, np.ndarray)
                or (leaf.dtype, leaf.shape) != (view.dtype, view.shape)
            ):
                extra[i] = leaf
            else:
                view[...] = leaf
        return extra

    def _message(self, extra: dict[Any, Any], infos: Any) -> Message:
        packed = self._codec.pack(infos)
        if extra:
            return extra, packed
        return packed or None


def _same_type(value: Any, view: np.ndarray) -> bool:
    if not isinstance(value, np.ndarray):
        return False
    return (value.dtype, value.shape) == (view.dtype, view.shape)


class SharedView:
    """The shard's side of the memory."""

    def __init__(self, memory: mmap.mmap, plan: layout.Layout, tree: layout.Tree) -> None:
        self._memory = memory
        self._plan = plan
        self._tree = tree
        self._codec = InfoCodec()
        self._obs = [None if slot is None else slot.view(memory) for slot in plan.obs]
        self._rewards: dict[int, np.ndarray] = {}
        self._reward_type = plan.reward_type.view(memory)
        self._flags = plan.terminated.view(memory), plan.truncated.view(memory)
        self.clock = plan.clock.numbers(memory)
        self.at_once = plan.at_once.view(memory)
        self._actions: np.ndarray | None = None

    def put_actions(self, actions: np.ndarray) -> tuple[str, tuple[int, ...]] | None:
        """Write the actions; returns their type if it has changed."""
        mine = self._actions
        changed = mine is None or (mine.dtype, mine.shape) != (actions.dtype, actions.shape)
        if changed:
            slot = layout.Slot(actions.dtype.str, actions.shape, self._plan.actions.offset)
            mine = self._actions = slot.view(self._memory)
        assert mine is not None
        mine[...] = actions
        return (actions.dtype.str, actions.shape) if changed else None

    def fits(self, actions: Any) -> bool:
        """Whether shared memory can carry these actions."""
        room = self._plan.actions.shape[0]
        return (
            type(actions) is np.ndarray and not actions.dtype.hasobject and (actions.nbytes <= room)
        )

    def obs(self, message: Message) -> tuple[Any, Any]:
        """Observations, as views of the memory, and infos of a reset."""
        if not isinstance(message, tuple):
            return self._tree.unflatten(self._obs), self._codec.unpack(message or b"")
        extra, packed = message
        leaves = [extra.get(i, view) for i, view in enumerate(self._obs)]
        return self._tree.unflatten(leaves), self._codec.unpack(packed)

    def result(self, message: Message) -> BodyResult:
        """The result of a step, as views of the memory."""
        obs, infos = self.obs(message)
        terminated, truncated = self._flags
        if not isinstance(message, tuple):
            return obs, self._reward(), terminated, truncated, infos
        extra = message[0]
        return (
            obs,
            extra["reward"] if "reward" in extra else self._reward(),
            extra.get("terminated", terminated),
            extra.get("truncated", truncated),
            infos,
        )

    def _reward(self) -> np.ndarray:
        code = int(self._reward_type[0])
        view = self._rewards.get(code)
        if view is None:
            slot = layout.Slot(chr(code), (self._plan.count,), self._plan.reward.offset)
            view = self._rewards[code] = slot.view(self._memory)
        return view
