"""Takes random draws out of a traced graph: the graph gets the random numbers as inputs instead.

On CPU torch makes ``normal(m, s)`` as standard normal numbers of the whole shape, times ``s``, plus
``m`` (``normal_out_impl`` in ATen/native/DistributionTemplates.h), and a single draw of
``multinomial(p)`` as the argmax of ``p`` over exponential numbers (ATen/native/Distributions.cpp).
So the numbers can be drawn whole, in eager order, before rows are computed apart.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts, noise
from rose_compiler.ir.checks import check_deviations, check_probabilities, check_valid
from rose_compiler.ir.contexts import entered
from rose_compiler.ir.facts import Context, Spec
from rose_compiler.ir.program import placeholders

Kind = Literal["normal", "uniform", "exponential"]
SEEDS = 4


@dataclass(frozen=True)
class Noise:
    """Random numbers a graph takes: the placeholder's name, the distribution and its parameters
    (mean and deviation; low and high end; rate), shape, and dtype and device as text."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    device: str
    parameters: tuple[float, ...] = ()

    @property
    def standard(self) -> bool:
        """Whether ``torch.randn`` draws the same numbers."""
        return self.kind == "normal" and self.parameters in ((), (0.0, 1.0))

    def draw(self) -> torch.Tensor:
        """The next numbers of torch's default generator."""
        dtype, device = getattr(torch, self.dtype), torch.device(self.device)
        make: Callable[..., torch.Tensor] = getattr(noise, self.kind)
        return make(self.shape, *self.parameters, dtype=dtype, device=device)


@dataclass(frozen=True)
class Hoisted:
    """A graph without draws. It takes what the traced graph took, then ``noises`` in this order,
    which is the order in which they are to be drawn."""

    gm: fx.GraphModule
    noises: tuple[Noise, ...]


Rule = Callable[[fx.Graph, fx.Node, Spec, str], Noise | Blocker]


def take_draws(gm: fx.GraphModule, draws: Sequence[str]) -> Hoisted | Blocker:
    """Rewrite the draws of a graph, given by node name in order, or say which one can't be.

    The nodes that draw have a ``spec`` fact. Nothing is run: :func:`differs` compares both graphs.
    """
    if not draws:
        return Hoisted(gm, ())
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    by_name = {old.name: new for old, new in copies.items()}
    noises: list[Noise] = []
    for name in draws:
        found = _rewrite(graph, by_name[name], len(noises))
        if isinstance(found, Blocker):
            return found
        noises.append(found)
    return Hoisted(fx.GraphModule(gm, graph), tuple(noises))


def differs(
    gm: fx.GraphModule,
    hoisted: Hoisted,
    inputs: Sequence[Any],
    contexts: tuple[Context, ...] = (),
) -> Blocker | None:
    """Compare a graph with the one without draws, bit for bit, generator included, on ``inputs``.

    Torch's generator is left as it was found.
    """
    before = torch.get_rng_state()
    try:
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            with entered(contexts):
                expected = gm.forward(*inputs)
                after = torch.get_rng_state()
                torch.manual_seed(seed)
                drawn = [n.draw() for n in hoisted.noises]
                after_too = torch.get_rng_state()
                found = hoisted.gm.forward(*inputs, *drawn)
            if not torch.equal(after, after_too):
                return Blocker("data-dependent-draw", "drawn apart, other random numbers follow")
            if not _same(expected, found):
                return Blocker("data-dependent-draw", "drawn apart, the results differ in bits")
    finally:
        torch.set_rng_state(before)
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        x, y = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return torch.equal(x, y)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _rewrite(graph: fx.Graph, node: fx.Node, number: int) -> Noise | Blocker:
    spec = facts.get(node).spec
    name = str(getattr(node.target, "__name__", node.target))
    rule = _RULES.get(node.target)
    if spec is None or spec.kind != "tensor" or rule is None:
        return Blocker("data-dependent-draw", f"a draw by `{name}` has no other form")
    if spec.requires_grad:
        return Blocker("grad-graph", f"the draw by `{name}` is part of an autograd graph")
    if node.kwargs.get("generator") is not None or not spec.device.startswith("cpu"):
        return Blocker("data-dependent-draw", f"`{name}` draws from a generator of its own")
    return rule(graph, node, spec, f"noise_{number}" if number else "noise")


def _input(
    graph: fx.Graph, name: str, kind: Kind, spec: Spec, parameters: tuple[float, ...] = ()
) -> tuple[fx.Node, Noise]:
    last = placeholders(graph)[-1:]
    first = next(iter(graph.nodes))
    with graph.inserting_after(last[0]) if last else graph.inserting_before(first):
        node = graph.placeholder(name)
    facts.put(node, spec=spec)
    return node, Noise(node.name, kind, spec.shape, spec.dtype, spec.device, parameters)


