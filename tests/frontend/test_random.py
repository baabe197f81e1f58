"""Random functions, captured and run by the reference executor, do what they do as written, in the
program's order and in others that the dependences allow."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings

from rose_compiler.frontend.capture import capture
from rose_compiler.ir import interp
from rose_compiler.testing import aliasing, functions
from rose_compiler.testing.capturing import assert_same, difference, first_trip, shuffle, values_of
from rose_compiler.testing.functions import load

_NUMBER = itertools.count()
ORDERS = 2
_SETTINGS = settings(
    max_examples=16, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def seed():
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 (the global generator is compared)
    random.seed(7)


def check(text, folder, make_of) -> None:
    """One function: as captured, then reordered."""
    module = load(text, folder / f"random_{next(_NUMBER)}.py")
    make = make_of(module)
    try:
        eager = assert_same(module.main, make)
        if eager.error is None:
            reordered(module.main, make, eager)
    except Exception as error:
        raise AssertionError(f"{error}\n{text[text.index('def main') :]}") from error


def reordered(fn, make, eager) -> None:
    seed()
    program = first_trip(fn, *make()).captured.program
    for number in range(ORDERS):
        shuffle(program, random.Random(number))
        seed()
        args = make()
        found = capture(fn, args, {})
        result = interp.run(program, values_of(found, args, {}), found.program.objects)
        assert difference(eager.result, result) is None, f"order {number}"
        assert difference(eager.arguments, (args, {})) is None, f"order {number}"


@_SETTINGS
@given(text=functions.functions())
def test_random_functions(tmp_path_factory, text):
    check(text, tmp_path_factory.mktemp("random"), functions.arguments)


@_SETTINGS
@given(text=aliasing.functions())
def test_functions_that_reach_one_memory_by_many_names(tmp_path_factory, text):
    check(text, tmp_path_factory.mktemp("aliasing"), aliasing.arguments)
