"""Which of the user's objects are simulators that make frames."""

from __future__ import annotations

from typing import Any

import pytest

from rose_compiler.ir.parse import parse
from rose_compiler.passes.rendering import renders


class Fields(dict[str, Any]):
    """Entries as attributes, with the error of a dict where there is none."""

    __getattr__ = dict.__getitem__


class Strict:
    """Answers to nothing that it does not have, and to no question either."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Env:
    def __init__(self, mode: str | None) -> None:
        self.render_mode = mode

    def step(self, action: Any) -> Any:
        return action


class Proxy(Strict):
    """Steps, and raises for whatever else it is asked."""

    def step(self, action: Any) -> Any:
        return action


def made() -> dict[str, tuple[Any, str, bool]]:
    return {
        "fields": (Fields(scale=0.5), "thing", False),
        "no such field": (Fields(scale=0.5), "thing.gain.more", False),
        "a simulator that renders among fields": (Fields(env=Env("rgb_array")), "thing.env", True),
        "one that does not": (Fields(env=Env(None)), "thing.env", False),
        "no such attribute": (Strict(), "thing.gain", False),
        "steps": (Proxy(), "thing", False),
    }


@pytest.mark.parametrize("name", made())
def test_objects_that_raise_for_names_that_they_do_not_know(name: str) -> None:
    thing, state, found = made()[name]
    program = parse("def run(x, *, thing):\n    return x\n")
    program.objects["thing"] = thing
    assert renders(program, state) is found
