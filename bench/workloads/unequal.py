"""HalfCheetahs that differ from each other. Worker processes import this module: no torch here."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np

from bench.envs import make_env


class Randomize(gymnasium.Wrapper):
    """Bodies, friction and the accuracy of physics of one HalfCheetah, drawn from a seed.

    Every environment is another machine to control, and costs another time to step: between 4 and
    12 physics steps of the accordingly shorter length.
    """

    def __init__(self, env: gymnasium.Env, seed: int) -> None:
        super().__init__(env)
        rng = np.random.default_rng(seed)
        inner: Any = env.unwrapped
        model = inner.model
        model.body_mass[1:] *= rng.uniform(0.8, 1.25, model.nbody - 1)
        model.geom_friction[:, 0] *= rng.uniform(0.6, 1.4)
        finer = rng.uniform(0.8, 2.4)
        inner.frame_skip = round(5 * finer)
        model.opt.timestep *= 5 / inner.frame_skip


def make_random_env(seed: int) -> gymnasium.Env:
    """A HalfCheetah of its own."""
    return make_env(change=partial(Randomize, seed=seed))
