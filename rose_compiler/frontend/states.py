"""From the first trip to signatures: every operation gets the effects that its statements have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Remark, RemarkLog

from rose_compiler.frontend.effects_of import Walker
from rose_compiler.frontend.effects_val import Effects, Val
from rose_compiler.frontend.record import Record, find_aliases
from rose_compiler.frontend.scope import NOT_STATIC, Static
from rose_compiler.ir import facts
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import Program, is_call, is_item, is_state, op_of

PASS = "capture"


def refine(program: Program, record: Record, log: RemarkLog) -> None:
    """Replace "everything" by what each block was found to read and write.

    Operations that did not run on the first trip keep "everything" until they do: the types of their
    inputs are not known.
    """
    find_aliases(program, record)
    mark_step_results(program, record)
    for node in list(program.nodes()):
        if not is_call(node):
            continue
        op = op_of(node)
        if op.kind not in ("block", "step", "component"):
            continue
        example = record.examples.get(node)
        if example is None:
            _missed(
                log,
                node,
                op,
                "never-run",
                "it did not run on the first trip, so its effects are not known yet",
            )
            continue
        found = analyze(op, node, example.types, record)
        if found.unknown:
            _missed(
                log, node, op, "unknown-effects", f"{found.unknown} reads and writes everything"
            )
            continue
        op.signature = replace(
            op.signature,
            reads=tuple(found.reads),
            writes=tuple(found.writes),
            may_raise=found.may_raise,
        )
        op.attributes["calls"] = frozenset(found.calls)


def analyze(op: Op, node: fx.Node, types: tuple[type | None, ...], record: Record) -> Effects:
    """Walk one operation's statements with the types of its arguments."""
    bindings: dict[str, Val] = {}
    statics: dict[str, Any] = op.attributes.get("statics", {})
    for name, kind, argument in zip(op.signature.params, types, node.args, strict=True):
        static = statics.get(name)
        if isinstance(static, Static):
            bindings[name] = Val(frozenset({name}), static.value, type(static.value), loaded=False)
        elif not isinstance(argument, fx.Node):
            bindings[name] = Val(obj=argument, type=kind)
        elif is_state(argument):
            bindings[name] = Val(frozenset({name}), NOT_STATIC, kind)
        else:
            mutable = kind is None or not issubclass(
                kind, (int, float, bool, str, bytes, type(None))
            )
            bindings[name] = Val(frozenset({name}) if mutable else frozenset(), NOT_STATIC, kind)
    out = Effects()
    walker = Walker(
        record.names,
        op.attributes.get("globals", {}),
        bindings,
        out,
        leaves=record.leaves.get(node),
    )
    walker.statements(list(op.attributes["stmts"]))
    # reading a value is no effect: values are ordered by who makes them
    values = {
        n
        for n, a in zip(op.signature.params, node.args, strict=True)
        if isinstance(a, fx.Node) and not is_state(a)
    }
    out.reads = {r: None for r in out.reads if r.split(".")[0].split("[")[0] not in values}
    return out


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
        where = f"{static.full}.outputs"
        for each in (node, *(u for u in node.users if is_item(u))):
            facts.put(
                each, borrowed=True, alias=tuple(dict.fromkeys([*facts.get(each).alias, where]))
            )


def hands_out_fresh(env: Any) -> bool:
    """Whether a simulator's results own their memory: it copies (gymnasium with ``copy=True``), or is
    known to allocate for each step."""
    module = type(env).__module__ or ""
    if module.startswith("rose_compiler.sim") or module.startswith("envpool"):
        return True
    if module.startswith("gymnasium.vector"):
        return bool(getattr(env, "copy", False)) if hasattr(env, "copy") else False
    return getattr(env, "rose_fresh_outputs", False) is True


def _missed(log: RemarkLog, node: fx.Node, op: Op, code: str, why: str) -> None:
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
