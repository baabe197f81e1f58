"""Copies of parameters, so that what reads them may go on while they are trained.

An evaluation runs beside the training until an optimizer writes what it reads. Handed a version of
the parameters of its own, copied when all that comes before it in program order has been, it may go
on beside the update too: what it computes is the same, bit for bit. A checkpoint is handed its
objects frozen, as pickling found them there: its file is the same, byte for byte. A copy costs its
time and its memory, so it is a choice of the decision's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
import torch.fx as fx

from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import Blocker
from rose_compiler.base.sizes import show_bytes
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.effects import GLOBAL_STATES, related
from rose_compiler.ir.facts import Context, Spec
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.ops import BRANCH, FREEZE, LOOP, STATE, VERSION
from rose_compiler.ir.program import Program, is_call, is_state, op_of
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext, context_of
from rose_compiler.passes.freezing import only_saved, parts
from rose_compiler.passes.overlap import bodies_of, find, kinds
from rose_compiler.passes.place import TRAINING

#: Copied without recording: nobody goes back through a version.
NO_GRAD = (Context("no_grad"),)


@dataclass(frozen=True)
class Versions(Pass):
    """Hand evaluations and checkpoints beside the training copies of the parameters that it
    writes."""

    name: ClassVar[str] = "versions"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        context = context_of(rewrite)
        if not (context.options.overlap and context.run_ahead):
            return
        for graph, members in list(_readers(program, rewrite.deps)):
            found = plan(graph, members, program, rewrite.deps, context)
            if isinstance(found, Blocker):
                rewrite.missed(_named(members), found)
            elif rewrite.spend():
                self._copy(members, found, rewrite)

    def _copy(self, members: Sequence[fx.Node], found: Copies, rewrite: Rewriter) -> None:
        size = sum(_bytes(spec) or 0 for spec in found.versions.values())
        much = f", {show_bytes(size)}" if size else ""
        if found.versions:
            rewrite.applied(
                _named(members),
                f"reads copies of {len(found.versions)} parameters{much}, and may go on while they "
                "are trained",
            )
        for state, spec in found.versions.items():
            made = rewrite.call(
                VERSION,
                state,
                before=members[0],
                like=members[0],
                name=f"{state.name}_version",
                spec=spec,
                context=NO_GRAD,
            )
            users = [m for m in members if state in m.all_input_nodes]
            rewrite.replace(state, made, users=users)
        for save, (value, spec) in found.frozen.items():
            size = sum(_bytes(part) or 0 for part in spec.items) if spec else 0
            rewrite.applied(
                save,
                f"writes `{value.name}` as it was there"
                + (f", {show_bytes(size)}," if size else "")
                + " and may go on while its parts are trained",
            )
            # no further in front: another file may be written, or the value made, in between
            kept = rewrite.call(
                FREEZE,
                value,
                before=save,
                like=save,
                name=f"{value.name}_then",
                spec=spec,
            )
            rewrite.replace(value, kept, users=[save])


@dataclass(frozen=True)
class Copies:
    """What a group of operations is to have copies of: parameters, with their types, and of each
    operation that writes a file what it writes, with the types of the tensors in it."""

    versions: dict[fx.Node, Spec | None] = field(default_factory=dict)
    frozen: dict[fx.Node, tuple[fx.Node, Spec | None]] = field(default_factory=dict)


def plan(
    graph: fx.Graph,
    members: Sequence[fx.Node],
    program: Program,
    deps: Dependences,
    context: PassContext,
) -> Copies | Blocker:
    """The copies that a group of operations is to have, or why it has none."""
    if not context.options.copies:
        return Blocker("switched-off", "the decision copies no parameters")
    wanted = _shared(graph, members, deps)
    nodes = {
        facts.get(used).state: used
        for member in members
        for used in member.all_input_nodes
        if is_state(used)
    }
    found = Copies()
    for state in wanted:
        if saves := only_saved(state, members, deps):
            found.frozen.update((save, (value, None)) for save, value in saves.items())
            continue
        node = nodes.get(state)
        if node is None or not _tensor(state) or not _only_traced(state, members, deps):
            return Blocker(
                "effects-conflict",
                f"{title(_named(members))} reads {state} by more than traced operations on its "
                "tensors, and so can't be handed a copy",
                where=(at,) if (at := place(_named(members))) else (),
            )
        if writer := _between(state, members, deps):
            return Blocker(
                "effects-conflict",
                f"{title(_named(members))} reads {state} behind {title(writer)} too, which writes "
                "it: one copy made in front of both would be the older one",
                where=(at,) if (at := place(writer)) else (),
            )
        if not _copies_alike(live := _live(node, program, deps)):
            return Blocker(
                "unsupported-shape",
                f"{state} lies in its memory otherwise than a copy would, and may round otherwise",
            )
        found.versions[node] = None if live is None else _spec(live)
    for save, (value, _) in found.frozen.items():
        made = parts(value, program, deps)
        if away := [p.device for p in made or () if p.device.type != "cpu"]:
            return Blocker(
                "unsupported-shape",
                f"what {title(save)} writes lies on {away[0]}, and is not copied",
            )
        specs = None if made is None else tuple(map(_spec, made))
        found.frozen[save] = value, None if specs is None else Spec("tuple", items=specs)
    return _too_large(found, context) or found


def _too_large(found: Copies, context: PassContext) -> Blocker | None:
    """Why copies don't fit the memory that the user allows, or None."""
    if context.memory_limit is None:
        return None
    sizes = [_bytes(spec) for spec in found.versions.values()]
    for _, spec in found.frozen.values():
        sizes += [None] if spec is None else map(_bytes, spec.items)
    # the next trip's are made while this one's may still be read
    size = None if None in sizes else 2 * sum(s or 0 for s in sizes)
    if size is not None and size <= context.memory_limit:
        return None
    return Blocker(
        "memory-limit",
        f"copies of {len(sizes)} parameters would take "
        f"{'unknown many' if size is None else size} bytes, "
        f"{context.memory_limit:.0f} are allowed",
    )