def _normal(graph: fx.Graph, node: fx.Node, spec: Spec, name: str) -> Noise | Blocker:
    """``torch.normal(mean, std)`` or ``torch.normal(mean, std, size)``: a deviation that is a
    number goes into the draw itself, one that is a tensor multiplies afterwards."""
    given = dict(zip(("mean", "std"), node.args, strict=False)) | node.kwargs
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    whole = not isinstance(mean, fx.Node) and not isinstance(std, fx.Node)
    scale = float(std) if isinstance(std, int | float) else 1.0
    if _is_number(mean) or _is_number(std):
        return Blocker("data-dependent-draw", "mean or deviation is a number that may change")
    center = float(mean) if isinstance(mean, int | float) and whole else 0.0
    drawn_node, drawn = _input(graph, name, "normal", spec, (center, scale))
    result = drawn_node
    with graph.inserting_before(node):
        if isinstance(std, fx.Node):
            if not _known_positive(std):
                graph.call_function(check_deviations, (std,))
            result = graph.call_function(operator.mul, (result, std))
            facts.put(result, spec=spec)
        if not whole:
            result = graph.call_function(operator.add, (result, mean))
            facts.put(result, spec=spec)
    _replace(graph, node, result)
    return drawn


def _is_number(value: Any) -> bool:
    """Whether a node stands for a Python number."""
    spec = facts.get(value).spec if isinstance(value, fx.Node) else None
    return isinstance(value, fx.Node) and (spec is None or spec.kind != "tensor")


def _known_positive(std: fx.Node) -> bool:
    """Whether the graph checks already that all elements are above zero."""
    for user in std.users:
        if user.target is operator.gt and user.args[0] is std and user.args[1] in (0, 0.0):
            tests = [t for t in user.users if t.target is torch._is_all_true]
            if any(u.target is check_valid for t in tests for u in t.users):
                return True
    return False


def _as_drawn(kind: Kind, count: int) -> Rule:
    """A draw that is the noise itself; behind the shape come ``count`` parameters."""

    def rule(graph: fx.Graph, node: fx.Node, spec: Spec, name: str) -> Noise | Blocker:
        parameters = node.args[1 : 1 + count]
        if any(isinstance(p, fx.Node) for p in parameters):
            return Blocker("data-dependent-draw", "a parameter of the draw may change")
        values = tuple(float(p) for p in parameters)  # type: ignore[arg-type]
        made, drawn = _input(graph, name, kind, spec, values)
        _replace(graph, node, made)
        return drawn

    return rule


def _multinomial(graph: fx.Graph, node: fx.Node, spec: Spec, name: str) -> Noise | Blocker:
    weights, count = node.args[0], node.args[1] if len(node.args) > 1 else None
    count = node.kwargs.get("num_samples", count)
    of_weights = facts.get(weights).spec if isinstance(weights, fx.Node) else None
    if count != 1 or of_weights is None or not isinstance(weights, fx.Node):
        return Blocker("data-dependent-draw", "several samples are drawn from one distribution")
    waiting, drawn = _input(graph, name, "exponential", of_weights)
    with graph.inserting_before(node):
        graph.call_function(check_probabilities, (weights,))
        ratio = graph.call_function(operator.truediv, (weights, waiting))
        chosen = graph.call_function(torch.argmax, (ratio, -1, True))
    facts.put(ratio, spec=of_weights)
    facts.put(chosen, spec=spec)
    _replace(graph, node, chosen)
    return drawn


def _bernoulli(graph: fx.Graph, node: fx.Node, spec: Spec, name: str) -> Noise | Blocker:
    chance = node.args[0]
    if len(node.args) > 1 or not isinstance(chance, fx.Node):
        return Blocker("data-dependent-draw", "a draw by `bernoulli(x, p)` has no other form")
    level, drawn = _input(graph, name, "uniform", spec)
    with graph.inserting_before(node):
        below = graph.call_function(operator.lt, (level, chance))
        chosen = graph.call_function(torch.Tensor.type_as, (below, level))
    facts.put(below, spec=Spec("tensor", spec.type_name, spec.shape, "bool", spec.device))
    facts.put(chosen, spec=spec)
    _replace(graph, node, chosen)
    return drawn


_RULES: dict[Any, Rule] = {
    torch.normal: _normal,
    torch.randn: _as_drawn("normal", 0),
    torch.randn_like: _as_drawn("normal", 0),
    torch.rand: _as_drawn("uniform", 0),
    torch.rand_like: _as_drawn("uniform", 0),
    noise.normal: _as_drawn("normal", 2),
    noise.uniform: _as_drawn("uniform", 2),
    noise.exponential: _as_drawn("exponential", 1),
    torch.multinomial: _multinomial,
    torch.bernoulli: _bernoulli,
}


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)
