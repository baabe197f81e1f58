"""From the first trip to signatures: every operation gets the effects that its statements have."""

from __future__ import annotations

from dataclasses import replace
from types import GeneratorType
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Remark, RemarkLog
from rose_compiler.frontend import never_run
from rose_compiler.frontend.aliasing import find_aliases
from rose_compiler.frontend.attributes import NOT_STATIC
from rose_compiler.frontend.backward import Slices
from rose_compiler.frontend.changes import Changes
from rose_compiler.frontend.components import Declaration
from rose_compiler.frontend.effects_iter import of_code
from rose_compiler.frontend.effects_of import Surroundings, Walker
from rose_compiler.frontend.effects_val import Effects, Val, grads_of
from rose_compiler.frontend.extents import mark_through, mark_views
from rose_compiler.frontend.held import add_held, result_nodes, share_statically
from rose_compiler.frontend.links import add_links
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.recording import uses
from rose_compiler.frontend.scope import Static
from rose_compiler.frontend.simulators import hands_out_fresh
from rose_compiler.ir import facts
from rose_compiler.ir.effects import parse_entry
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.ops import STATE, UNBOUND, Op
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Program,
    children,
    is_call,
    is_item,
    is_state,
    op_of,
    placeholders,
)
from rose_compiler.ir.scope import Scope

PASS = "capture"
_IMMUTABLE = (int, float, bool, complex, str, bytes, type(None))
_NOTHING = {type(None), type(UNBOUND)}


def refine(program: Program, record: Record, log: RemarkLog) -> None:
    """Replace "everything" by what each block was found to read and write.

    Operations that did not run on the first trip keep "everything" until they do, unless their
    source tells all: the types of their inputs are not known otherwise.
    """
    name_states(program, record)
    # first, so that who shares memory with a step's results is known to lie in the same buffers
    mark_step_results(program, record)
    find_aliases(program, record)
    trained: set[str] = set()
    for node in _walked(program):
        if node not in record.examples:  # whatever an earlier look at it found
            op = op_of(node)
            op.signature = replace(op.signature, reads=None, writes=None)
    found = _analyze_all(program, record, trained)
    if trained:  # some forwards were looked at before it was known that they may train
        found = _analyze_all(program, record, trained)
    unrun = [n for n in _walked(program) if n not in record.examples]
    for node, effects in never_run.understood(program, unrun, record, found, trained, analyze):
        found[node] = effects
        _sign(op_of(node), effects)
        share_statically(node, effects, program)
    _tell_unknown(program, found, record, log)
    found = {node: effects for node, effects in found.items() if not effects.unknown}
    scope = Scope(program)
    for node, effects in found.items():
        _resolve_gradients(node, effects, scope)
        _sign(op_of(node), effects)
    slices = Slices(program, record.names)
    for node, effects in found.items():
        if effects.backward:
            _add_backward(node, effects, slices, record)
            _sign(op_of(node), effects)
            mark_through(node, slices, record)
    add_links(found, record.names, scope)
    for node, effects in found.items():
        _mark_opaque(node, effects, record)
    add_held(program, found, record.names)
    for node, effects in found.items():
        op = op_of(node)
        _sign(op, effects)
        op.signature = replace(op.signature, records=uses(node, op.signature, record))
        mark_views(op, effects)


def _analyze_all(program: Program, record: Record, trained: set[str]) -> dict[fx.Node, Effects]:
    """The effects of every operation that ran; its signature says them."""
    found: dict[fx.Node, Effects] = {}
    # what taking an item does is known from where the iterator was made
    scope = Scope(program)
    for node in sorted(_walked(program), key=_advances):
        if node not in record.examples:
            continue
        op = op_of(node)
        effects = analyze(op, node, record, iterators(op, node, found, scope), trained)
        op.attributes["calls"] = frozenset(effects.calls)
        found[node] = effects
        if not effects.unknown:
            _sign(op, effects)
            _mark_opaque(node, effects, record)
    return found


def _walked(program: Program) -> list[fx.Node]:
    kinds = ("block", "step", "component")
    return [n for n in program.nodes() if is_call(n) and op_of(n).kind in kinds]


def _tell_unknown(
    program: Program, found: dict[fx.Node, Effects], record: Record, log: RemarkLog
) -> None:
    for node in _walked(program):
        if node not in found:
            why = "it did not run on the first trip, so its effects are not known yet"
            _missed(log, node, "never-run", why)
        elif found[node].unknown:
            why = f"{found[node].unknown} reads and writes everything"
            _missed(log, node, "unknown-effects", why)


def _sign(op: Op, effects: Effects) -> None:
    declared = op.attributes.get("declared")
    op.signature = replace(
        op.signature,
        reads=tuple(effects.reads),
        writes=tuple(effects.writes),
        may_raise=effects.may_raise,
        declared=isinstance(declared, Declaration),
        batch=_promised(op, declared) if isinstance(declared, Declaration) else op.signature.batch,
    )


