"""Programs as text: a subset of Python that reads like the user's loop and parses back.

``docs/ir.md`` has the grammar. :func:`dump` prints structure, signatures and facts; what it leaves
out (types seen, costs, origins) it prints as comments at most, so that they change no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.dump_expr import (
    arguments,
    bare,
    constant,
    is_infix,
    is_name,
    plain_call,
    unprintable,
    value,
)
from rose_compiler.ir.dump_names import Aliases, identifier, name_nodes
from rose_compiler.ir.dump_ops import print_op
from rose_compiler.ir.facts import REGION, Context
from rose_compiler.ir.ops import BRANCH, LOOP, STATE
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Program,
    is_call,
    is_item,
    op_of,
    output_node,
    placeholders,
)


def dump(program: Program, *, costs: bool = False, origins: bool = False) -> str:
    """The program as text that :func:`rose_compiler.ir.parse.parse` reads back.

    ``costs`` and ``origins`` add comments: the median time of a call, and the user's line with the
    passes that touched the node.

    Raises:
        VerifyError: when the program holds something that can't be printed.
    """
    return _Printer(program, costs, origins).text()


def _common(a: tuple[Context, ...], b: tuple[Context, ...]) -> tuple[Context, ...]:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def derived(node: fx.Node) -> facts.Facts:
    """The facts that picking one result of a tuple takes over from it."""
    return _told(replace(facts.get(node), loop=None, state=""))


def _told(known: facts.Facts) -> facts.Facts:
    """Facts without those that a dump leaves out."""
    return replace(known, spec=None, cost=None, origin=facts.Origin())


@dataclass
class _Unit:
    """One statement: a node, and the picks of its results that are printed with it."""

    node: fx.Node
    items: tuple[fx.Node | None, ...] | None = None  # by position, None where nobody picks
    context: tuple[Context, ...] = ()  # printed as `with`

    @property
    def branch(self) -> BranchView:
        return BranchView(self.node)


@dataclass
class _Printer:
    program: Program
    costs: bool
    origins: bool
    lines: list[str] = field(default_factory=list)
    names: dict[fx.Node, str] = field(init=False)
    aliases: Aliases = field(init=False)

    def text(self) -> str:
        program = self.program
        aliases = self.aliases = Aliases(program)
        self.names = name_nodes(program)
        self.lines.append(f"# rose ir | {program.name} | {program.stage}".replace("\n", " "))
        for op in aliases.called:
            self.lines += print_op(op, aliases[op])
        if aliases.called:
            self.lines.append("")
        name = program.name if is_name(program.name) else identifier(program.name)
        about = [f"name={constant(program.name)}"] if name != program.name else []
        about += [f"stage={constant(program.stage)}"] if program.stage != "captured" else []
        if about:
            self.lines.append(f"@program({', '.join(about)})")
        self.lines.append(f"def {name}({self._parameters()}):")
        self._body(program.root, 1, ())
        self._line(1, f"return {bare(output_node(program.graph).args[0], self.names)}")
        return "\n".join(self.lines) + "\n"

    def _parameters(self) -> str:
        program = self.program
        n = len(program.value_params)
        parts = []
        for i, node in enumerate(placeholders(program.graph)):
            if i == n:
                parts.append("*")
            known = facts.get(node)
            told = _facts(known)
            if i >= n and known.state != self.names[node]:
                told.append(f"state={constant(known.state)}")
            mark = f": facts({', '.join(told)})" if told else ""
            parts.append(self.names[node] + mark)
        return ", ".join(parts)

    # statements

    def _line(self, indent: int, text: str, node: fx.Node | None = None) -> None:
        comment = self._comment(node) if node is not None else ""
        self.lines.append("    " * indent + text + (f"  # {comment}" if comment else ""))

    def _comment(self, node: fx.Node) -> str:
        known = facts.get(node)
        parts = []
        if self.costs and known.cost is not None:
            parts.append(f"{known.cost * 1e3:.3f} ms")
        if self.origins and known.origin.where is not None:
            parts.append(str(known.origin.where))
        if self.origins and known.origin.passes:
            parts.append("by " + ", ".join(known.origin.passes))
        return " | ".join(parts).replace("\n", " ")

    def _body(self, module: fx.GraphModule, indent: int, context: tuple[Context, ...]) -> None:
        units = list(self._units(module.graph))
        self._group(units, indent, context)

    def _units(self, graph: fx.Graph) -> Iterator[_Unit]:
        nodes = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        at = 0
        while at < len(nodes):
            node = nodes[at]
            items = self._picked_behind(node, nodes[at + 1 :])
            at += 1 + sum(1 for i in items or () if i is not None)
            yield _Unit(node, items, self._shared_context(node))

    def _picked_behind(
        self, node: fx.Node, behind: Sequence[fx.Node]
    ) -> tuple[fx.Node | None, ...] | None:
        """The picks of a node's results, when they can be printed as its targets."""
        count = self._result_count(node)
        if count is None or facts.get(node).state or not node.users:
            return None
        items: list[fx.Node | None] = [None] * count
        last = -1
        for follower in behind:
            if not (is_item(follower) and follower.args[0] is node) or follower.kwargs:
                break
            position = follower.args[1]
            if type(position) is not int or not last < position < count:
                break
            if _told(facts.get(follower)) != derived(node):
                break
            items[position] = follower
            last = position
        if {i for i in items if i is not None} != set(node.users):
            return None
        return tuple(items)

    def _result_count(self, node: fx.Node) -> int | None:
        if is_call(node, BRANCH):
            outputs = output_node(BranchView(node).then.graph).args[0]
            assert isinstance(outputs, tuple)
            if len(outputs) == 1 and self._single_is_tuple(node):
                return None
            return len(outputs) or None
        if is_call(node) and not is_call(node, LOOP) and op_of(node).signature.results > 1:
            return op_of(node).signature.results
        return None

    def _single_is_tuple(self, node: fx.Node) -> bool:
        view = BranchView(node)
        return any(isinstance(_outputs(arm.graph)[0], tuple) for arm in (view.then, view.orelse))

    def _shared_context(self, node: fx.Node) -> tuple[Context, ...]:
        """The contexts that hold for a node and, if it has bodies, for everything inside."""
        shared = facts.get(node).context
        bodies: list[fx.GraphModule] = []
        if is_call(node, LOOP):
            bodies = [LoopView(node).body]
        elif is_call(node, BRANCH):
            bodies = [BranchView(node).then, BranchView(node).orelse]
        for body in bodies:
            for inner in body.graph.nodes:
                if inner.op not in ("placeholder", "get_attr", "output"):
                    shared = _common(shared, self._shared_context(inner))
        return shared

    def _group(self, units: list[_Unit], indent: int, context: tuple[Context, ...]) -> None:
        depth = len(context)
        at = 0
        while at < len(units):
            if len(units[at].context) <= depth:
                self._statement(units[at], indent, context)
                at += 1
                continue
            entered = units[at].context[depth]
            end = at
            while end < len(units) and units[end].context[depth : depth + 1] == (entered,):
                end += 1
            self._line(indent, f"with {_context(entered)}:")
            self._group(units[at:end], indent + 1, (*context, entered))
            at = end

    def _statement(self, unit: _Unit, indent: int, context: tuple[Context, ...]) -> None:
        node = unit.node
        if is_call(node, LOOP):
            self._loop(node, indent, context)
        elif is_call(node, BRANCH):
            self._branch(unit, indent, context)
        else:
            call, marks = self._call(node), self._marks(node)
            if marks and is_infix(node) and not call.startswith("operator."):
                call = f"({call})"  # marks bind tighter than most operators
            self._line(indent, self._target(unit) + call + marks, node)

    def _target(self, unit: _Unit) -> str:
        if unit.items is not None:
            targets = [self.names[i] if i is not None else "_" for i in unit.items]
            return ", ".join(targets) + " = "
        node = unit.node
        state, name = facts.get(node).state, self.names[node]
        if state != default_state(node):
            born = "state" if state == f"%{name}" else f"state({constant(state)})"
            return f"{name}: {born} = "
        return f"{name} = " if node.users else ""

    def _call(self, node: fx.Node) -> str:
        if not is_call(node):
            base = node.args[0] if node.args else None
            if is_item(node) and isinstance(base, fx.Node) and is_call(base, LOOP):
                carried, position = LoopView(base).carried, node.args[1]
                if type(position) is int and 0 <= position < len(carried):
                    return f"{self.names[base]}.{self.names[carried[position]]}"
            return plain_call(node, self.names)
        name = self.aliases[op_of(node)]
        return f"{name}({arguments(node.args, node.kwargs, self.names)})"

    def _marks(self, node: fx.Node, context: tuple[Context, ...] | None = None) -> str:
        known = facts.get(node)
        marks = ""
        if context is not None and len(known.context) > len(context):
            under = ", ".join(_context(c) for c in known.context[len(context) :])
            marks += f" @ under({under})"
        if known.slot is not None:
            slot = known.slot
            parts = [constant(slot.lane)] if slot.lane else []
            parts += [f"stage={slot.stage}"] if slot.stage else []
            parts += [f"order={slot.order}"] if slot.order else []
            marks += f" @ lane({', '.join(parts)})"
        told = _facts(known)
        return marks + (f" @ facts({', '.join(told)})" if told else "")

    def _loop(self, node: fx.Node, indent: int, context: tuple[Context, ...]) -> None:
        view = LoopView(node)
        name, names = self.names[node], self.names
        if len(view.bounds) not in (0, 1, 3):
            raise unprintable(f"loop {name} has {len(view.bounds)} bounds")
        parts = [value(b, names) for b in view.bounds]
        for param, init in zip(view.carried, view.carried_init, strict=True):
            told = _facts(facts.get(param))
            mark = f" @ facts({', '.join(told)})" if told else ""
            parts.append(f"{names[param]}={value(init, names)}{mark}")
        targets = ", ".join(names[n] for n in (view.index, *view.carried))
        marks = self._loop_marks(view) + self._marks(node, context)
        self._line(indent, f"for {targets} in {name}({', '.join(parts)}){marks}:", node)
        start = len(self.lines)
        self._body(view.body, indent + 1, context)
        following = view.carried_next
        if following:
            text = bare(following if len(following) > 1 else following[0], names)
            self._line(indent + 1, f"yield {text}")
        elif len(self.lines) == start:
            self._line(indent + 1, "pass")

    def _loop_marks(self, view: LoopView) -> str:
        known = view.facts
        told = []
        if known.kind != {3: "range", 1: "iter", 0: "while"}[len(view.bounds)]:
            told.append(f"kind={constant(known.kind)}")
        if known.label != self.names[view.node]:
            told.append(f"label={constant(known.label)}")
        if known.index != self.names[view.index]:
            told.append(f"index={constant(known.index)}")
        if known.wrapper:
            told.append(f"wrapper={constant(known.wrapper)}")
        if known.threads:
            told.append(f"threads={known.threads}")
        if known.has_exit:
            told.append("has_exit=True")
        marks = f" @ loop({', '.join(told)})" if told else ""
        index = _facts(facts.get(view.index))
        return marks + (f" @ index({', '.join(index)})" if index else "")

    def _branch(self, unit: _Unit, indent: int, context: tuple[Context, ...]) -> None:
        view, node = unit.branch, unit.node
        pred = value(view.pred, self.names)
        self._line(indent, f"if {pred}{self._marks(node, context)}:", node)
        self._arm(unit, view.then, indent + 1, context)
        start = len(self.lines)
        self._line(indent, "else:")
        self._arm(unit, view.orelse, indent + 1, context)
        if [line.strip() for line in self.lines[start:]] == ["else:", "pass"]:
            del self.lines[start:]

    def _arm(
        self, unit: _Unit, arm: fx.GraphModule, indent: int, context: tuple[Context, ...]
    ) -> None:
        start = len(self.lines)
        self._body(arm, indent, context)
        outputs = _outputs(arm.graph)
        if unit.items is not None:
            results = outputs[0] if len(outputs) == 1 else outputs
            self._line(indent, self._target(unit) + bare(results, self.names))
        elif outputs or unit.node.users:
            # brackets even around one: it tells the tuple of results from a single result
            self._line(indent, f"{self.names[unit.node]} = {value(outputs, self.names)}")
        elif len(self.lines) == start:
            self._line(indent, "pass")


