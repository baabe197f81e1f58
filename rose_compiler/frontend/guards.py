"""What a captured program takes for granted, and how to check it before it runs again."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._device import DeviceContext

from rose_compiler.frontend.capture import Captured
from rose_compiler.frontend.components import is_simulator
from rose_compiler.frontend.modules import Watched
from rose_compiler.frontend.names import StateNames, memory_range
from rose_compiler.frontend.reachable import HOOKS_OF_ALL
from rose_compiler.frontend.scope import is_scalar
from rose_compiler.frontend.sharing import Shared

Check = Callable[[], str | None]


@dataclass
class Arguments:
    """The arguments of one call, as the program wants them: values by name, states by root."""

    values: dict[str, Any]
    states: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)


@dataclass
class Guards:
    """The assumptions of one captured program. :meth:`check` answers what changed, or ``None``.

    A state root may be another object of the same make at the next call (a new buffer, say): the
    program holds no object itself. What must stay is how the roots are built: the same names for
    the same things, of the same shapes.
    """

    captured: Captured
    modes: tuple[Any, ...]
    values: dict[str, tuple[Any, ...]]
    layout: dict[str, tuple[Any, ...]]
    constants: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, int] = field(default_factory=dict)
    modules: list[Watched] = field(default_factory=list)
    simulators: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    tensors: list[tuple[str, torch.nn.Module, str, torch.Tensor]] = field(default_factory=list)
    getters: list[tuple[str, Callable[[Arguments], Any], Any]] = field(default_factory=list)
    sharing: dict[str, frozenset[str]] = field(default_factory=dict)
    shared: Shared = field(default_factory=lambda: Shared(StateNames({})))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Sort the arguments of a call into values and states.

        Raises:
            TypeError: when they do not fit the function, as calling it would.
        """
        captured = self.captured
        bound = captured.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        values = {name: given[name] for name in captured.values}
        states = dict(captured.program.objects)
        for name, root in captured.argument_states.items():
            states[root] = given[name]
        session = captured.session
        for root, current in session.rebindable.items():
            if root in states:
                states[root] = current()
        return Arguments(values, states, {name: given[name] for name in self.constants})

    def check(self, arguments: Arguments) -> str | None:
        """What no longer holds, in the user's names; ``None`` when everything does."""
        if self.modes != current_modes():
            return f"torch's modes changed: {_difference(self.modes, current_modes())}"
        for name, expected in self.values.items():
            found = describe(arguments.values[name])
            if found != expected:
                return f"argument {name!r} changed from {_show(expected)} to {_show(found)}"
        for name, expected in self.constants.items():
            found = arguments.constants[name]
            if found is not expected and not _same(found, expected):
                return f"argument {name!r} changed from {_short(expected)} to {_short(found)}"
        if any(self.objects.get(root) != id(value) for root, value in arguments.states.items()):
            changed = self.rebind(arguments)
            if changed is not None:
                return changed
        elif (changed := self.shared.changed(arguments.states)) is not None:
            return changed
        for path, read, expected in self.getters:
            try:
                found = read(arguments)
            except (AttributeError, KeyError, ValueError):
                return f"{path} is gone"
            if found is not expected and not _same(found, expected):
                return f"{path} changed from {_short(expected)} to {_short(found)}"
        for watched in self.modules:
            if not watched.unchanged() and (changed := watched.difference(watched.module)):
                return changed
        for name, owner, key, tensor in self.tensors:
            current = owner._parameters.get(key)
            if current is not tensor and (current is None or describe(current) != describe(tensor)):
                return f"parameter {name} was replaced by another of {_show(describe(current))}"
        for root, expected in self.simulators.items():
            found = simulator_state(arguments.states[root])
            if found != expected:
                return f"simulator {root} changed from {_told(expected)} to {_told(found)}"
        return self._newly_shared(arguments)

    def _newly_shared(self, arguments: Arguments) -> str | None:
        """Memory that an argument shares now and did not when the program was captured."""
        if not any(map(may_share, arguments.values.values())):
            return None
        for name, others in sharing(arguments).items():
            new = others - self.sharing.get(name, frozenset())
            if new:
                return f"argument {name!r} changed: it shares memory with {sorted(new)[0]}"
        return None

    def after_call(self) -> None:
        """Take what modules did to their own attributes during a call for how they are now: only
        what changes between calls is a change."""
        for watched in self.modules:
            watched.settle()

    def rebind(self, arguments: Arguments) -> str | None:
        """Accept other objects of the same make; say what differs otherwise."""
        for root, value in arguments.states.items():
            old = self.captured.program.objects.get(root)
            if type(value) is not type(old):
                return f"{root} changed from a {type(old).__name__} to a {type(value).__name__}"
        names = StateNames(arguments.states)
        layout = layout_of(names)
        if layout != self.layout:
            changed = [n for n in {*layout, *self.layout} if layout.get(n) != self.layout.get(n)]
            return f"{', '.join(sorted(changed)[:3])} changed shape, type or sharing"
        # another object may be in another mode, have hooks or other shards
        for watched in self.modules:
            changed_module = watched.difference(names.modules[watched.name])
            if changed_module is not None:
                return changed_module
        for root, before in self.simulators.items():
            now = simulator_state(arguments.states[root])
            if now != before:
                return f"simulator {root} changed from {_told(before)} to {_told(now)}"
        self.watch(arguments)
        return None

    def watch(self, arguments: Arguments) -> None:
        """Remember the objects at hand, so that seeing them again costs nothing."""
        self.objects = {root: id(value) for root, value in arguments.states.items()}
        self.captured.program.objects.update(arguments.states)
        names = StateNames(arguments.states)
        self.shared.look(names)
        self.modules = [Watched(name, m) for name, m in names.modules.items()]
        self.tensors = [
            (f"{name}.{path}.{key}".replace("..", "."), inner, key, tensor)
            for name, module in names.modules.items()
            for path, inner in module.named_modules()
            for key, tensor in inner._parameters.items()
            if tensor is not None
        ]
        self.simulators = {
            root: simulator_state(v) for root, v in arguments.states.items() if is_simulator(v)
        }


