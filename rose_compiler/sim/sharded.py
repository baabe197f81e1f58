"""A vector environment made of independent shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rose_compiler.base import phases
from rose_compiler.base.errors import fail
from rose_compiler.base.remarks import Remark
from rose_compiler.runtime.hosts.process import close_all
from rose_compiler.sim import arguments, build, layout
from rose_compiler.sim.body import BodyFactory
from rose_compiler.sim.envpool_shards import envpool_factories
from rose_compiler.sim.hosted_shards import let_go
from rose_compiler.sim.hosted_steps import HostedSteps
from rose_compiler.sim.infos import merge as merge_infos
from rose_compiler.sim.process_shard import ProcessShard
from rose_compiler.sim.protocol import StepResult
from rose_compiler.sim.shard_vector import BodyResult
from rose_compiler.sim.shards import BaseShard, lost
from rose_compiler.sim.together import Batched

Hosts = Literal["inline", "thread", "process"]
EnvFactory = Callable[[], gymnasium.Env]


class ShardedEnv(HostedSteps, VectorEnv):
    """A ``gymnasium.vector.VectorEnv`` made of independent shards.

    Each of ``shards`` is one of

    - a factory of a ``gymnasium.Env``, of a ``gymnasium.vector.VectorEnv`` or of an EnvPool
      (``env_type="gymnasium"``),
    - a list or tuple of factories of single environments,
    - with inline and thread hosts, a vector environment that is built already.

    Shards may differ in size. Used like any vector environment, it equals
    ``gymnasium.vector.SyncVectorEnv`` over the same factories: environment ``i`` of the whole is
    reset with ``seed + i``, autoreset and infos are gymnasium's own. All results are fresh arrays.
    Shards step at the same time where their hosts allow it: in threads, in processes, or in
    EnvPool's and AsyncVectorEnv's own workers.

    EnvPool's infos stay EnvPool's: arrays over the batch without masks (``env_id`` counts over the
    whole batch). Its seeds are fixed when it is built; :meth:`envpool` gives environment ``i`` the
    seed of environment ``i`` of one large pool.

    Process hosts: actions, observations, rewards and flags go through shared memory allocated
    once; numeric infos need no pickling. Actions that are tensors arrive as arrays.

    ``timeout`` limits every step, reset and call of a shard in seconds (not with inline hosts);
    ``start_timeout`` limits starting a process and building its environments.
    ``autoreset_mode`` is that of shards given as factories of single environments; None means
    gymnasium's next-step. ``environment`` adds variables to the processes' environment.

    ``recover`` (process hosts): a process that dies, or hangs past ``timeout``, costs nothing but
    time, if the environments have ``get_state()`` and ``set_state(state)``: a new one starts from
    their latest state and repeats what was asked since. Wrappers of gymnasium's and generators are
    seen to. The state is taken between steps, for at most 1% of the time. What an environment
    writes to the outside is written twice.

    ``recover="truncate"`` is for environments without these methods, and changes training: a shard
    whose process ends is built anew, the step under way (or the next one) returns
    ``truncated=True`` and a reward of 0 for its environments, with the observations of the step
    before, and ``infos["rose_lost"]`` marks them. The next episodes begin as after any other end of
    one. Environment ``i`` is reset with the first number of ``numpy.random.SeedSequence((s, k))``:
    ``s`` is the seed that it was last reset with, or ``i``, and ``k`` counts the shard's losses. A
    ``RuntimeWarning`` says what was lost.

    A step or reset that fails leaves the environments out of step with each other: every later
    use raises ``RuntimeFault``, and threads and processes are let go. A step before the first reset
    only raises what the environments raise, and :meth:`reset` works after that.

    Raises ``FactoryError`` for a factory that can't be pickled or that raises in its host,
    ``ConfigError`` for shards that don't fit together, or can't be recovered.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        *,
        hosts: Hosts = "inline",
        timeout: float | None = None,
        autoreset_mode: str | AutoresetMode | None = None,
        start_timeout: float | None = 120.0,
        environment: dict[str, str] | None = None,
        recover: bool | Literal["truncate"] = False,
    ) -> None:
        #: What became of processes that ended, with ``recover``.
        self.rose_remarks: list[Remark] = []
        self._shards: list[BaseShard] = []
        self._collected: list[BodyResult] = []  # of the step under way, by shards in order
        mode = AutoresetMode.NEXT_STEP if autoreset_mode is None else AutoresetMode(autoreset_mode)
        items = build.checked(shards, hosts, recover)
        factories = [BodyFactory(item, mode) for item in items]
        if hosts == "process":
            started = timeout, start_timeout, environment
            self._shards = build.in_processes(factories, *started, recover, self.rose_remarks)
        elif hosts == "thread":
            self._shards = build.in_threads(factories, timeout)
        else:
            self._shards = build.inline(factories)
        self.hosts = hosts
        try:
            self._describe(mode if autoreset_mode is not None else None)
        except BaseException:
            let_go(self._shards)
            raise

    @classmethod
    def split(
        cls,
        env_fns: Sequence[EnvFactory],
        *,
        shards: int,
        hosts: Hosts = "inline",
        autoreset_mode: str | AutoresetMode | None = None,
        **kwargs: Any,
    ) -> ShardedEnv:
        """Distribute factories of single environments over ``shards`` shards, in order.

        Sizes differ by one at most, the first shards being the larger ones. Other arguments are
        the constructor's.
        """
        fns = list(env_fns)
        sizes = build.sizes(len(fns), shards)
        starts = np.cumsum([0, *sizes]).tolist()
        groups = [fns[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return cls(groups, hosts=hosts, autoreset_mode=autoreset_mode, **kwargs)

    @classmethod
    def envpool(
        cls,
        task_id: str,
        num_envs: int,
        shards: int,
        *,
        seed: int | Sequence[int] = 42,
        num_threads: int = 1,
        hosts: Hosts = "inline",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> ShardedEnv:
        """EnvPool's task ``task_id`` as shards of ``num_envs`` environments in all.

        Environment ``i`` has the seed ``seed + i`` (or ``seed[i]``), as in one pool of them all.
        ``num_threads`` is per shard. Other arguments are ``envpool.make``'s.
        """
        sizes = build.sizes(num_envs, shards)
        factories = envpool_factories(task_id, sizes, seed, {"num_threads": num_threads, **kwargs})
        return cls(factories, hosts=hosts, timeout=timeout)

    def shards(self) -> list[BaseShard]:
        """The shards in order of their offsets, the same objects on every call.

        They follow :class:`rose_compiler.sim.Shard`. Stepping every shard once and merging the
        results is a step of the whole; a shard may be ahead of another in between.
        """
        return list(self._shards)

    def merge(self, results: Sequence[StepResult]) -> StepResult:
        """The step of the whole batch from one result of each shard, in fresh arrays."""
        obs, rewards, terminated, truncated, infos = zip(*results, strict=True)
        return (
            self._obs_tree.concatenate(obs),
            np.concatenate(rewards),
            np.concatenate(terminated),
            np.concatenate(truncated),
            merge_infos(infos, self._counts),
        )

    @property
    def native_async(self) -> bool:
        """Whether :meth:`step_async` returns while all environments step elsewhere."""
        return all(shard.native_async for shard in self._shards)

    def step(self, actions: Any) -> StepResult:
        """Step every environment with its row of ``actions``.

        Raises what an environment raised, with a note that names the shard.
        """
        try:
            if not phases.wanted():
                self.step_async(actions)
                return self.step_wait()
            self._check_free()
            with self.timing():  # what environments name elsewhere; lanes ask for it themselves
                self.step_async(actions)
                result = self.step_wait()
                phases.hand_on(self.phases())
                return result
        except KeyboardInterrupt as error:
            self._fault(error)
            raise

    def step_async(self, actions: Any) -> None:
        """Begin a step of every environment; ``actions`` may be reused as soon as this returns.

        Shards in the caller's thread have finished theirs by then.
        """
        self._check_free()
        pairs = list(zip(self._shards, self._split(actions), strict=True))
        try:
            for shard, part in pairs:
                if shard.native_async:
                    shard.step_async(part)
            for shard, part in pairs:
                if not shard.native_async:
                    shard.step_async(part)
        except BaseException as error:
            self._step_failed(error)
            raise

    def step_wait(self) -> StepResult:
        """End the step that was begun, and return its results in fresh arrays.

        After Ctrl-C the step is still under way, and may be waited for again.
        """
        collected = self._collected
        waiting = self._shards[len(collected) :]
        for shard in waiting:
            shard.check_begun()
        try:
            for shard in waiting:
                collected.append(shard.collect())
        except Exception as error:
            self._step_failed(error)
            raise
        self._collected = []
        return self.merge(collected)

    def give_up(self, error: BaseException) -> None:
        """Refuse further steps because of ``error``; one under way may still be waited for."""
        self._shards[0].give_up(error)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments: environment ``i`` with ``seed + i``, or with ``seed[i]``.

        ``options`` go to every environment; ``options["reset_mask"]`` (bool, one for each
        environment) selects those that are reset, and is taken out of the dict as by gymnasium.
        """
        self._check_free()
        seeds = arguments.seeds(seed, self._shards, self.num_envs)
        mask = None
        if options is not None and "reset_mask" in options:
            mask = arguments.reset_mask(options.pop("reset_mask"), self.num_envs)
        try:
            for shard, own in zip(self._shards, seeds, strict=True):
                rows = slice(shard.offset, shard.offset + shard.num_envs)
                shard.reset_async(own, options, None if mask is None else mask[rows])
            obs, infos = zip(*(shard.reset_collect() for shard in self._shards), strict=True)
            merged = self._obs_tree.concatenate(obs)
            return merged, merge_infos(infos, self._counts)
        except BaseException as error:
            self._fault(error)
            raise

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute: one result each."""
        self._check()
        parts = [shard.invoke("call", name, args, kwargs) for shard in self._shards]
        return tuple(value for part in parts for value in part)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment; a list or tuple has one value for each."""
        self._check()
        own = arguments.values(values, self._shards, self.num_envs)
        for shard, part in zip(self._shards, own, strict=True):
            shard.invoke("set_attr", name, part)

    def batch_wrappers(self, on: bool) -> None:
        """Let the wrappers of each shard's environments advance at once in steps from now on, or
        one by one as gymnasium does; not while a step is under way.

        All results and the wrappers' state have the same bits either way. Compiled loops turn it
        on while they run.
        """
        for shard in self._shards:
            shard.batch_wrappers(on)

    def batchable(self) -> list[Batched]:
        """By shard, the classes of the wrappers that can advance at once, from the outermost in,
        or none of them and why; and the seconds of a step that this saves."""
        self._check()
        return [shard.invoke("batchable") for shard in self._shards]

    def render(self) -> tuple[Any, ...]:
        """The frame of every environment."""
        self._check()
        parts = [shard.invoke("render") for shard in self._shards]
        return tuple(frame for part in parts for frame in part)

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """The environments' generators, a tuple; copies of them with process hosts."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The environments' seeds, a tuple."""
        return self.get_attr("np_random_seed")

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments, and end threads and processes."""
        del kwargs
        if any(shard.fault is not None for shard in self._shards):
            let_go(self._shards)  # somebody may still be waiting for a step that was given up
        errors: list[Exception] = []
        processes = [shard.host for shard in self._shards if isinstance(shard, ProcessShard)]
        try:
            close_all(processes)
        except Exception as error:
            errors.append(error)
        for shard in self._shards:
            if not isinstance(shard, ProcessShard):
                try:
                    shard.close()
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _describe(self, mode: AutoresetMode | None) -> None:
        first = self._shards[0].traits
        build.check_alike([shard.traits for shard in self._shards], mode)
        self._counts = [shard.num_envs for shard in self._shards]
        self._ends = [(shard.offset, shard.offset + shard.num_envs) for shard in self._shards]
        self.num_envs = sum(self._counts)
        self.metadata = dict(first.metadata)
        self.render_mode = first.render_mode
        self.single_observation_space = first.single_observation_space
        self.single_action_space = first.single_action_space
        self._obs_tree = layout.Tree(self.single_observation_space)
        self._action_tree = layout.Tree(self.single_action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def _split(self, actions: Any) -> list[Any]:
        tree = self._action_tree
        for leaf in tree.flatten(actions):
            if len(leaf) != self.num_envs:
                raise ValueError(f"expected {self.num_envs} actions, one each, got {len(leaf)}")
        return [tree.rows(actions, start, end) for start, end in self._ends]

    def _check(self) -> None:
        if self.closed:
            raise fail("fault-closed", f"{self!r} was closed and can't be used any more")
        for shard in self._shards:
            if shard.fault is not None:
                let_go(self._shards)
                raise lost(shard)

    def _check_free(self) -> None:
        """:meth:`_check`, and that no step is under way."""
        self._check()
        for shard in self._shards:
            shard.check()

    def _step_failed(self, error: BaseException) -> None:
        """Let go of everything, unless only environments that were never reset have raised: these
        can still be reset, once the other shards' steps are over."""
        if isinstance(error, Exception) and all(shard.fault is None for shard in self._shards):
            self._collected = []
            for shard in self._shards:
                if shard.busy:
                    # what the first shard raised is what the caller sees of all of them
                    with suppress(Exception):
                        shard.collect()
            if all(shard.fault is None for shard in self._shards):
                return
        self._fault(error)

    def _fault(self, error: BaseException) -> None:
        if all(shard.fault is None for shard in self._shards):
            self._shards[0].give_up(error)  # raised between the shards, such as by Ctrl-C
        let_go(self._shards)
