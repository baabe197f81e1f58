"""Wrappers of gymnasium that can advance all environments of a shard at once, one class for each.

Each environment keeps statistics of its own, so what is done to the batch is what each wrapper
does to its row: the same operations of numpy, element by element, on arrays with one row for each
environment. Statistics stay where the wrappers have them, as rows of the new arrays; wrappers that
were used by themselves in between, by a reset for instance, are read anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import (
    ClipAction,
    ClipReward,
    NormalizeObservation,
    NormalizeReward,
    TransformObservation,
    TransformReward,
)

from rose_compiler.sim.elementwise import batched, constants

_FLOATS = frozenset({float, np.float64})
_BOOLS = frozenset({bool, np.bool_})


@dataclass
class Rows:
    """What the environments returned from a step, on its way out through the wrappers.

    ``obs`` and ``reward`` are lists of what each returned, or arrays with a row for each.
    """

    obs: Any = field(default_factory=list)
    reward: Any = field(default_factory=list)
    terminated: list[Any] = field(default_factory=list)
    truncated: list[Any] = field(default_factory=list)
    infos: list[Any] = field(default_factory=list)

    def stacked(self) -> np.ndarray | None:
        """The observations as one array; None if they don't fit into one."""
        if type(self.obs) is not np.ndarray:
            first = self.obs[0]
            if any(type(o) is not np.ndarray for o in self.obs):
                return None
            if any(o.dtype != first.dtype or o.shape != first.shape for o in self.obs):
                return None
            self.obs = np.array(self.obs)
        return self.obs

    def rewards(self) -> np.ndarray | None:
        """The rewards as float64; None if one of them is of another type."""
        if type(self.reward) is not np.ndarray:
            if not _FLOATS.issuperset(map(type, self.reward)):
                return None
            self.reward = np.array(self.reward)
        return self.reward if self.reward.dtype == np.float64 else None


class Level:
    """The wrappers of all environments at one depth."""

    #: The class of the wrappers, exactly: a subclass may do anything.
    kind: type
    #: Whether observations are other ones behind it.
    observes = False

    def __init__(self, wrappers: Sequence[Any]) -> None:
        self.wrappers = list(wrappers)
        self._inner = [w.env for w in wrappers]
        self._sizes = [len(vars(w)) for w in wrappers]

    @classmethod
    def of(cls, wrappers: Sequence[Any]) -> Level | None:
        """The level; None if these wrappers can't be taken together."""
        return cls(wrappers)

    def fresh(self) -> bool:
        """Whether the wrappers are still what they were when this was made: around the same
        environments, set alike, and without methods of their own, which would be further fields.
        """
        if not all(map(is_, (w.env for w in self.wrappers), self._inner)):
            return False
        return [len(vars(w)) for w in self.wrappers] == self._sizes and self._set_alike()

    def _set_alike(self) -> bool:
        return True

    def down(self, actions: np.ndarray) -> np.ndarray:
        """Actions on their way in, as a new array where they are changed."""
        return actions

    def up(self, rows: Rows) -> bool:
        """Results on their way out; False, and nothing changed, where that can't be done at
        once."""
        return True


class _Set(Level):
    """A level whose wrappers have the same settings."""

    settings: tuple[str, ...]

    def __init__(self, wrappers: Sequence[Any]) -> None:
        super().__init__(wrappers)
        self._read = attrgetter(*self.settings)
        self._found = list(map(self._read, self.wrappers))

    @classmethod
    def of(cls, wrappers: Sequence[Any]) -> Level | None:
        level = cls(wrappers)
        return level if all(one == level._found[0] for one in level._found) else None

    def _set_alike(self) -> bool:
        return list(map(self._read, self.wrappers)) == self._found


class Clipped(Level):
    """``ClipAction``."""

    kind = ClipAction

    def __init__(self, wrappers: Sequence[Any]) -> None:
        super().__init__(wrappers)
        self._bases = [w.unwrapped for w in wrappers]
        self._found = [b.action_space for b in self._bases]
        self._functions = [w.func for w in wrappers]
        space = wrappers[0].env.action_space
        self._low, self._high = space.low, space.high

    @classmethod
    def of(cls, wrappers: Sequence[Any]) -> Level | None:
        first = wrappers[0].env.action_space
        alike = all(w.env.action_space == first for w in wrappers)
        return cls(wrappers) if alike and isinstance(first, gymnasium.spaces.Box) else None

    def _set_alike(self) -> bool:
        if not all(map(is_, (w.func for w in self.wrappers), self._functions)):
            return False
        # an environment may make its space anew each time it is asked
        pairs = zip((b.action_space for b in self._bases), self._found, strict=True)
        return all(now is before or now == before for now, before in pairs)

    def down(self, actions: np.ndarray) -> np.ndarray:
        return np.clip(actions, self._low, self._high)


class _Functions(Level):
    """A level whose wrappers apply a function of the user."""

    def __init__(self, wrappers: Sequence[Any], apply: Callable[[Any], Any]) -> None:
        super().__init__(wrappers)
        self._apply = apply
        self._found = [w.func for w in wrappers]
        self._codes = [(f.__code__, f.__defaults__) for f in self._found]
        self._closed = any(f.__closure__ for f in self._found)
        self._constants = list(map(constants, self._found))

    @classmethod
    def of(cls, wrappers: Sequence[Any]) -> Level | None:
        apply = batched([w.func for w in wrappers])
        return None if apply is None else cls(wrappers, apply)

    def _set_alike(self) -> bool:
        if not all(map(is_, (w.func for w in self.wrappers), self._found)):
            return False
        for f, (code, defaults) in zip(self._found, self._codes, strict=True):
            if f.__code__ is not code or f.__defaults__ is not defaults:
                return False
        if not self._closed:
            return True
        now = (value for f in self._found for value in constants(f))
        return all(map(is_, now, chain.from_iterable(self._constants)))


