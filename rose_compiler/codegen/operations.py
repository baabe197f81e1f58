"""Emits operations, waits, branches and exits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch.fx as fx

from rose_compiler.codegen import builtins
from rose_compiler.codegen.aside import Given, inputs_of, looked_up
from rose_compiler.codegen.callees import (
    always_read,
    form,
    infos_unread,
    is_compiled,
    plain_step,
    source_of,
)
from rose_compiler.codegen.emitter import Emitter
from rose_compiler.codegen.expressions import quoted
from rose_compiler.codegen.merge import Merged, place_of
from rose_compiler.codegen.module import is_block
from rose_compiler.codegen.schedule import Action, Body, aside, is_pick
from rose_compiler.codegen.scopes import Scope, Spread
from rose_compiler.ir import facts
from rose_compiler.ir.ops import BRANCH, BREAK_IF, DROPPED, LOOP, UNBOUND, Op
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    is_call,
    is_exit,
    is_item,
    op_of,
    output_node,
    placeholders,
)
from rose_compiler.ir.unread import Dropped


class Operations(Emitter):
    """Operations, waits, branches and exits."""

    def action(self, action: Action, body: Body, scope: Scope) -> None:
        node = action.node
        if action.what == "copy":
            assert isinstance(scope, Spread)
            copy = scope.carried[node].copy
            self.writer.line(f"{copy} = {scope.ref(node, action)}")
            for other in scope.made(node):
                self.writer.line(f"{other} = {copy}")
        elif aside(action) and action.what == "submit":
            self.begun_aside(action, body, scope)
        elif aside(action) and action.what == "await":
            self.ended_aside(action, scope)
        elif is_call(node, BRANCH) and action.what == "submit":
            self.branch_begun(action, scope)
        elif is_call(node, BRANCH) and action.what == "await":
            self.branch_ended(action, scope)
        elif action.what == "await":
            self.assign(node, f"{self.task(node)}.wait()", scope)
        elif is_call(node, LOOP):
            self.loop(action, scope)
        elif is_call(node, BRANCH):
            self.branch(action, scope)
        elif is_exit(node):
            self.exit(action, scope)
        elif action.what == "submit":
            self.submit(action, body, scope)
        else:
            self.call(action, scope)

    def merged(self, unit: Merged, scope: Scope) -> None:
        """Write a call of what was merged."""
        where, span = place_of(unit)
        first = unit.actions[0]
        line = where.line if where is not None else 0
        function = self.module.bind(unit.function, f"{self.plan.program.name}_line{line}")
        arguments = ", ".join(self.ref(n, scope, first) for n in unit.inputs)
        text = f"{function}({arguments})"
        if unit.outputs:
            text = f"{', '.join(self.name(n) for n in unit.outputs)} = {text}"
        self.writer.line(text, where, span)

    @abstractmethod
    def loop(self, action: Action, scope: Scope) -> None:
        """Write a loop."""

    @abstractmethod
    def loop_text(self, action: Action, scope: Scope) -> None:
        """Write a loop, without what its results are wanted for in the body around it."""

    # -- loops and branches on lanes

    def begun_aside(self, action: Action, body: Body, scope: Scope) -> None:
        """Write a loop or branch as a function, and hand it to its lane."""
        node = action.node
        where = facts.get(node).origin.where
        given: dict[fx.Node, str] = {}
        handed: dict[str, str] = {}
        for used in inputs_of(node):
            if used not in given:
                given[used] = self.names.fresh(used.name)
                handed[given[used]] = self.ref(used, scope, action)
        handed = {"rt": "rt", **{n: n for n in looked_up(self, node)}, **handed}
        function = self.names.fresh(f"{node.name}_aside")
        inner = Given(self.variables, given)
        with self.writer.block(f"def {function}({', '.join(handed)}):", where), self.quiet():
            if is_call(node, LOOP):
                self.loop_text(action, inner)
                results = [self.variables[p] for p in LoopView(node).carried]
            else:
                results = [r or "None" for r in self.branch_text(action, inner)]
            self.writer.line(f"return ({', '.join(results)}{',' if len(results) == 1 else ''})")
        lane, site = self.lane(action.lane), self.site(action, body)
        arguments = ", ".join(handed.values())
        self.writer.line(
            f"{self.task(node)} = {lane}.submit({site}, {function}, {arguments})", where
        )

    def ended_aside(self, action: Action, scope: Scope) -> None:
        """Write the wait for a loop or branch on a lane, and what its results are called."""
        node = action.node
        # in a body spread over trips this may stand in front of what hands it over
        count = len(LoopView(node).carried) if is_call(node, LOOP) else None
        found = self.results(node) if count is None else self.named(node, count)
        results = [r or "_" for r in found]
        text = f"{self.task(node)}.wait()"
        if node.users and results:
            text = f"{', '.join(results)}{',' if len(results) == 1 else ''} = {text}"
        self.writer.line(text, facts.get(node).origin.where)
        self.picked(node, scope)

    def call(self, action: Action, scope: Scope) -> None:
        node = action.node
        refs = self.refs(node, scope, action)
        printer = self.module.printer
        if not is_call(node):
            self.check(node, node.args, refs)
            self.assign(node, printer.plain(node, refs), scope)
            return
        op = op_of(node)
        text = builtins.text(op, node, refs, printer)
        if text is None:
            function = self.function(op, node, refs)
            arguments = printer.arguments(node.args, node.kwargs, refs)
            text = f"{function}({arguments})"
            if op.kind == "loss":
                given = len(node.args) - op.attributes.get(DROPPED, 0)
                arguments = printer.arguments(node.args[:given], node.kwargs, refs)
                if given < len(node.args):
                    others = printer.arguments(node.args[given:], {}, refs)
                    arguments += f", dropped={printer.bind(Dropped, 'Dropped')}({others})"
                if recorded := op.attributes.get("recorded", ()):
                    arguments += f", recorded={recorded}"
                arguments += form(op)
                text = f"rt.gradients({function}{', ' if arguments else ''}{arguments})"
                text = self.sized(op, node, refs, text)
            elif is_compiled(op):
                arguments += form(op)
                text = f"rt.graph({function}{', ' if arguments else ''}{arguments})"
                text = self.sized(op, node, refs, text)
        else:
            self.check(node, always_read(op, node), refs)
        self.assign(node, text, scope)

    def sized(self, op: Op, node: fx.Node, refs: dict[fx.Node, str], text: str) -> str:
        """The call, or what is right for sizes that the operation was not proven for: Inductor
        compiles for any that it meets."""
        printer, sizes = self.module.printer, self.module.sizes(op)
        pairs = zip(op.signature.params, node.args, strict=False)
        given = {p: printer.value(a, refs) for p, a in pairs}
        others = sizes.text(given, printer.bind) if sizes else ""
        if not others or sizes is None:
            return text
        instead = printer.bind(sizes.instead, f"{op.name}_as_written")
        return f"{instead}({printer.arguments(node.args, {}, refs)}) if {others} else {text}"

    def submit(self, action: Action, body: Body, scope: Scope) -> None:
        node, op = action.node, op_of(action.node)
        refs = self.refs(node, scope, action)
        lane, site = self.lane(action.lane), self.site(action, body)
        where = facts.get(node).origin.where
        printer = self.module.printer
        step = plain_step(op, node) if action.lane.startswith("shard:") else None
        if step is not None:
            env, value = (printer.value(v, refs) for v in step)
            self.check(node, node.args, refs)
            packed = ", packed=True" if infos_unread(node) else ""
            text = f"{lane}.step({site}, {env}, {value}{packed})"
        else:
            arguments = printer.arguments(node.args, {}, refs)
            function = self.function(op, node, refs)
            if is_compiled(op) and action.lane.startswith("stream:"):
                function = self.on_stream(op, function)  # the coordinator runs it, as it would here
            text = f"{lane}.submit({site}, {function}{', ' if arguments else ''}{arguments})"
        self.writer.line(f"{self.task(node)} = {text}", where, source_of(op))

    def on_stream(self, op: Op, function: str) -> str:
        """What runs a compiled graph on a lane, where the arguments are there: as :meth:`sized`
        has it, since what is right for other sizes must not be compiled."""
        printer, sizes = self.module.printer, self.module.sizes(op)
        script = ", script=True" if op.attributes.get("script") else ""
        if sizes is None and not script:
            return f"rt.graph, {function}"
        sized = ""
        if sizes is not None:
            chosen = partial(sizes.or_instead, params=op.signature.params)
            sized = f", sized={printer.bind(chosen, f'{op.name}_sized')}"
        return f"rt.graph_of({function}{script}{sized})"

    def function(self, op: Op, node: fx.Node, refs: dict[fx.Node, str]) -> str:
        """The name of an operation's function; what may be unbound among its arguments is checked
        in front of it, or by the user's own statements."""
        if not is_block(op):
            self.check(node, always_read(op, node), refs)
            return self.module.function(op)
        unset = {
            name
            for name, arg in zip(op.attributes["inputs"], node.args, strict=False)
            if isinstance(arg, type(UNBOUND)) or (isinstance(arg, fx.Node) and arg in self.unset)
        }
        return self.module.function(op, frozenset(unset))

    def check(self, node: fx.Node, items: Any, refs: dict[fx.Node, str]) -> None:
        """Raise where a value that is about to be used was never assigned."""
        used: list[fx.Node] = []
        fx.node.map_arg(items, used.append)
        for each in dict.fromkeys(used):
            if each in self.unset:
                with self.writer.block(f"if {refs[each]} is UNBOUND:"):
                    self.writer.line(
                        f"rt.unbound({quoted(each.name)})", facts.get(node).origin.where
                    )

    def assign(self, node: fx.Node, text: str, scope: Scope) -> None:
        """Write a statement that gives a node its value, and its parts to those who pick them."""
        where = facts.get(node).origin.where
        source = source_of(op_of(node)) if is_call(node) else ""
        picks = [u for u in node.users if is_pick(u)]
        results = op_of(node).signature.results if is_call(node) else 1
        if not node.users:
            self.writer.line(text, where, source)
        elif results > 1 and len(picks) == len(node.users):
            first = {p.args[1]: p for p in reversed(picks)}
            targets = [self.name(first[k]) if k in first else "_" for k in range(results)]
            self.writer.line(f"{', '.join(targets)} = {text}", where, source)
            self._parts(picks, first, node, scope)
        else:
            self.writer.line(f"{self.name(node)} = {text}", where, source)
            self._parts(picks, {}, node, scope)
        for other in scope.made(node):
            self.writer.line(f"{other} = {self.name(node)}")

    def _parts(
        self, picks: list[fx.Node], unpacked: dict[Any, fx.Node], node: fx.Node, scope: Scope
    ) -> None:
        for pick in picks:
            if unpacked.get(pick.args[1]) is not pick:
                other = unpacked.get(pick.args[1])
                text = self.name(other) if other else f"{self.name(node)}[{pick.args[1]}]"
                self.writer.line(f"{self.name(pick)} = {text}")
            for further in scope.made(pick):
                self.writer.line(f"{further} = {self.name(pick)}")
            self._parts([u for u in pick.users if is_pick(u)], {}, pick, scope)

    # -- branches and exits

    def branch(self, action: Action, scope: Scope) -> None:
        self.branch_text(action, scope)
        self.picked(action.node, scope)

    def branch_text(self, action: Action, scope: Scope) -> list[str]:
        """Write a branch; the variables of its results, empty where nobody wants one."""
        node, view = action.node, BranchView(action.node)
        refs = self.refs(node, scope, action)
        self.check(node, view.pred, refs)
        results = self.results(node)
        for word, arm in (("if", view.then), ("else", view.orelse)):
            inner = self.plan.bodies[arm.graph]
            if word == "else" and not inner.actions and not any(results):
                break
            for param, outer in zip(placeholders(arm.graph), view.captured, strict=True):
                self.variables[param] = self.ref(outer, scope, action)
            head = f"if {self.module.printer.value(view.pred, refs)}:" if word == "if" else "else:"
            with self.writer.block(head, facts.get(node).origin.where if word == "if" else None):
                inside = self.scope_of(inner)
                self.actions(inner, inside)
                values = tuple(output_node(arm.graph).args[0])  # type: ignore[arg-type]
                self.assign_all(
                    (name, self.value(v, inside, None))
                    for name, v in zip(results, values, strict=True)
                    if name
                )
        return results

    def picked(self, node: fx.Node, scope: Scope) -> None:
        """Write who takes over the results of a loop or branch."""
        for pick in (u for u in node.users if is_item(u)):
            for further in scope.made(pick):
                self.writer.line(f"{further} = {self.name(pick)}")
            self._parts([u for u in pick.users if is_pick(u)], {}, pick, scope)

    def branch_begun(self, action: Action, scope: Scope) -> None:
        """Write the arms of a branch up to their first wait."""
        node, view = action.node, BranchView(action.node)
        refs = self.refs(node, scope, action)
        self.check(node, view.pred, refs)
        taken = self.task(node)
        where = facts.get(node).origin.where
        self.writer.line(f"{taken} = bool({self.module.printer.value(view.pred, refs)})", where)
        for test, arm in ((taken, view.then), (f"not {taken}", view.orelse)):
            for param, outer in zip(placeholders(arm.graph), view.captured, strict=True):
                self.variables[param] = self.ref(outer, scope, action)
            inner = self.plan.bodies[arm.graph]
            if inner.head:
                with self.writer.block(f"if {test}:"):
                    self.actions(replace(inner, actions=inner.head), self.scope_of(inner))

    def branch_ended(self, action: Action, scope: Scope) -> None:
        """Write what its arms do once their calls are answered, and its results."""
        node, view = action.node, BranchView(action.node)
        results = self.results(node)
        for word, arm in ((f"if {self.task(node)}:", view.then), ("else:", view.orelse)):
            inner = self.plan.bodies[arm.graph]
            rest = inner.actions[len(inner.head) :]
            if word == "else:" and not rest and not any(results):
                break
            with self.writer.block(word):
                inside = self.scope_of(inner)
                self.actions(replace(inner, actions=rest), inside)
                values = tuple(output_node(arm.graph).args[0])  # type: ignore[arg-type]
                self.assign_all(
                    (name, self.value(v, inside, None))
                    for name, v in zip(results, values, strict=True)
                    if name
                )
        self.picked(node, scope)

    def results(self, node: fx.Node) -> list[str]:
        """The variables that the arms of a branch assign, empty for results that nobody uses."""
        then = BranchView(node).then.graph
        count = len(tuple(output_node(then).args[0]))  # type: ignore[arg-type]
        return self.named(node, count)

    def named(self, node: fx.Node, count: int) -> list[str]:
        """The variables of so many results that a loop or branch hands on."""
        results = [""] * count
        whole = [u for u in node.users if not is_pick(u)]
        for pick in (u for u in node.users if is_pick(u)):
            k = pick.args[1]
            assert isinstance(k, int)
            if results[k]:
                self.variables[pick] = results[k]
            results[k] = self.name(pick)
        if whole:
            results = [r or self.names.fresh(f"{node.name}_{k}") for k, r in enumerate(results)]
            self.variables[node] = f"({', '.join(results)}{',' if count == 1 else ''})"
        return results

    def assign_all(self, pairs: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> None:
        """Assign at the same time; what has its value already is left out."""
        left = [(name, text) for name, text in pairs if name != text]
        if left:
            names, texts = zip(*left, strict=True)
            self.writer.line(f"{', '.join(names)} = {', '.join(texts)}")

    def exit(self, action: Action, scope: Scope) -> None:
        node = action.node
        pred, carried = node.args[0], tuple(node.args[1])  # type: ignore[arg-type]
        refs = self.refs(node, scope, action)
        self.check(node, pred, refs)
        word = "break" if is_call(node, BREAK_IF) else "continue"
        with self.writer.block(
            f"if {self.module.printer.value(pred, refs)}:", facts.get(node).origin.where
        ):
            self.assign_all(
                (name, self.module.printer.value(v, refs))
                for name, v in zip(self.handed_out(), carried, strict=True)
            )
            self.writer.line(word)

    @abstractmethod
    def handed_out(self) -> list[str]:
        """The carried variables of the innermost loop."""
