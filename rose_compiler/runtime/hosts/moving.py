"""Moving a component to another process, which has other variables in its environment."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from rose_compiler.runtime.hosts.hosted import Hosted

#: What a component has of its host.
_OF_HOST = ("_start", "_extra", "_memory", "_numbers", "_places", "_count", "_host")


def movable(component: Hosted) -> bool:
    """Whether a component has no state, or can hand it over."""
    return component.rose_stateless or component.rose_offers("get_state", "set_state")


def successor(component: Hosted, environment: Mapping[str, str], by: str) -> Hosted:
    """A component anew, in a process that has the variables of :func:`starts_with`. It starts at
    once, and nothing waits for it yet. ``component`` lives in a process."""
    given = {**component._extra, by: dict(environment)}
    start = partial(component._start, environment=_variables(component, given))
    made = Hosted(start, component.name, component.timeout, component.rose_threads)
    made._first, made._extra = component._first, given
    return made


def starts_with(component: Hosted, environment: Mapping[str, str], by: str) -> None:
    """Let a process that takes over later have these variables besides its first ones and those
    that others than ``by`` gave it: quotas of cores and of SMs come from different sides. They take
    the place of what ``by`` gave before. The process that runs keeps what it has."""
    component._extra = {**component._extra, by: dict(environment)}
    component._start = partial(
        component._start, environment=_variables(component, component._extra)
    )


def _variables(component: Hosted, given: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    first: Any = component._first  # a partial of ProcessHost
    found = dict(first.keywords["environment"])
    for environment in given.values():
        found |= environment
    return found


def take_over(component: Hosted, other: Hosted) -> None:
    """Let a component live on in its successor's process: with its state, unless it has none, and
    its parameters. The old process ends. Where something fails, it raises, and all is as it was;
    between calls only.
    """
    component._settle()
    other.ready()
    state = None if component.rose_stateless else component.rose_now("get_state")
    if component._published is not None:
        # before the state: what the component has made of its parameters since is in there
        other._published, other._version = other._given(component._published), component._version
    if not component.rose_stateless:
        other.rose_now("set_state", state)
    old = component._host
    for name in _OF_HOST:
        setattr(component, name, getattr(other, name))
    component._memory.shared_by(component._share)
    component._published = other._published
    if component._journal is not None:
        component._journal.moved(state)
    with suppress(Exception):  # its component has been taken over
        old.close()
