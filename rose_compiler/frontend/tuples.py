"""Tuples that a graph is handed, opened: it is handed their items instead."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts


@dataclass(frozen=True)
class Opened:
    """A graph whose placeholders are tensors, arrays that index tensors, and numbers.

    ``names`` are theirs, ``sources`` the placeholder of the graph before, by number, and the item
    of it.
    """

    gm: fx.GraphModule
    names: tuple[str, ...]
    sources: tuple[tuple[int, int | None], ...]


def opened_tuples(gm: fx.GraphModule, values: Sequence[Any]) -> Opened | Blocker:
    """Open the tuples among the placeholders of a graph.

    Args:
        values: example values of the first placeholders; further ones are tensors.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    sources: list[tuple[int, int | None]] = []
    given = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for number, node in enumerate(given):
        value = values[number] if number < len(values) else None
        if number >= len(values) or _is_data(value) or _is_index(node, value):
            copies[node] = graph.node_copy(node)
            sources.append((number, None))
            continue
        picked = _picked(node, value)
        if picked is None:
            return Blocker("not-traceable", f"`{node.name}` is no tensor, number or tuple of these")
        for item, users in picked.items():
            made = graph.placeholder(f"{node.name}_{item}")
            facts.copy(users[0], made)
            sources.append((number, item))
            copies.update(dict.fromkeys(users, made))
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in copies:
            continue
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], lambda n: copies[n]))
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    names = tuple(n.name for n in graph.nodes if n.op == "placeholder")
    return Opened(fx.GraphModule(gm, graph), names, tuple(sources))


def _picked(node: fx.Node, value: Any) -> dict[int, list[fx.Node]] | None:
    """The items of a tuple that a graph takes, and where."""
    if not isinstance(value, tuple):
        return None
    picked: dict[int, list[fx.Node]] = {}
    for user in node.users:
        item = user.args[1] if user.target is operator.getitem else None
        if type(item) is not int or not 0 <= item < len(value):
            return None
        if not _is_data(value[item]):
            return None
        picked.setdefault(item, []).append(user)
    return picked


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or type(value) in (bool, int, float)


def _is_index(node: fx.Node, value: Any) -> bool:
    """Whether an array of whole numbers only says which rows of tensors are meant: a tensor of the
    same numbers then does, too."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "ib":
        return False
    return all(u.args[1] is node and _is_tensor_item(u) for u in node.users)


def _is_tensor_item(node: fx.Node) -> bool:
    spec = facts.get(node).spec
    return node.target is operator.getitem and spec is not None and spec.kind == "tensor"
