"""Source of a function -> loop-nested program, statement by statement.

What is seen at capture: the source, and the live objects that the arguments, globals and closures
are. What is not: types of computed values; those come from the first trip, which runs this program
in program order.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base.errors import SourceLocation, fail
from rose_compiler.frontend import components, liveness, refuse, rewrite_ast, source
from rose_compiler.frontend.blocks import BlockMaker
from rose_compiler.frontend.calls import CallLowering
from rose_compiler.frontend.modes import context_of
from rose_compiler.frontend.loops import LoopFrame, LoopLowering, maybe_unbound
from rose_compiler.frontend.scope import Missing, Scope, Session, Static, is_scalar
from rose_compiler.frontend.source import FunctionSource
from rose_compiler.ir import facts
from rose_compiler.ir.ops import BREAK_IF, CONTINUE_IF, UNBOUND, OpTable
from rose_compiler.ir.program import Builder, Program, is_call, op_of


STEP_RESULTS = 5  # observation, reward, terminated, truncated, infos


@dataclass
class Captured:
    """A captured function.

    ``folded`` holds the configuration that was taken for constant (path to value seen) and
    ``rebindable`` how to read each global or closure name again; guards compare both.
    ``values`` names the parameters that stay values, in order.
    """

    program: Program
    source: FunctionSource
    signature: inspect.Signature
    session: Session
    values: tuple[str, ...]
    argument_states: dict[str, str] = field(default_factory=dict)  # parameter -> state root


class Lowering(CallLowering, LoopLowering):
    """Lowers statements into a builder. One instance a captured function."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ops = OpTable()
        self.contexts: tuple[facts.Context, ...] = ()
        self.loops: list[LoopFrame] = []
        self.inline_chain: tuple[SourceLocation, ...] = ()
        self.inlining: list[Any] = []
        self.counter = 0
        self.root = Builder()
        self.blocks = BlockMaker(self)
        self._state_nodes: dict[str, fx.Node] = {}
        session.new_root = self._new_root

    # -- roots and states ----------------------------------------------------------------------

    def _new_root(self, name: str, value: Any) -> None:
        self._state_nodes[name] = self.root.placeholder(name, "state", state=name)

    def state_node(self, static: Static) -> fx.Node:
        """The node of a live object in the root graph."""
        found = self._state_nodes.get(static.full)
        if found is None:
            root = self._state_nodes[static.root]
            anchor = self.root.graph._root
            for node in self.root.graph.nodes:
                if node.op != "placeholder" and not facts.get(node).state:
                    anchor = node
                    break
            with self.root.graph.inserting_before(anchor):
                found = self.root.state(root, static.path)
            self._state_nodes[static.full] = found
        return found

    def temp(self, stem: str) -> str:
        """A name that no user can have."""
        self.counter += 1
        return f"_{stem}{self.counter}"

    # -- statements ----------------------------------------------------------------------------

    def statements(
        self, statements: Sequence[ast.stmt], scope: Scope, builder: Builder, live_out: set[str]
    ) -> None:
        """Lower a list of statements; ``live_out`` are the names read after it."""
        live = liveness.live_between(statements, live_out)
        for position, statement in enumerate(statements):
            if rewrite_ast.exits(statement):
                rest = list(statements[position + 1 :])
                self.exit(statement, rest, scope, builder, live_out)
                if isinstance(statement, (ast.Break, ast.Continue)):
                    return
                continue
            self.statement(statement, scope, builder, live[position])

    def statement(self, node: ast.stmt, scope: Scope, builder: Builder, live: set[str]) -> None:
        if isinstance(node, ast.If):
            self.lower_if(node, scope, builder, live)
        elif isinstance(node, (ast.For, ast.While)):
            self.lower_loop(node, scope, builder, live)
        elif isinstance(node, ast.With):
            self.lower_with(node, scope, builder, live)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)):
            self.simple(node, scope, builder, live)
        elif isinstance(node, (ast.Pass, ast.Break, ast.Continue)):
            pass
        else:
            self.blocks.emit([node], scope, builder, live)

    def simple(self, node: ast.stmt, scope: Scope, builder: Builder, live: set[str]) -> None:
        """An assignment or an expression: calls that matter become operations of their own."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        self.refuse_rebinding(node, scope)
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and self.bind_directly(node, scope):
            return
        if isinstance(node, ast.Assign) and self.bind_parallel(node, scope, builder):
            return
        value = node.value  # type: ignore[attr-defined]
        replaced, binding = self.hoist_calls(value, scope, builder)
        if isinstance(node, ast.Expr):
            if binding is None and not isinstance(replaced, ast.Name):
                made: ast.stmt = ast.copy_location(ast.Expr(replaced), node)
                self.blocks.emit([made], scope, builder, live)
            return
        if (
            isinstance(node, ast.Assign)
            and binding is not None
            and self.unpack(node.targets, binding, scope, builder)
        ):
            return
        if replaced is not value:
            node = copy.copy(node)
            node.value = replaced  # type: ignore[attr-defined]
        self.blocks.emit([node], scope, builder, live)

    def bind_parallel(self, node: ast.Assign, scope: Scope, builder: Builder) -> bool:
        """``a, b = f(x), g(y)``: an operation each, evaluated before any name is bound."""
        names = _names_of_tuple(node.targets[0]) if len(node.targets) == 1 else None
        if (
            names is None
            or not isinstance(node.value, ast.Tuple)
            or len(names) != len(node.value.elts)
        ):
            return False
        if any(isinstance(e, ast.Starred) for e in node.value.elts):
            return False
        made = [self.argument(e, scope, builder) for e in node.value.elts]
        for each, binding in zip(names, made, strict=True):
            scope.bindings[each] = binding
        return True

    def unpack(
        self, targets: Sequence[ast.expr], binding: Any, scope: Scope, builder: Builder
    ) -> bool:
        """Bind plain names to what an inlined call gave, without an operation."""
        if isinstance(binding, tuple):
            for target in targets:
                names = _names_of_tuple(target)
                if names is None or len(names) != len(binding):
                    return False
            for target in targets:
                for each, value in zip(_names_of_tuple(target) or (), binding, strict=True):
                    scope.bindings[each] = value
            return True
        if isinstance(binding, fx.Node) and is_call(binding) and op_of(binding).kind == "step":
            for target in targets:
                names = _names_of_tuple(target)
                if names is None or len(names) != STEP_RESULTS:
                    return False
            for target in targets:
                for position, each in enumerate(_names_of_tuple(target) or ()):
                    scope.bindings[each] = builder.item(binding, position, name=each)
            return True
        if all(isinstance(t, ast.Name) for t in targets):
            for target in targets:
                scope.bindings[target.id] = binding  # type: ignore[attr-defined]
            return True
        return False

    def bind_directly(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> bool:
        """Constants, other names and live objects are bound without an operation."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not all(isinstance(t, ast.Name) for t in targets):
            return False
        assert node.value is not None
        value = scope.fold(node.value)
        if isinstance(value, Missing):
            if isinstance(node.value, ast.Name):
                value = scope.lookup(node.value.id)
                if isinstance(value, Missing) or value is UNBOUND:
                    return False
            else:
                value = scope.static(node.value)
                once = all(scope.stores(t.id) == 1 for t in targets)  # type: ignore[attr-defined]
                if value is None or not once:
                    return False
            if isinstance(value, Static) and not value.root:
                return False
            if isinstance(value, Static) and any(scope.stores(t.id) != 1 for t in targets):  # type: ignore[attr-defined]
                return False
        for target in targets:
            scope.bindings[target.id] = value  # type: ignore[attr-defined]
        return True

    def refuse_rebinding(self, node: ast.stmt, scope: Scope) -> None:
        """Inside a loop a component keeps its name."""
        if not self.loops:
            return
        for target in ast.walk(node):
            if isinstance(target, (ast.Name, ast.Attribute)) and isinstance(target.ctx, ast.Store):
                known = scope.binding_object(target)
                if known is not None and components.is_component(known):
                    raise fail(
                        "capture-rebind-component",
                        f"`{ast.unparse(target)}` is rebound inside a loop",
                        where=scope.source.where(node),
                        found=type(known).__name__,
                    )

    # -- if, with, exits -----------------------------------------------------------------------

    def lower_if(self, node: ast.If, scope: Scope, builder: Builder, live: set[str]) -> None:
        known = scope.fold(node.test)
        if not isinstance(known, Missing):
            self.statements(node.body if known else node.orelse, scope, builder, live)
            return
        if not self.structural([node], scope):
            self.blocks.emit([node], scope, builder, live)
            return
        test, _ = self.hoist_calls(node.test, scope, builder)
        pred_name = self.temp("pred")
        self.blocks.emit([rewrite_ast.assign(pred_name, test, node)], scope, builder, {pred_name})
        pred = scope.bindings[pred_name]
        before = dict(scope.bindings)
        arms: list[tuple[Builder, dict[str, Any]]] = []
        for body in (node.body, node.orelse):
            arm = Builder(builder)
            scope.bindings = dict(before)
            self.statements(body, scope, arm, live)
            arms.append((arm, dict(scope.bindings)))
        changed = [
            n
            for n in dict.fromkeys([*arms[0][1], *arms[1][1]])
            if n in live and arms[0][1].get(n, UNBOUND) is not arms[1][1].get(n, UNBOUND)
        ]
        outputs = [
            tuple(self.as_value(after.get(n, UNBOUND), scope, arm) for n in changed)
            for arm, after in arms
        ]
        made = builder.branch(
            pred, arms[0][0], outputs[0], arms[1][0], outputs[1], **self.known(node, scope)
        )
        scope.bindings = before
        for position, each in enumerate(changed):
            result = builder.item(made, position, name=each)
            if any(maybe_unbound(o[position]) for o in outputs):
                facts.put(result, maybe_unbound=True)
            scope.bindings[each] = result

    def lower_with(self, node: ast.With, scope: Scope, builder: Builder, live: set[str]) -> None:
        contexts: list[facts.Context] = []
        for item in node.items:
            context = self.known_context(item.context_expr, scope)
            if context is None or item.optional_vars is not None:
                self.blocks.emit([node], scope, builder, live)
                return
            contexts.append(context)
        outer = self.contexts
        self.contexts = (*outer, *(c for c in contexts if c.kind != "phase"))
        try:
            self.statements(node.body, scope, builder, live)
        finally:
            self.contexts = outer

    def known_context(self, expression: ast.expr, scope: Scope) -> facts.Context | None:
        """A thread-local mode with static arguments, or ``None`` for any other context manager."""
        if not isinstance(expression, ast.Call):
            return None
        target = scope.static(expression.func)
        if target is None:
            return None
        args = [scope.fold(a) for a in expression.args]
        keywords = [(k.arg, scope.fold(k.value)) for k in expression.keywords]
        if any(isinstance(a, Missing) for a in args) or any(
            isinstance(v, Missing) or k is None for k, v in keywords
        ):
            return None
        return context_of(target.value, tuple(args), tuple(keywords))

    def exit(
        self,
        node: ast.stmt,
        rest: list[ast.stmt],
        scope: Scope,
        builder: Builder,
        live_out: set[str],
    ) -> None:
        """A statement that may leave the loop: flags, then the exit itself."""
        frame = self.loops[-1]
        if isinstance(node, (ast.Break, ast.Continue)):
            self.emit_exit(
                BREAK_IF if isinstance(node, ast.Break) else CONTINUE_IF, True, node, scope, builder
            )
            return
        if isinstance(node, ast.If):
            known = scope.fold(node.test)
            if not isinstance(known, Missing):
                self.statements(node.body if known else node.orelse, scope, builder, live_out)
                return
        broke, continued = self.temp("broke"), self.temp("continued")
        flagged = rewrite_ast.flag_exits([node], broke, continued)
        if flagged is None:
            raise fail(
                "capture-unsupported",
                "`break` or `continue` out of a construct that can't be split",
                where=scope.source.where(node),
            )
        live = liveness.live_in(rest, live_out) | set(frame.carried) | {broke, continued}
        uses = liveness.assigned(flagged)
        for flag in (broke, continued):
            scope.locals.add(flag)
            scope.bindings[flag] = False
        for position, statement in enumerate(flagged):
            after = liveness.live_in(flagged[position + 1 :], live)
            self.statement(statement, scope, builder, after)
        for flag, op in ((broke, BREAK_IF), (continued, CONTINUE_IF)):
            if flag in uses:
                self.emit_exit(op, scope.bindings[flag], node, scope, builder)
            scope.bindings.pop(flag)

    def emit_exit(self, op: Any, pred: Any, node: ast.AST, scope: Scope, builder: Builder) -> None:
        frame = self.loops[-1]
        if frame.builder is not builder:
            raise fail(
                "capture-unsupported",
                "`break` or `continue` inside a branch around a component call",
                where=scope.source.where(node),
                help="set a flag in the branch and break on it after the branch",
            )
        carried = tuple(
            self.as_value(scope.bindings.get(n, UNBOUND), scope, builder) for n in frame.carried
        )
        builder.call(op, pred, carried, **self.known(node, scope))

    # -- shared helpers ------------------------------------------------------------------------

    def known(self, node: ast.AST, scope: Scope) -> dict[str, Any]:
        """The facts of an operation made from a node: origin and context."""
        where = scope.source.where(node)
        return {
            "origin": facts.Origin(where, self.inline_chain),
            "context": self.contexts,
        }

    def return_value(self, binding: Any, scope: Scope) -> Any:
        """The output of the root graph: one value, or a tuple of values kept apart."""
        if isinstance(binding, tuple):
            return tuple(self.return_value(b, scope) for b in binding)
        return self.as_value(binding, scope, self.root)

    def as_value(self, binding: Any, scope: Scope, builder: Builder) -> Any:
        """A binding as an argument of a node in ``builder``."""
        if isinstance(binding, Static):
            if not binding.root:
                raise fail(
                    "capture-unsupported",
                    "a function or module is used as a value",
                    where=scope.source.where(scope.source.node),
                )
            return builder.use(self.state_node(binding))
        if isinstance(binding, tuple) and any(
            isinstance(b, (fx.Node, Static, tuple)) for b in binding
        ):
            return self.blocks.pack(binding, scope, builder)
        if isinstance(binding, fx.Node):
            return builder.use(binding)
        return binding