def _promised(op: Op, declared: Declaration) -> tuple[tuple[str, int], ...] | None:
    """The declared batch axes by the names that the operation has for the parameters; those of
    parameters that the call leaves out are dropped."""
    if declared.batch is None:
        return None
    given = op.attributes.get("given", {})
    named = ((given.get(name, name), axis) for name, axis in declared.batch)
    return tuple((n, a) for n, a in named if n.startswith("return") or n in op.signature.params)


def name_states(program: Program, record: Record) -> None:
    """Give every state node the canonical name of the object that it stands for."""
    for node in program.graph.nodes:
        if not is_state(node):
            continue
        root = node.args[0] if is_call(node, STATE) else node
        assert isinstance(root, fx.Node)
        value = program.objects.get(root.name)
        if value is None and root.name not in program.objects:
            continue
        if node is not root:
            value = resolve(value, str(node.args[1]))
        name = record.names.name_of(value)
        if name is not None:
            facts.put(node, state=name)
    _hand_down(program.root)


def _hand_down(module: fx.GraphModule) -> None:
    """Bodies see a state under the name that it has outside."""
    for owner, child in children(module):
        if is_call(owner) and op_of(owner).name == "loop":
            pairs = zip(LoopView(owner).captured_params, LoopView(owner).captured, strict=True)
        else:
            pairs = zip(placeholders(child.graph), BranchView(owner).captured, strict=True)
        for inner, outer in pairs:
            if is_state(outer):
                facts.put(inner, state=facts.get(outer).state)
        _hand_down(child)


def _advances(node: fx.Node) -> bool:
    return any("next(" in line for line in op_of(node).source)


def iterators(
    op: Op, node: fx.Node, found: dict[fx.Node, Effects], scope: Scope
) -> dict[str, Effects]:
    """What taking the next item of each iterator does that the operation is given, by parameter."""
    known: dict[str, Effects] = {}
    if not _advances(node):
        return known
    for param, argument in zip(op.signature.params, node.args, strict=True):
        if not isinstance(argument, fx.Node) or is_state(argument):
            continue
        whole = Effects()
        makers = scope.definers(argument)
        for maker in makers:
            made = found.get(maker)
            inner = list(made.pending.values()) if made is not None else []
            if len(inner) == 1:
                whole.add(_elsewhere(maker, inner[0], scope))
            else:
                makers = ()
        if makers:
            known[param] = whole
    return known


def _elsewhere(maker: fx.Node, effects: Effects, scope: Scope) -> Effects:
    """The effects that an operation describes, in terms that hold for any operation."""
    args = dict(zip(op_of(maker).signature.params, maker.args, strict=True))
    moved = replace(effects, reads={}, writes={}, kept=[], inside=set(), deep=set(), results={})
    for entries, target in ((effects.reads, moved.reads), (effects.writes, moved.writes)):
        for text in entries:
            entry = parse_entry(text)
            argument = args.get(entry.root)
            if not isinstance(argument, fx.Node):
                target[text] = None
            elif is_state(argument):
                below = f".{entry.path}" if entry.path else ""
                target[f"@{facts.get(argument).state}{below}"] = None
            else:
                aliases = [a for a in scope.aliases(argument) if not a.startswith("%")]
                target.update({f"@{a}": None for a in aliases})
                if not aliases and entries is effects.writes:
                    moved.unknown = moved.unknown or "an iterator that writes what it was given"
    return moved


def analyze(
    op: Op,
    node: fx.Node,
    record: Record,
    iterators: dict[str, Effects],
    trained: set[str],
    types_of: tuple[type | None, ...] | None = None,
) -> Effects:
    """Walk one operation's statements with every combination of argument types that was seen, or
    with those in ``types_of``.

    ``iterators`` are the effects of taking an item of what a parameter stands for.
    """
    out = Effects()
    combinations = list(record.types[node]) if types_of is None else [types_of]
    open_ = [
        isinstance(argument, fx.Node) and set(kinds) <= _NOTHING
        for argument, kinds in zip(node.args, zip(*combinations, strict=True), strict=True)
    ]
    for types in combinations:
        # what was nothing whenever it was seen, under a test for that, may be anything later
        kinds = tuple(None if any_kind else k for k, any_kind in zip(types, open_, strict=True))
        out.add(_walk(op, node, kinds, record, iterators, trained))
    # reading a value is no effect: values are ordered by who makes them
    values = {
        n
        for n, a in zip(op.signature.params, node.args, strict=True)
        if isinstance(a, fx.Node) and not is_state(a)
    }
    out.reads = {r: None for r in out.reads if parse_entry(r).root not in values or ".grads" in r}
    return out