def _readers(program: Program, deps: Dependences) -> Iterator[tuple[fx.Graph, list[fx.Node]]]:
    """Groups of operations that run beside training and read what it writes, with their bodies."""
    for owner, graph in bodies_of(program):
        lanes = find(owner, graph, deps).lanes
        for lane in dict.fromkeys(lanes.values()):
            members = [n for n in graph.nodes if lanes.get(n) == lane]
            trains = any(kinds(n) & TRAINING for n in members)
            if not trains and _shared(graph, members, deps):
                yield graph, members


def _shared(graph: fx.Graph, members: Sequence[fx.Node], deps: Dependences) -> list[str]:
    """The states that operations read and the training around them writes, in order."""
    written = {
        effect.state
        for node in graph.nodes
        if node not in members and kinds(node) & TRAINING
        for effect in deps.effects(node)
        if effect.write and effect.state not in GLOBAL_STATES
    }
    found = dict.fromkeys(
        effect.state
        for member in members
        for effect in deps.effects(member)
        if any(related(effect.state, state) for state in written)
    )
    return list(found)


def _only_traced(state: str, within: Sequence[fx.Node], deps: Dependences) -> bool:
    """Whether whoever touches a state, in the bodies of loops and branches too, is traced."""
    for node in within:
        if is_call(node, LOOP) or is_call(node, BRANCH):
            for graph in bodies.graphs_of(node):
                if not _only_traced(state, list(graph.nodes), deps):
                    return False
        elif any(related(e.state, state) for e in deps.effects(node)) and not _traced(node):
            return False
    return True


def _between(state: str, members: Sequence[fx.Node], deps: Dependences) -> fx.Node | None:
    """What writes a state behind the first of a group, in front of the last that reads it."""
    touch = [m for m in members if any(related(e.state, state) for e in deps.effects(m))]
    at = members[0]
    while touch and at is not touch[-1]:
        writes = at not in members and any(
            e.write and related(e.state, state) for e in deps.effects(at)
        )
        if writes:
            return at
        at = at.next
    return None


def _traced(node: fx.Node) -> bool:
    """Whether an operation takes tensors as nothing but tensors."""
    return is_call(node) and op_of(node).kind == "graph" and not records(node)


def _tensor(state: str) -> bool:
    return ".params." in f"{state}." or ".buffers." in f"{state}."


def _live(node: fx.Node, program: Program, deps: Dependences) -> Any:
    """A parameter as it is now; None for a program without its objects."""
    at = deps.scope.resolve(node)
    path = ""
    if isinstance(at, fx.Node) and is_call(at, STATE):
        path = str(at.args[1])
        at = deps.scope.resolve(at.args[0])
    if not isinstance(at, fx.Node) or at.name not in program.objects:
        return None
    return resolve(program.objects[at.name], path) if path else program.objects[at.name]


def _copies_alike(live: Any) -> bool:
    """Whether a copy lies in memory of its own as the original does: kernels look at strides and
    alignment."""
    if live is None:
        return True
    if type(live) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return live.storage_offset() == 0 and torch.empty_like(live).stride() == live.stride()


def _spec(live: torch.Tensor) -> Spec:
    dtype = str(live.dtype).removeprefix("torch.")
    return Spec("tensor", "torch.Tensor", tuple(live.shape), dtype, str(live.device))


def _bytes(spec: Spec | None) -> int | None:
    if spec is None:
        return None
    dtype = getattr(torch, spec.dtype)
    return int(prod(spec.shape) * dtype.itemsize)


def _named(members: Sequence[fx.Node]) -> fx.Node:
    """What of a group remarks name: a loop or branch, else the first."""
    whole = [n for n in members if is_call(n, LOOP) or is_call(n, BRANCH)]
    return whole[0] if whole else members[0]


def copying(program: Program) -> bool:
    """Whether an evaluation of a program could be handed copies of parameters."""
    context = PassContext(options=Decision(overlap=True, copies=True))
    deps = Dependences(program)
    return any(
        not isinstance(plan(graph, members, program, deps, context), Blocker)
        for graph, members in _readers(program, deps)
    )