def _names_of_tuple(target: ast.expr) -> list[str] | None:
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    names = [e.id for e in target.elts if isinstance(e, ast.Name)]
    return names if len(names) == len(target.elts) else None


def capture(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Capture one function for one set of arguments.

    Args:
        fn: a function, bound method or closure.
        args, kwargs: the arguments of the call at hand; their live objects become states.

    Raises:
        CaptureError: for a construct that can't be compiled soundly, with the way out.
        TypeError: when the arguments do not fit the function.
    """
    function = source.read(fn)
    signature = inspect.signature(function.fn)
    session = Session()
    lowering = Lowering(session)
    scope = Scope(function, session)
    given = (function.bound, *args) if function.bound is not None else args
    bound = signature.bind(*given, **kwargs)
    bound.apply_defaults()
    stored = set(liveness.assigned(function.node.body))
    scope.locals = stored | set(bound.arguments)
    values: list[str] = []
    argument_states: dict[str, str] = {}
    for name, value in bound.arguments.items():
        if _is_value(value, name in stored):
            values.append(name)
            scope.bindings[name] = lowering.root.placeholder(name, "value")
    for name, value in bound.arguments.items():
        if name in values:
            continue
        if is_scalar(value):
            session.folded[f"<argument>.{name}"] = value
            scope.bindings[name] = value
            continue
        root = session.root(name, value)
        argument_states[name] = root
        scope.bindings[name] = Static(value, root)
    refuse.check(function, scope.resolve, scope.resolves_to_component)
    session.written_attributes |= written_attributes(function, scope)
    body = rewrite_ast.single_exit(function.node.body)
    if body is None:
        raise fail(
            "capture-unsupported",
            "`return` inside `try` or `with`",
            where=function.where(function.node),
            help="assign the result and return it at the end of the function",
        )
    scope.locals.add(rewrite_ast.RETURN_NAME)
    lowering.inlining.append(function.fn.__code__)
    for decorator in reversed(function.decorators):
        context = decorator_context(decorator, scope)
        if context is not None:
            lowering.contexts = (*lowering.contexts, context)
    lowering.statements(body, scope, lowering.root, {rewrite_ast.RETURN_NAME})
    result = scope.bindings.get(rewrite_ast.RETURN_NAME)
    root = lowering.root.finish(lowering.return_value(result, scope))
    program = Program(
        function.node.name,
        root,
        lowering.ops,
        tuple(values),
        tuple(session.roots),
        objects=dict(session.roots),
    )
    return Captured(program, function, signature, session, tuple(values), argument_states)


def decorator_context(text: str, scope: Scope) -> facts.Context | None:
    """The mode that a decorator like ``@torch.no_grad()`` puts around the function."""
    tree = ast.parse(text, mode="eval").body
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    target = scope.static(call.func)
    if target is None or call.args or call.keywords:
        return None
    return context_of(target.value, (), ())


def _is_value(value: Any, rebound: bool) -> bool:
    if type(value) in (int, float, complex):
        return True
    return rebound and isinstance(value, (torch.Tensor, np.ndarray, int, float, tuple, type(None)))


def written_attributes(
    function: FunctionSource, scope: Scope, seen: set[Any] | None = None
) -> set[str]:
    """Attribute names that the function, or one it may enter, assigns: no path through them is constant."""
    seen = set() if seen is None else seen
    if function.fn.__code__ in seen:
        return set()
    seen.add(function.fn.__code__)
    found: set[str] = set()
    for part in ast.walk(function.node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, (ast.Store, ast.Del)):
            found.add(part.attr)
        if isinstance(part, ast.Call):
            target = scope.static(part.func)
            if target is None or not source.is_user_code(components.plain(target.value) or print):
                continue
            try:
                inner = source.read(target.value)
            except Exception:  # what can't be read is never entered
                continue
            inner_scope = Scope(inner, scope.session)
            parameters = list(inspect.signature(inner.fn).parameters)
            inner_scope.locals = set(parameters) | set(liveness.assigned(inner.node.body))
            if inner.bound is not None and parameters:
                owner = (
                    scope.static(part.func.value) if isinstance(part.func, ast.Attribute) else None
                )
                if owner is not None:
                    inner_scope.bindings[parameters[0]] = owner
            found |= written_attributes(inner, inner_scope, seen)
    return found