def _outputs(graph: fx.Graph) -> tuple[Any, ...]:
    outputs = output_node(graph).args[0]
    assert isinstance(outputs, tuple)
    return outputs


def _context(context: Context) -> str:
    """A context as a call; trailing pairs of a name and a value are keywords."""
    args = list(context.args)
    words: dict[str, Any] = {}
    while args and _is_word(args[-1]) and args[-1][0] not in words:
        name, found = args.pop()
        words = {name: found, **words}
    if context.region:
        words[REGION] = context.region
    return f"{context.kind}({arguments(args, words, {})})"


def _is_word(arg: Any) -> bool:
    return isinstance(arg, tuple) and len(arg) == 2 and type(arg[0]) is str and is_name(arg[0])


def _facts(known: facts.Facts) -> list[str]:
    told = []
    if known.alias:
        told.append(f"alias={value(list(known.alias), {})}")
    if known.borrowed:
        told.append("borrowed=True")
    if known.maybe_unbound:
        told.append("maybe_unbound=True")
    if known.note:
        told.append(f"note={constant(known.note)}")
    return told


def default_state(node: fx.Node) -> str:
    """The state that a node stands for when its text says nothing about it."""
    if is_call(node, STATE) and isinstance(node.args[0], fx.Node):
        root = facts.get(node.args[0]).state
        return f"{root}.{node.args[1]}" if root else ""
    return ""