def make_guards(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guards:
    """The guards of a program that was captured for these arguments."""
    guards = Guards(captured, current_modes(), {}, {}, constant_arguments(captured))
    arguments = guards.bind(args, kwargs)
    guards.values = {name: describe(value) for name, value in arguments.values.items()}
    names = StateNames(arguments.states)
    guards.layout, guards.shared = layout_of(names), Shared(names)
    guards.watch(arguments)
    guards.sharing = sharing(arguments)
    for path, expected in captured.session.folded.items():
        read = _getter(path, captured, args, kwargs)
        if read is not None:
            guards.getters.append((path.replace("<argument>.", ""), read, expected))
    return guards


def _getter(
    path: str, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Arguments], Any] | None:
    current = captured.session.rebindable.get(path)
    if current is not None:
        return lambda arguments: current()
    if path.startswith("<argument>."):
        return None  # compared when the arguments are sorted
    root, *parts = path.removesuffix("()").split(".")
    if root not in captured.session.roots:
        return None

    def read(arguments: Arguments) -> Any:
        value = arguments.states[root]
        for part in parts:
            value = getattr(value, part)
        return value.__func__ if isinstance(value, types.MethodType) else value

    return read


def constant_arguments(captured: Captured) -> dict[str, Any]:
    """Arguments that were folded into the program, with the values they had."""
    prefix = "<argument>."
    return {
        path.removeprefix(prefix): value
        for path, value in captured.session.folded.items()
        if path.startswith(prefix)
    }