class TransformedObservations(_Functions):
    """``TransformObservation``."""

    kind = TransformObservation
    observes = True

    def up(self, rows: Rows) -> bool:
        obs = rows.stacked()
        if obs is None:
            return False
        rows.obs = self._apply(obs)
        return True


class TransformedRewards(_Functions):
    """``TransformReward``."""

    kind: type = TransformReward

    def up(self, rows: Rows) -> bool:
        reward = rows.rewards()
        if reward is None:
            return False
        rows.reward = self._apply(reward)
        return True


class ClippedRewards(TransformedRewards):
    """``ClipReward``."""

    kind = ClipReward


class _Statistics:
    """Running means, variances and counts of gymnasium's ``RunningMeanStd``, a row for each."""

    def __init__(self) -> None:
        self._means: list[Any] = []
        self._vars: list[Any] = []

    def read(self, owners: list[Any]) -> bool:
        """Take up the statistics as they are now; False if they don't fit into one array, or are
        not each environment's own: shared ones take in one value after the other."""
        if len(set(map(id, owners))) < len(owners):
            return False
        self.owners = owners
        means, variances = [o.mean for o in owners], [o.var for o in owners]
        self.counts = [o.count for o in owners]
        same = len(means) == len(self._means) and all(map(is_, means, self._means))
        if not (same and all(map(is_, variances, self._vars))):
            kinds = {(np.shape(v), np.result_type(v)) for v in (*means, *variances)}
            if len(kinds) > 1:
                return False
            self.mean, self.var = np.array(means), np.array(variances)
        kinds_of_count = set(map(type, self.counts))
        # numpy's own number makes float64 of float32, Python's does not
        return kinds_of_count == {float} or (
            kinds_of_count <= _FLOATS and self.mean.dtype == np.float64
        )

    def update(self, x: np.ndarray) -> None:
        """Take in one more value for each, the parallel variance of Chan et al. with a batch of
        one, in the order of gymnasium's ``update_mean_var_count_from_moments``."""
        shape = (len(self.counts),) + (1,) * (x.ndim - 1)
        totals = [count + 1 for count in self.counts]
        count = np.array(self.counts, x.dtype).reshape(shape)
        total = np.array(totals, x.dtype).reshape(shape)
        delta = x - self.mean
        mean = self.mean + delta / total
        spread = x - x  # of one value: 0, or NaN for what is not finite
        moment = self.var * count + np.square(spread) + np.square(delta) * count / total
        self.mean, self.var = mean, moment / total
        self._means, self._vars = list(mean), list(self.var)
        for k, owner in enumerate(self.owners):
            owner.mean, owner.var, owner.count = self._means[k], self._vars[k], totals[k]


class NormalizedObservations(_Set):
    """``NormalizeObservation``."""

    kind = NormalizeObservation
    observes = True
    settings = "epsilon", "_update_running_mean"

    def __init__(self, wrappers: Sequence[Any]) -> None:
        super().__init__(wrappers)
        self._epsilon, self._updated = self._found[0]
        self._statistics = _Statistics()

    def up(self, rows: Rows) -> bool:
        obs, known = rows.stacked(), self._statistics
        if obs is None or not known.read([w.obs_rms for w in self.wrappers]):
            return False
        if known.mean.dtype != obs.dtype or known.mean.shape != obs.shape:
            return False
        if obs.dtype not in (np.float32, np.float64):
            return False
        if self._updated:
            known.update(obs)
        rows.obs = np.float32((obs - known.mean) / np.sqrt(known.var + self._epsilon))
        return True


class NormalizedRewards(_Set):
    """``NormalizeReward``."""

    kind = NormalizeReward
    settings = "gamma", "epsilon", "_update_running_mean"

    def __init__(self, wrappers: Sequence[Any]) -> None:
        super().__init__(wrappers)
        self._gamma, self._epsilon, self._updated = self._found[0]
        self._statistics = _Statistics()

    def up(self, rows: Rows) -> bool:
        reward, known = rows.rewards(), self._statistics
        if reward is None or not _BOOLS.issuperset(map(type, rows.terminated)):
            return False
        if not known.read([w.return_rms for w in self.wrappers]):
            return False
        sums = np.array([w.discounted_reward for w in self.wrappers])
        if sums.dtype != np.float64 or sums.shape != (len(reward), 1):
            return False
        if known.mean.dtype != np.float64 or known.mean.shape != reward.shape:
            return False
        going_on = 1 - np.array(rows.terminated, np.int64)
        sums = sums * self._gamma * going_on[:, None] + reward[:, None]
        for wrapper, own in zip(self.wrappers, sums, strict=True):
            wrapper.discounted_reward = own
        if self._updated:
            known.update(sums[:, 0])
        rows.reward = reward / np.sqrt(known.var + self._epsilon)
        return True


LEVELS: dict[type, type[Level]] = {
    level.kind: level
    for level in (
        Clipped,
        ClippedRewards,
        NormalizedObservations,
        NormalizedRewards,
        TransformedObservations,
        TransformedRewards,
    )
}
