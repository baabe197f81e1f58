"""Random trainings in one call: arms that first run on a later trip, one memory under many names,
values whose types change from trip to trip."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
from collections import Counter

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings

import rose_compiler
from rose_compiler.testing import aliasing
from rose_compiler.testing.capturing import difference
from rose_compiler.testing.functions import load

_NUMBER = itertools.count()


def trained(fn, make):
    """How two calls ended, and what they left behind."""
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 (the global generator is compared)
    random.seed(7)
    arguments, results = make(), []
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):
            results.append(fn(*arguments))
    return results, arguments, torch.get_rng_state()


def test_random_trainings(tmp_path_factory) -> None:
    looks: Counter[int] = Counter()

    @settings(
        max_examples=9, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(text=aliasing.trainings())
    def check(text: str) -> None:
        folder = tmp_path_factory.mktemp("trainings")
        module = load(text, folder / f"training_{next(_NUMBER)}.py")
        make = aliasing.arguments(module)
        compiled = rose_compiler.compile(module.main, numerics="bitwise", tune=False)
        eager, found = trained(module.main, make), trained(compiled, make)
        looks[compiled._last.unit.watch._looks] += 1
        compiled.close()
        where = difference(eager, found)
        assert where is None, f"{where}\n{text[text.index('def main') :]}"

    check()
    # the test would be empty if nothing first ran later
    assert sum(n for looked, n in looks.items() if looked > 1) >= 2, looks
