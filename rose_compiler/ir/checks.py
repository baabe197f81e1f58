"""Checks that a traced graph keeps: they look at a tensor's values and raise, or do nothing."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import Tensor

from rose_compiler.ir import functions


def check_valid(valid: Tensor, template: str, value: object = None, *parameters: object) -> None:
    """Raise what ``torch.distributions`` raises for arguments that violate a constraint.

    Args:
        valid: truth value, one element.
        template: the message, with ``{type}``, ``{shape}`` and ``{value}`` for those of ``value``
            and ``{0}``, ``{1}``, ... for the distribution's parameters.
        value: the tensor that was checked.
        parameters: the distribution's parameters; shown by value if they have one element, else by
            size, as ``repr`` of a distribution shows them.

    Raises:
        ValueError: when ``valid`` is false.
    """
    if valid:
        return
    shown = [p.size() if isinstance(p, Tensor) and p.numel() != 1 else p for p in parameters]
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    raise ValueError(template.format(*shown, type=type(value).__name__, shape=shape, value=value))


def check_probabilities(probabilities: Tensor) -> None:
    """Raise what ``torch.multinomial`` raises on weights it can't draw from.

    Args:
        probabilities: weights, categories last.

    Raises:
        RuntimeError: for an element that is negative, infinite or NaN, or a row of zeros.
    """
    if not torch.all((probabilities >= 0) & torch.isfinite(probabilities)):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if not torch.all(probabilities.sum(-1) > 0):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


def check_deviations(std: Tensor) -> None:
    """Raise what ``torch.normal`` raises on standard deviations below zero.

    Raises:
        RuntimeError: when the smallest element is below zero or NaN.
    """
    if std.numel() and not std.min() >= 0:
        raise RuntimeError("normal expects all elements of std >= 0.0")


def _valid(valid: Tensor, *_: object) -> Tensor:
    return valid


def _probabilities(probabilities: Tensor) -> Tensor:
    fine = torch.all((probabilities >= 0) & torch.isfinite(probabilities))
    return fine & torch.all(probabilities.sum(-1) > 0)


def _deviations(std: Tensor) -> Tensor:
    return torch.all(std >= 0)


#: What a check raises without, as a tensor: for code that can't stop at a check.
_CONDITIONS = ((check_valid, _valid), (check_probabilities, _probabilities))
for _check, _condition in (*_CONDITIONS, (check_deviations, _deviations)):
    setattr(_check, "condition", _condition)  # noqa: B010 (a function has no such attribute)

for _check in (check_valid, check_probabilities, check_deviations):
    functions.register(f"rose_compiler.checks.{_check.__name__}", _check)

#: Functions that raise for values and return nothing.
CHECKS = frozenset({check_deviations, check_probabilities, check_valid})


def is_check(node: fx.Node) -> bool:
    """Whether a node of a traced graph looks at values and may raise."""
    return node.op == "call_function" and node.target in CHECKS
