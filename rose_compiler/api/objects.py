"""What is found among the objects that a program names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rose_compiler.frontend.components import is_hosted, is_simulator


def simulators(objects: dict[str, Any]) -> dict[str, Any]:
    """Simulators among the roots and one level below, by state name."""
    return below(objects, is_simulator)


def hosted(objects: dict[str, Any]) -> dict[str, Any]:
    """Components that live in hosts of their own, by state name."""
    return below(objects, is_hosted)


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
