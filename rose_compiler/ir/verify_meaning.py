"""Rules of meaning: states, effects and facts say what dependences take them to say."""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from rose_compiler.ir import facts, program
from rose_compiler.ir.effects import EVERYTHING, GLOBAL_STATES, OUTSIDE, parse_entry
from rose_compiler.ir.ops import APPEND, LOOP, SHARD, STATE, Op
from rose_compiler.ir.program import LoopView, Value, is_call
from rose_compiler.ir.scope import nodes_in, root_of
from rose_compiler.ir.verify_rules import Fault, Rule, Subject


def _facts(subject: Subject) -> Iterator[Fault]:
    for body in subject.bodies:
        for node in body.graph.nodes:
            found = node.meta.get("rose")
            if found is not None and not isinstance(found, facts.Facts):
                yield Fault("facts are no Facts", node, "Facts", type(found).__name__)
                continue
            try:
                hash(found)
            except TypeError as error:
                # deepcopy of a graph would share them
                yield Fault(f"facts can be changed in place: {error}", node)


def _captured(subject: Subject) -> Iterator[Fault]:
    for body in subject.bodies:
        if body.owner is None:
            continue
        params = program.placeholders(body.graph)
        first = 1 + len(LoopView(body.owner).carried_init) if is_call(body.owner, LOOP) else 0
        for param, outer in zip(params[first:], body.owner.args[3], strict=True):  # type: ignore[arg-type]
            outside = facts.get(outer).state
            if facts.get(param).state != outside:
                yield Fault(
                    f"{param} in {body.path} stands for {outer}",
                    param,
                    f"state {outside!r}" if outside else "a value",
                    facts.get(param).state or "a value",
                )
        for param in params[:first]:
            if facts.get(param).state:
                yield Fault(f"the index or a carried value {param} is marked as a state", param)


def _states(subject: Subject) -> Iterator[Fault]:
    for param in program.placeholders(subject.program.graph):
        known = facts.get(param)
        wanted = str(param.target) if known.role == "state" else ""
        if known.state != wanted:
            yield Fault(f"the state of parameter {param}", param, wanted or "none", known.state)
    for body in subject.bodies:
        for node in body.graph.nodes:
            state = facts.get(node).state
            if is_call(node, STATE) or is_call(node, SHARD):
                yield from _below(node, state, subject.program.state_params)
            elif state and node.op != "placeholder":
                if not is_call(node) or program.is_structure(node):
                    yield Fault(f"{node} can't be the birth of {state}", node)
                elif not state.startswith("%"):
                    yield Fault(
                        f"{node} gives birth to {state}", node, "a name that starts with %", state
                    )


def _below(node: fx.Node, state: str, roots: tuple[str, ...]) -> Iterator[Fault]:
    root = node.args[0]
    above = facts.get(root).state if isinstance(root, fx.Node) else ""
    if not above:
        yield Fault(f"{node} lies below a value", node, "a state", root)
    elif is_call(node, STATE):
        # an object that several paths lead to has the name of one of them
        if root_of(state) not in (*roots, root_of(above)):
            yield Fault(f"the name of {node}", node, f"{above}.{node.args[1]}", state)
    elif not state.startswith(f"{above}."):
        # a step of the whole must conflict with a step of a shard
        yield Fault(f"the name of shard {node}", node, f"a name below {above}", state or "none")


def _values(subject: Subject) -> Iterator[Fault]:
    for body in subject.bodies:
        for node in body.graph.nodes:
            if is_call(node, LOOP):
                yield from _no_states(node, LoopView(node).carried_init, "carried in")
            elif program.is_exit(node):
                yield from _no_states(node, node.args[1], "handed out by an exit")
            elif node.op == "output" and body.owner is not None:
                yield from _no_states(node, node.args, "handed on")


def _no_states(node: fx.Node, value: Value, how: str) -> Iterator[Fault]:
    for found in nodes_in(value):
        state = facts.get(found).state
        # an instance may be handed on: readers of what it becomes then count as its readers
        if state and not state.startswith("%"):
            yield Fault(f"state {state} is {how} as a value", node)


def _signatures(subject: Subject) -> Iterator[Fault]:
    for op in subject.program.ops.by_name.values():
        yield from _signature(op, set(subject.program.state_params))


def _signature(op: Op, roots: set[str]) -> Iterator[Fault]:
    params = op.signature.params
    if len(set(params)) != len(params):
        yield Fault(f"operation {op.name!r} has two parameters of one name", None, None, params)
    for text in (*(op.signature.reads or ()), *(op.signature.writes or ())):
        try:
            entry = parse_entry(text)
        except ValueError as error:
            yield Fault(f"an effect of {op.name!r}: {error}")
            continue
        known = entry.root in params or entry.root in (*GLOBAL_STATES, EVERYTHING)
        absolute = entry.absolute
        if absolute is not None:
            root = absolute.split(".")[0]
            known = root in (*roots, *GLOBAL_STATES, OUTSIDE) or root.startswith("%")
        if not known and not entry.root.startswith("rng:"):
            yield Fault(f"an effect of {op.name!r} on {entry.root!r}", None, params, text)
    for name, axis in op.signature.batch or ():
        result = name == "return" or name.startswith("return.")
        if not (name in params or result) or not isinstance(axis, int):
            yield Fault(f"the batch axis of {name!r} in {op.name!r}", None, params, (name, axis))
    step = op.attributes.get("step")
    if op.kind == "step" and step is not None:
        named = [step.get("env"), step.get("action")] if isinstance(step, dict) else [step]
        if not all(n in params for n in named):
            yield Fault(f"step operation {op.name!r}", None, f"two of {params}", step)


def _kept(subject: Subject) -> Iterator[Fault]:
    for body in subject.bodies:
        for node in body.graph.nodes:
            if is_call(node, APPEND) and isinstance(node.args[1], fx.Node):
                lent = [
                    a for a in subject.deps.scope.aliases(node.args[1]) if not a.startswith("%")
                ]
                if lent:
                    # what reads the list later would not count as a reader of that memory
                    yield Fault("a list keeps memory of a state", node, "a snapshot", lent)


MEANING: tuple[Rule, ...] = (
    Rule("facts", "facts are frozen all the way down", _facts),
    Rule("captured", "a captured placeholder stands for the state that is captured", _captured),
    Rule("states", "state nodes have the names of what they stand for", _states),
    Rule("values", "states are never carried, and never results of bodies", _values),
    Rule("signatures", "effects, batch axes and steps are stated in terms that exist", _signatures),
    Rule("kept", "lists over trips keep values that own their memory", _kept),
)