def current_modes() -> tuple[Any, ...]:
    """Thread-local and process-wide modes that change what torch computes."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _autocast("cpu"),
        _autocast("cuda"),
        torch.get_default_dtype(),
        _default_device(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        _hooks_of_all(),
    )


_CPU = torch.device("cpu")


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _default_device() -> torch.device:
    """Where tensors are made. The uppermost of the modes that say so decides."""
    for k in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(k)
        if isinstance(mode, DeviceContext):
            return mode.device
    return _CPU


def _hooks_of_all() -> tuple[Any, ...]:
    """The hooks of torch's for all modules and optimizers."""
    return tuple(hook for table in HOOKS_OF_ALL if table for hook in table.values())


def describe(value: Any) -> tuple[Any, ...]:
    """What a guard compares of a value: never its data."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.device, value.requires_grad)
    if isinstance(value, np.ndarray):
        return ("array", value.shape, value.dtype)
    if isinstance(value, tuple):
        return ("tuple", *(describe(v) for v in value))
    if isinstance(value, dict) and any(isinstance(v, _ROWS) for v in value.values()):
        # an observation; of one of settings, or one that collects what is logged, only the type
        return (type(value).__name__, *((key, describe(v)) for key, v in value.items()))
    return (type(value).__name__,)


_ROWS = (torch.Tensor, np.ndarray)


def layout_of(names: StateNames) -> dict[str, tuple[Any, ...]]:
    """Names of everything reachable, with shapes: equal layouts have the same sharing."""
    made: dict[str, tuple[Any, ...]] = {name: describe(t) for name, t in names.tensors.items()}
    for low, high, name in names.memory:
        others = tuple(sorted(n for n in names.overlapping(low, high) if n != name))
        made[name] = (*made.get(name, (high - low,)), others)
    for name in names.names.values():
        made.setdefault(name, ())
    for path, links in names.links.items():
        made[path] = (*made.get(path, ()), ("is", *sorted(links)))
    return made


def sharing(arguments: Arguments) -> dict[str, frozenset[str]]:
    """The states and other arguments that each argument shares memory with."""
    names = StateNames(arguments.states)
    ranges = {name: memory_range(value) for name, value in arguments.values.items()}
    found: dict[str, frozenset[str]] = {}
    for name, mine in ranges.items():
        if mine is None:
            continue
        others = {
            f"argument {other!r}"
            for other, its in ranges.items()
            if other != name and its is not None and its[0] < mine[1] and mine[0] < its[1]
        }
        found[name] = frozenset({*names.overlapping(*mine), *others})
    return found


def may_share(value: Any) -> bool:
    """Whether somebody else may hold a tensor's memory: cheap, and true rather too often."""
    if not isinstance(value, torch.Tensor):
        return False
    try:
        storage = value.untyped_storage()
        # the tensor and the object in ``storage`` are two
        return bool(torch._C._storage_Use_Count(storage._cdata) > 2)
    except (RuntimeError, NotImplementedError):
        return False


def simulator_state(env: Any) -> tuple[Any, ...]:
    """Number of environments and of shards, and how results are handed out."""
    shards = getattr(env, "shards", None)
    rows: tuple[int, ...] = ()
    if callable(shards):
        rows = tuple(int(s.num_envs) for s in shards())
    return (type(env).__name__, getattr(env, "num_envs", 1), rows)


def _told(state: tuple[Any, ...]) -> str:
    kind, envs, rows = state
    shards = f" in {len(rows)} shards" if rows else ""
    return f"a {kind} of {envs}{shards}"


def _same(a: Any, b: Any) -> bool:
    if is_scalar(a) and is_scalar(b):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    return False


def _show(described: tuple[Any, ...]) -> str:
    kind, *rest = described
    return f"{kind}({', '.join(map(str, rest))})" if rest else str(kind)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _difference(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    names = (
        "grad mode",
        "inference mode",
        "autocast",
        "autocast on CUDA",
        "default dtype",
        "default device",
        "thread count",
        "determinism",
        "hooks for all modules or optimizers",
    )
    return ", ".join(
        f"{n} {a} -> {b}" for n, a, b in zip(names, before, after, strict=True) if a != b
    )