def _walk(
    op: Op,
    node: fx.Node,
    types: tuple[type | None, ...],
    record: Record,
    iterators: dict[str, Effects],
    trained: set[str],
) -> Effects:
    out = Effects()
    changes = op.attributes.get("changes")
    around = Surroundings(
        record.names,
        changes if isinstance(changes, Changes) else Changes(anything=True, modules=True),
        out,
    )
    around.trained = trained
    statics: dict[str, Any] = op.attributes.get("statics", {})
    for name, argument in zip(op.signature.params, node.args, strict=True):
        if isinstance(statics.get(name), Static) and isinstance(argument, fx.Node):
            around.params.append((name, facts.get(argument).state))
    bindings: dict[str, Val] = {}
    walker = Walker(
        around,
        op.attributes.get("globals", {}),
        bindings,
        owner=op.attributes.get("owner"),
    )
    for name, kind, argument in zip(op.signature.params, types, node.args, strict=True):
        index = name if kind is int else ""
        static = statics.get(name)
        if kind is type(UNBOUND):
            kind = type(None)  # reading it raises, as using None does
        if isinstance(static, Static):
            bindings[name] = walker.live(static.value, frozenset({name}))
        elif not isinstance(argument, fx.Node):
            bindings[name] = Val(obj=argument, type=kind, index=index)
        elif kind is not None and issubclass(kind, _IMMUTABLE):
            bindings[name] = Val(type=kind, index=index)
        else:
            bindings[name] = Val(frozenset({name}), NOT_STATIC, kind)
    example = record.examples.get(node)
    lives = () if example is None else zip(op.signature.params, example.args, strict=True)
    for name, live in lives:
        effects = iterators.get(name)
        if effects is None and isinstance(live, GeneratorType):
            effects = of_code(live.gi_code)
        if effects is not None:
            bindings[name] = replace(bindings[name], pending=effects)
    walker.statements(list(op.attributes["stmts"]))
    for name in op.attributes.get("outputs", ()):
        if name in walker.bindings:
            made = walker.bindings[name]
            out.results[name] = made.all_places
            out.kinds[name] = made.type
            if made.pending is not None:
                out.pending[name] = made.pending
    return out


def _mark_opaque(node: fx.Node, effects: Effects, record: Record) -> None:
    """Results that may belong to a state whose insides can't be told by identity: gradients, what
    libraries hold, long containers."""
    outputs = list(effects.results)
    op = op_of(node)
    args = dict(zip(op.signature.params, node.args, strict=True))
    for position, name in enumerate(op.attributes.get("outputs", ())):
        if name not in outputs:
            continue
        alias: dict[str, None] = {}
        for place in effects.results[name]:
            entry = parse_entry(place)
            state = entry.absolute
            argument = args.get(entry.root)
            if state is None and isinstance(argument, fx.Node) and is_state(argument):
                state = facts.get(argument).state + (f".{entry.path}" if entry.path else "")
            if state is not None and (".grads" in state or record.names.is_opaque(state)):
                alias[state] = None
        if not alias:
            continue
        for target in result_nodes(node, position, op.signature.results):
            facts.put(target, alias=tuple(dict.fromkeys([*facts.get(target).alias, *alias])))


def _resolve_gradients(node: fx.Node, effects: Effects, scope: Scope) -> None:
    """Gradients of a value are those of the states that it is known to be."""
    args = dict(zip(op_of(node).signature.params, node.args, strict=True))
    for entries in (effects.reads, effects.writes):
        for text in list(entries):
            root = parse_entry(text).root
            argument = args.get(root)
            if ".grads" not in text or not isinstance(argument, fx.Node) or is_state(argument):
                continue
            aliases = [a for a in scope.aliases(argument) if not a.startswith("%")]
            if aliases or entries is effects.reads:
                del entries[text]
            for state in aliases:
                entries.setdefault(f"@{grads_of(state)}")


def _add_backward(node: fx.Node, effects: Effects, slices: Slices, record: Record) -> None:
    """The gradients that it writes, and the parameters and other memory that its graph holds."""
    names = record.names
    tensors = slices.leaves(node)
    seen = record.leaves.get(node, {})
    for state in (*names.cover(tensors, "grads"), *seen):
        effects.writes.setdefault("*" if state == "*" else f"@{state}")
        effects.reads.setdefault("*" if state == "*" else f"@{state}")
    for state in (*names.cover(tensors, "params"), *record.saved.get(node, {})):
        effects.reads.setdefault("*" if state == "*" else f"@{state}")


def mark_step_results(program: Program, record: Record) -> None:
    """Say of every step's results whether the simulator may overwrite them later."""
    for node in program.nodes():
        if not is_call(node) or op_of(node).kind != "step":
            continue
        op = op_of(node)
        static = op.attributes["statics"].get(op.attributes["step"]["env"])
        env = static.value if isinstance(static, Static) else None
        if env is None or hands_out_fresh(env):
            continue
        where = f"{record.names.name_of(env) or static.full}.outputs"
        for each in (node, *(u for u in node.users if is_item(u))):
            facts.put(
                each, borrowed=True, alias=tuple(dict.fromkeys([*facts.get(each).alias, where]))
            )


def _missed(log: RemarkLog, node: fx.Node, code: str, why: str) -> None:
    where = facts.get(node).origin.where
    log.add(
        Remark(
            kind="missed",
            pass_name=PASS,
            where=() if where is None else (where,),
            code=code,
            why=why,
            allow="declare its effects with rose_compiler.declare(fn, reads=[...], writes=[...])",
            verdict="unknown",
        )
    )
