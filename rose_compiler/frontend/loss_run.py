"""The statements of a loss as one Python function."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.block import make_block_function
from rose_compiler.ir.facts import Context
from rose_compiler.ir.program import is_call, is_item, is_state, maker_of, op_of
from rose_compiler.ir.recorded import has_graph

NO_GRAD = ("no_grad", "inference_mode")
#: What a loss may put its terms into.
CONTAINERS = ("builtins.list", "builtins.dict", "builtins.tuple")
_LOSS = "_rose_loss"


def loss_of(backward: fx.Node) -> Callable[..., Any] | None:
    """What is gone backward from in ``x.backward()``, as a function of the arguments of its
    operation."""
    known = op_of(backward).attributes
    if not all(k in known for k in ("stmts", "inputs", "filename", "globals")):
        return None
    if len(known["stmts"]) != 1:
        return None
    statement = known["stmts"][0]
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or call.args or call.keywords:
        return None
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return None
    kept = ast.Assign(targets=[ast.Name(_LOSS, ast.Store())], value=call.func.value)
    ast.copy_location(kept, statement)
    ast.fix_missing_locations(kept)
    return make_block_function(
        "loss",
        [kept],
        known["inputs"],
        [_LOSS],
        known["filename"],
        known["globals"],
        owner=known.get("owner"),
        within=known.get("within"),
    )


def run_function(
    run: list[fx.Node],
    inputs: list[fx.Node],
    backward: fx.Node,
    loss: Callable[..., Any],
    results: list[fx.Node],
) -> Callable[[dict[fx.Node, Any]], Callable[..., tuple[Any, ...]]]:
    """The run as one Python function of its inputs, the loss first among its results, for the
    objects behind its states.

    The results of what runs without grad are detached: a graph holds calls, and no modes.
    """

    def run_all(states: dict[fx.Node, Any], *values: Any) -> tuple[Any, ...]:
        env: dict[fx.Node, Any] = {**states, **dict(zip(inputs, values, strict=True))}

        def get(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            if argument in env:
                return env[argument]
            assert is_item(argument)
            return operator.getitem(get(argument.args[0]), argument.args[1])

        for node in run:
            made = op_of(node)(*(get(a) for a in node.args))
            env[node] = _detached(made) if without_grad(node) else made
        made = loss(*(get(a) for a in backward.args))
        return made, *(get(n) for n in results)

    return lambda states: functools.partial(run_all, states)


def lists_of(front: list[fx.Node]) -> set[fx.Node]:
    """Lists that begin empty, or with what they are handed, in one of these operations: a loss that
    nobody shares them with may fill them itself."""
    return {n for n in front if _is_list(n)}


def _is_list(node: fx.Node) -> bool:
    spec = facts.get(node).spec
    if not is_call(node) or op_of(node).kind != "block" or spec is None:
        return False
    statement = op_of(node).attributes.get("stmts", (None,))[-1]
    literal = isinstance(getattr(statement, "value", None), ast.List)
    return literal and spec.type_name == "builtins.list"


def contains(node: fx.Node) -> bool:
    """Whether a node makes a list or the like, or fills one: nobody but the loss may have it."""
    spec = facts.get(node).spec
    return op_of(node).signature.results == 0 or (
        spec is not None and spec.type_name in CONTAINERS[:2]
    )


def modes_of(node: fx.Node) -> list[Context]:
    """The modes that a node runs under; phases only name a stretch of code."""
    return [c for c in facts.get(node).context if c.kind != "phase"]


def without_grad(node: fx.Node) -> bool:
    """Whether a mode that an operation runs under keeps it from recording gradients."""
    return any(c.kind in NO_GRAD for c in modes_of(node))


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return type(value)(map(_detached, value)) if type(value) in (tuple, list) else value


def first_line(node: fx.Node) -> str:
    """The first line of what an operation stands for in the source, else its name."""
    source = op_of(node).source
    return source[0].splitlines()[0] if source and source[0] else op_of(node).name


def stem_of(backward: fx.Node) -> str:
    """What operations made of a loss are named after: the variable gone backward from, if any."""
    statement = op_of(backward).attributes["stmts"][0]
    owner = statement.value.func.value
    return owner.id if isinstance(owner, ast.Name) else "loss"


def done_outside(node: fx.Node, members: set[fx.Node]) -> bool:
    """Whether an operation without a graph, which uses nothing of the loss, is better done outside:
    it is handed a number, an array or an object, draws, or is the same on every trip."""
    if has_graph(facts.get(node).spec):
        return False
    given = [a for a in node.all_input_nodes if not is_state(a)]
    if any(maker_of(a) in members for a in given):
        return False
    if any((spec := facts.get(a).spec) is None or spec.kind != "tensor" for a in given):
        return True
    signature = op_of(node).signature
    if any(e.startswith("rng:") for e in (*(signature.reads or ()), *(signature.writes or ()))):
        return True
    return all(a.op == "placeholder" and facts.get(a).role == "captured" for a in given)
