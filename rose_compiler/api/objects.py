"""What is found among the objects that a program names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rose_compiler.frontend.components import is_hosted, is_simulator


def simulators(objects: dict[str, Any]) -> dict[str, Any]:
    """Simulators among the roots and one level below, by state name."""
    return below(objects, is_simulator)


def shards(objects: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Rows of each shard of every simulator among the objects, by the simulator's state."""
    return {
        name: tuple(int(s.num_envs) for s in env.shards())
        for name, env in simulators(objects).items()
        if callable(getattr(env, "shards", None))
    }


def asynchronous(objects: dict[str, Any]) -> frozenset[str]:
    """Simulators among the objects whose shards step beside the caller by themselves."""
    return frozenset(
        name
        for name, env in simulators(objects).items()
        if callable(getattr(env, "shards", None)) and all(s.native_async for s in env.shards())
    )


def hosted(objects: dict[str, Any]) -> dict[str, Any]:
    """Components that live in hosts of their own, by state name."""
    return below(objects, is_hosted)


def in_processes(objects: dict[str, Any]) -> dict[str, Any]:
    """Those of :func:`hosted` that live in processes, by lane."""
    return {f"host:{n}": h for n, h in hosted(objects).items() if h.hosts == "process"}


def below(objects: dict[str, Any], wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """The wanted objects among the roots and one level below, by state name."""
    found: dict[str, Any] = {}
    for root, value in objects.items():
        if wanted(value):
            found[root] = value
            continue
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict) and not isinstance(
            value, (torch.nn.Module, torch.optim.Optimizer)
        ):
            for key, inner in fields.items():
                if wanted(inner):
                    found[f"{root}.{key}"] = inner
    return found
