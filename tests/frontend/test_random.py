"""Random functions, captured and run by the reference executor, do what they do as written."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings

from rose_compiler.testing.capturing import assert_same
from rose_compiler.testing.functions import arguments, functions, load

_NUMBER = itertools.count()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(text=functions())
def test_random_functions(tmp_path_factory, text):
    module = load(text, tmp_path_factory.mktemp("random") / f"random_{next(_NUMBER)}.py")
    try:
        assert_same(module.main, arguments(module))
    except AssertionError as error:
        raise AssertionError(f"{error}\n{text[text.index('def main') :]}") from error
