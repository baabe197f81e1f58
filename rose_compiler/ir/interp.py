"""The reference executor: runs a program node by node, in program order, one at a time.

It is slow and obvious on purpose. What it does is what a program means; every schedule must leave
the same values and states behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx as fx

from rose_compiler.base.apart import Apart
from rose_compiler.base.drawn import after
from rose_compiler.ir import facts
from rose_compiler.ir.casts import indifferent
from rose_compiler.ir.contexts import Held, entered
from rose_compiler.ir.ops import (
    BRANCH,
    BREAK_IF,
    CONTINUE_IF,
    DRAW,
    JOIN_ROWS,
    LOOP,
    RANDN,
    SHARD,
    STATE,
    UNBOUND,
    Op,
)
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Program,
    is_call,
    op_of,
    output_node,
    placeholders,
)
from rose_compiler.ir.sizes import Sizes, all_as, joined_as, may_be_others, sizes_of, takes_parts

Environment = dict[fx.Node, Any]


class Hooks:
    """Called around the nodes of a run; a base to override. None of them may change a value."""

    def before(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        """In front of an operation, inside its contexts."""

    def after(self, node: fx.Node, args: tuple[Any, ...], result: Any) -> None:
        """Behind an operation that returned, inside its contexts."""

    def value(self, node: fx.Node, value: Any) -> None:
        """A node has its value: placeholders (on every trip), picks, loops and branches too."""

    def trip(self, loop: fx.Node, number: int) -> None:
        """A loop begins its trip ``number``, counted from 0."""

    def error(self, node: fx.Node, error: BaseException) -> None:
        """A node raised; called once, with the innermost one. The exception goes on unchanged."""


def run(
    program: Program,
    args: Mapping[str, Any] | Sequence[Any] = (),
    objects: Mapping[str, Any] | None = None,
    *,
    hooks: Hooks | None = None,
) -> Any:
    """Run a program and return what it returns.

    ``args`` are the values, by name or in order; ``objects`` are the objects of the state roots, by
    default those that the program holds.

    Raises:
        TypeError: when values or objects are missing or too many.
        UnboundLocalError: when an operation uses a variable that nothing has assigned.
        Exception: whatever an operation raises, unchanged.
    """
    values = _values(program, args)
    live = program.objects if objects is None else objects
    missing = [name for name in program.state_params if name not in live]
    if missing:
        raise TypeError(f"{program.name} needs objects for: {', '.join(missing)}")
    states = [live[name] for name in program.state_params]
    return Interpreter(hooks or Hooks()).root(program, [*values, *states])


def _values(program: Program, args: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    names = program.value_params
    if isinstance(args, Mapping):
        if set(args) != set(names):
            raise TypeError(f"{program.name} takes {list(names)}, got {sorted(args)}")
        return [args[name] for name in names]
    if len(args) != len(names):
        raise TypeError(f"{program.name} takes {len(names)} values, got {len(args)}")
    return list(args)


@dataclass(frozen=True)
class Outcome:
    """How a body ended (at its end, or at an exit of the loop around it) and what it hands on."""

    how: Literal["end", "break", "continue"]
    values: Any


class Interpreter:
    """Executes graphs; one instance a run."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.held = Held()
        self._told: BaseException | None = None
        self._last_uses: dict[fx.Graph, dict[fx.Node, list[fx.Node]]] = {}

    def root(self, program: Program, inputs: Sequence[Any]) -> Any:
        """Run the root graph on its values and states."""
        try:
            outcome = self.graph(program.graph, inputs)
        finally:
            self.held.leave()
        assert outcome.how == "end", "an exit outside a loop"
        if isinstance(outcome.values, tuple):
            return outcome.values  # what may be unbound in a tuple was read in front of it
        return self._bound(output_node(program.graph), outcome.values)

    def graph(self, graph: fx.Graph, inputs: Iterable[Any]) -> Outcome:
        """Run one body on the values of its placeholders."""
        env: Environment = {}
        for node, value in zip(placeholders(graph), inputs, strict=True):
            env[node] = value
            self.hooks.value(node, value)
        dead = self._dead_after(graph)
        for node in graph.nodes:
            if node.op == "output":
                return Outcome("end", self._read(env, node.args[0]))
            if node.op in ("placeholder", "get_attr"):
                continue
            try:
                outcome = self._node(node, env)
            except BaseException as error:
                if self._told is not error:
                    self._told = error
                    self.hooks.error(node, error)
                raise
            if outcome is not None:
                return outcome
            # values go as early as they would in a loop that rebinds its variables
            for gone in dead.get(node, ()):
                env.pop(gone, None)
        raise AssertionError("a graph without output")

    def _node(self, node: fx.Node, env: Environment) -> Outcome | None:
        """Execute one node; an outcome when it leaves the body."""
        if is_call(node, BREAK_IF) or is_call(node, CONTINUE_IF):
            pred, carried = node.args[0], node.args[1]
            if self._truth(node, self._read(env, pred)):
                how: Literal["break", "continue"] = (
                    "break" if is_call(node, BREAK_IF) else "continue"
                )
                return Outcome(how, self._read(env, carried))
            env[node] = None
            return None
        if is_call(node, LOOP):
            env[node] = self._loop(node, env)
        elif is_call(node, BRANCH):
            outcome = self._branch(node, env)
            if outcome.how != "end":
                return outcome
            env[node] = tuple(outcome.values)
        else:
            env[node] = self._call(node, env)
        self.hooks.value(node, env[node])
        return None

    def _call(self, node: fx.Node, env: Environment) -> Any:
        args = self._read(env, node.args)
        kwargs = self._bound(node, self._read(env, node.kwargs))
        self._bound(node, _checked(node, args))
        if not indifferent(node):
            self.held.at(facts.get(node).context)
        with entered(facts.get(node).context):
            if not isinstance(node.target, Op):
                return call_plain(node, args, kwargs)
            self.hooks.before(node, args)
            if node.target is STATE:
                result = resolve(args[0], args[1])
            elif node.target is SHARD:
                result = args[0].shards()[args[1]]
            elif node.target is JOIN_ROWS and (known := joined_as(node)):
                result = node.target(*args, all_as(known))
            elif node.target in (RANDN, DRAW) and may_be_others(node):
                result = after(torch.get_rng_state(), node.target(*args))
            elif (sizes := sizes_of(node.target)) is not None and self._differ(node, sizes, args):
                result = sizes.instead(*args)
            else:
                result = node.target(*args, **kwargs)
            self.hooks.after(node, args, result)
        return result

    def _differ(self, node: fx.Node, sizes: Sizes, args: tuple[Any, ...]) -> bool:
        """Whether a traced operation was not proven for the sizes that it is handed."""
        whole = not any(type(a) is Apart for a in args) and not takes_parts(node)
        return whole and sizes.differ(op_of(node).signature.params, args)

    def _loop(self, node: fx.Node, env: Environment) -> tuple[Any, ...]:
        view = LoopView(node)
        bounds = self._bound(node, self._read(env, view.bounds))
        carried = self._read(env, view.carried_init)
        captured = self._read(env, view.captured)
        context = facts.get(node).context
        self.held.at(context)
        with entered(context):
            items = iter(items_of(bounds))
        number = 0
        while True:
            self.held.at(context)  # a region inside of the loop ends with its trip
            try:
                with entered(context):
                    index = next(items)
            except StopIteration:
                break
            self.hooks.trip(node, number)
            outcome = self.trip(node, number, (index, *carried, *captured))
            carried = outcome.values
            number += 1
            if outcome.how == "break":
                break
        return tuple(carried)

    def trip(self, loop: fx.Node, number: int, inputs: tuple[Any, ...]) -> Outcome:
        """Run one trip of a loop on its index, carried and captured values.

        To be overridden by what runs the trips of one loop in another way.
        """
        return self.graph(LoopView(loop).graph, inputs)

    def _branch(self, node: fx.Node, env: Environment) -> Outcome:
        view = BranchView(node)
        self.held.at(facts.get(node).context)
        with entered(facts.get(node).context):
            taken = self._truth(node, self._read(env, view.pred))
        arm = view.then if taken else view.orelse
        return self.graph(arm.graph, self._read(env, view.captured))

    def _truth(self, node: fx.Node, value: Any) -> bool:
        return bool(self._bound(node, value))

    def _read(self, env: Environment, arg: Any) -> Any:
        """An argument with its nodes replaced by their values."""
        if isinstance(arg, fx.Node):
            return env[arg]
        if isinstance(arg, tuple):
            return tuple(self._read(env, a) for a in arg)
        if isinstance(arg, list):
            return [self._read(env, a) for a in arg]
        if isinstance(arg, dict):
            return {k: self._read(env, v) for k, v in arg.items()}
        if isinstance(arg, slice):
            return slice(*(self._read(env, a) for a in (arg.start, arg.stop, arg.step)))
        return arg

    def _bound(self, node: fx.Node, values: Any) -> Any:
        """The values, none of them a variable that was never assigned.

        Raises:
            UnboundLocalError: as Python does, naming the variable.
        """
        found = values.values() if isinstance(values, dict) else values
        if values is UNBOUND or (
            isinstance(found, Iterable)
            and isinstance(values, tuple | list | dict)
            and any(v is UNBOUND for v in found)
        ):
            name = _unbound_name(node, values)
            raise UnboundLocalError(
                f"cannot access local variable {name!r} where it is not associated with a value"
            )
        return values

    def _dead_after(self, graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
        """For each node, the nodes that nothing behind it uses."""
        if graph not in self._last_uses:
            dead: dict[fx.Node, list[fx.Node]] = {}
            seen: set[fx.Node] = set()
            for node in reversed(graph.nodes):
                for used in (*node.all_input_nodes, node):
                    if used not in seen:
                        seen.add(used)
                        dead.setdefault(node, []).append(used)
            self._last_uses[graph] = dead
        return self._last_uses[graph]


def run_node(node: fx.Node, values: Mapping[fx.Node, Any], hooks: Hooks) -> tuple[Any, ...]:
    """Run one loop or branch, given what its arguments stand for; its results.

    Raises:
        ValueError: for a branch that leaves the loop around it.
    """
    env = dict(values)
    interpreter = Interpreter(hooks)
    try:
        outcome = interpreter._node(node, env)
    finally:
        interpreter.held.leave()
    if outcome is not None:
        raise ValueError(f"{node} leaves the loop around it")
    return tuple(env[node])


def _checked(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments that must be bound; a block may read others on some of its ways only."""
    maybe = node.target.attributes.get("maybe_unbound", ()) if isinstance(node.target, Op) else ()
    if not maybe:
        return args
    params = node.target.signature.params  # type: ignore[union-attr]
    return tuple(None if p in maybe else a for p, a in zip(params, args, strict=True))


def items_of(bounds: tuple[Any, ...]) -> Iterable[Any]:
    """What a loop of these bounds goes through, one index a trip."""
    if len(bounds) == 3:
        return range(*bounds)
    if len(bounds) == 1:
        return bounds[0]
    return _endless()


def _endless() -> Iterable[int]:
    number = 0
    while True:
        yield number
        number += 1


def _unbound_name(node: fx.Node, values: Any) -> str:
    """The variable that an unassigned argument stands for, by the name of its node."""
    args = node.args[0] if node.op == "output" else node.args
    if isinstance(args, fx.Node):
        return args.name
    if isinstance(values, tuple | list) and isinstance(args, tuple | list):
        for arg, value in zip(args, values, strict=False):
            if value is UNBOUND and isinstance(arg, fx.Node):
                return arg.name
    return next((a.name for a in node.all_input_nodes), node.name)


def resolve(root: Any, path: str) -> Any:
    """The object ``path`` below ``root``: attributes, or keys and indices of containers.

    Raises:
        AttributeError: when the path leads nowhere, or the container's own error.
    """
    found = root
    for part in path.split("."):
        found = _below(found, part)
    return found


def _below(found: Any, part: str) -> Any:
    if isinstance(found, Mapping):
        return found[part] if part in found or not part.isdigit() else found[int(part)]
    # a module's children may have digits for names
    if part.isdigit() and not hasattr(found, part):
        return found[int(part)]
    return getattr(found, part)


def call_plain(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Execute a call of something that is no operation: a function, or a method of a value."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def call_graph(body: fx.GraphModule, *args: Any) -> Any:
    """Execute the body of a traced operation, call by call."""
    env: Environment = {}
    inputs = iter(args)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(inputs)
        elif node.op == "get_attr":
            found: Any = body
            for part in str(node.target).split("."):
                found = getattr(found, part)
            env[node] = found
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: env[n])
        else:
            call_args = fx.node.map_arg(node.args, lambda n: env[n])
            kwargs = fx.node.map_arg(node.kwargs, lambda n: env[n])
            env[node] = call_plain(node, call_args, kwargs)
    raise AssertionError("a graph without output")
