"""Records the torch calls that Python code makes, as an fx graph of the same calls.

Two modes work together. :class:`Recorder` sees every torch function the code calls and appends it
to the graph, with operands found by identity. :class:`~rose_compiler.frontend.audit.Audit`, below
it, sees every operator that really runs: one outside a recorded call, one that writes memory the
code was given, or one whose result size hangs on data stops the trace. So a graph is either
complete or not made.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.fx as fx
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend import call_names, sizes
from rose_compiler.frontend.audit import Audit, Blocked, Effects, blocked, storage_key
from rose_compiler.frontend.modes import device_offsets, other_modes
from rose_compiler.frontend.record import spec_of
from rose_compiler.frontend.scalars import TracedNumber, traced_number, untraced
from rose_compiler.ir import facts, functions
from rose_compiler.ir.checks import check_valid
from rose_compiler.ir.sizes import Laid


class Recorder(TorchFunctionMode):
    """Builds ``graph`` while it is entered.

    ``lifted`` are the tensors, by name, that the code may reach without being given them; those it
    uses become placeholders. ``out_of_place`` records in-place calls on tensors made inside as the
    calls that compute the same out of place, where nobody else shares the memory. Sizes that
    ``vary`` are taken from operands, when other code than torch's reads them; ``sized``: whether it
    did, ``read``: whether the graph hangs on one: any Python code did, torch's own included, or it
    is made of as many parts as a tensor had. ``parted``: the axes, and their sizes, along which
    that holds. ``typed``: whether a dtype or device was read, or a conversion left out that does
    nothing to tensors of these; ``laid``: the same of how a tensor lies in memory.
    """

    def __init__(
        self, lifted: Mapping[str, torch.Tensor], *, out_of_place: bool, vary: sizes.Vary = "none"
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.audit = Audit(self._stop)
        self.lifted_used: dict[str, fx.Node] = {}
        self.draws: list[fx.Node] = []
        self.checks: list[fx.Node] = []
        self.pure = True
        self.sized = self.read = self.typed = False
        self.laid: Laid = "any"
        self.parted: set[tuple[int, int]] = set()
        self.raised = ""  # a call that raised, which the code may have caught
        self.blocker: Blocker | None = None
        self._out_of_place, self._vary = out_of_place, vary
        self._lifted = {id(t): name for name, t in reversed(list(lifted.items()))}
        self._lifted_tensors = lifted
        self._nodes: dict[int, tuple[Any, fx.Node]] = {}
        self._placeholders: fx.Node | None = None
        self._detached: dict[fx.Node, fx.Node] = {}
        self._entry_grad = torch.is_grad_enabled()
        self._entry_modes = other_modes()
        self._bodies = call_names.Bodies()
        self._arrays = False
        self._generator = torch.get_rng_state()
        self._offsets = device_offsets()
        for tensor in lifted.values():
            self.audit.foreign.add(storage_key(tensor))

    # --- inputs and outputs ---

    def placeholder(self, name: str) -> fx.Node:
        """A new input of the graph, after those there are."""
        anchor = self._placeholders
        if anchor is None:
            first = next(iter(self.graph.nodes), None)
            context = self.graph.inserting_before(first) if first is not None else None
        else:
            context = self.graph.inserting_after(anchor)
        if context is None:
            node = self.graph.placeholder(name)
        else:
            with context:
                node = self.graph.placeholder(name)
        self._placeholders = node
        return node

    def know(self, value: Any, node: fx.Node) -> None:
        """From now on ``value``, by identity, stands for ``node``."""
        self._arrays |= isinstance(value, np.ndarray | np.generic)
        self._nodes[id(value)] = (value, node)

    def number(self, value: float, node: fx.Node) -> Any:
        """A Python number that stands for ``node``."""
        return traced_number(value, node, self.emit, self._refusal)

    def lifted(self, name: str) -> torch.Tensor:
        """The tensor behind a name."""
        return self._lifted_tensors[name]

    def emit(self, target: Callable[..., Any], args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        """Append a call."""
        return self.graph.call_function(target, args, kwargs)

    def _refusal(self, why: str) -> Blocked:
        return self._stop("host-read", why, "hand the number in as a tensor")

    def _stop(self, code: str, why: str, allow: str | None = None) -> Blocked:
        """The exception to raise; the blocker is kept in case the traced code swallows it."""
        found = blocked(code, why, allow)
        if self.blocker is None:
            self.blocker = found.blocker
        return found

    def operand(self, value: Any) -> Any:
        """``value`` as an argument of a node."""
        known = self._nodes.get(id(value))
        if known is not None and known[0] is value:
            return self._seen_from_here(value, known[1])
        if isinstance(value, torch.Tensor):
            return self._seen_from_here(value, self._lift(value))
        if isinstance(value, TracedNumber):
            return value.node
        if isinstance(value, np.generic | np.ndarray):
            if isinstance(value, np.float64) and not self._arrays:
                return float(value)  # a constant: there is no array it could come from
            raise self._stop("not-traceable", "a numpy value that was made inside is used")
        if value is None or isinstance(value, call_names.STATIC):
            return call_names.plain(value)
        if isinstance(value, tuple):
            return tuple(self.operand(v) for v in value)
        if isinstance(value, list):
            return [self.operand(v) for v in value]
        if isinstance(value, dict):
            return {k: self.operand(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(*(self.operand(v) for v in (value.start, value.stop, value.step)))
        raise self._stop("not-traceable", f"a {type(value).__name__} is handed to torch")

    def _own(self, tensor: torch.Tensor) -> str | None:
        name = self._lifted.get(id(tensor))
        return name if name is not None and self._lifted_tensors[name] is tensor else None

    def _lift(self, tensor: torch.Tensor) -> fx.Node:
        name = self._own(tensor)
        if name is None:
            raise self._stop(
                "not-traceable",
                f"a tensor of shape {tuple(tensor.shape)} comes neither from the block's inputs "
                "nor from a component that it names",
                "keep it as an attribute of a component, or make it with a torch call inside",
            )
        node = self.placeholder(name.replace(".", "_"))
        facts.put(node, spec=spec_of(tensor))
        self.lifted_used[name] = node
        self.know(tensor, node)
        return node

    def _seen_from_here(self, value: Any, node: fx.Node) -> fx.Node:
        """The operand; without history under ``no_grad`` inside code that builds a graph."""
        if not (self._entry_grad and isinstance(value, torch.Tensor)):
            return node
        with torch._C.DisableTorchFunction():
            if torch.is_grad_enabled() or not value.requires_grad:
                return node
        if node not in self._detached:
            self._detached[node] = self.emit(torch.detach, (node,))
            facts.put(self._detached[node], spec=facts.get(node).spec)
        return self._detached[node]

    # --- calls ---

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.blocker is not None:
            raise Blocked(self.blocker)
        name = getattr(func, "__name__", "")
        if name in call_names.MODE_SWITCHES:
            return func(*args, **kwargs)
        if name == "__get__":
            return self._property(func, args, sys._getframe(1))
        if name == "__bool__":
            return self._truth(args[0], sys._getframe(1))
        if name in call_names.REFUSED or name in ("__set__", "__delete__"):
            code, why = call_names.REFUSED.get(
                name, ("not-pure", "an attribute of a tensor is set")
            )
            raise self._stop(code, f"`{name.strip('_')}`: {why}")
        if name in call_names.METADATA:
            with self.audit.inside():
                result = func(*untraced(args), **untraced(kwargs))
            return self._sizes(name, args, kwargs, result, sys._getframe(1))
        body = self._bodies.of(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        return self.record(func, name, args, kwargs)

    def _sizes(self, name: str, args: Any, kwargs: Any, result: Any, frame: types.FrameType) -> Any:
        """What a read of metadata gives."""
        other = not args or self._own(args[0]) is None  # states are compared before each call
        self.read |= other and name in sizes.NAMES | sizes.AXES | sizes.LAYOUT
        self.typed |= name in sizes.TYPED and self._handed(args, kwargs)
        if other and name in sizes.LAID:
            self.lay(sizes.LAID[name])
        if name not in sizes.NAMES or sizes.read_by_torch(frame):
            return result
        self.sized |= other
        if self._vary == "none":
            return result

        def number(value: int, call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
            node = self.emit(call, tuple(map(self.operand, given)))
            facts.put(node, spec=spec_of(value))
            return self.number(value, node)

        found = sizes.sizes_read(name, args, untraced(kwargs), result, self._vary, number)
        if found is None:
            raise self._stop("host-read", "`len` of a tensor fixes its size, which may change")
        return found

    def lay(self, what: Laid) -> None:
        """Take note that the graph hangs on how its inputs lie in memory."""
        self.laid = "strides" if "strides" in (what, self.laid) else "order"

    def _property(self, func: Any, args: tuple[Any, ...], frame: types.FrameType) -> Any:
        owner = func.__self__
        name = getattr(owner, "__name__", "") or getattr(owner.fget, "__name__", "")
        with self.audit.inside():
            result = func(*args)
        if not isinstance(result, torch.Tensor):
            return self._sizes(name, args, {}, result, frame)
        if name not in call_names.VIEW_PROPERTIES:
            raise self._stop("not-traceable", f"the attribute `{name}` of a tensor is read")
        self._adopt(result, self.emit(getattr, (self.operand(args[0]), name)))
        return result

    def _truth(self, tensor: torch.Tensor, frame: types.FrameType | None) -> bool:
        """A truth test; those by which distributions check their arguments stay as checks."""
        codes = (Distribution.__init__.__code__, Distribution._validate_sample.__code__)
        if frame is None or frame.f_code not in codes:
            raise self._stop("host-read", "Python branches on the value of a tensor")
        with self.audit.inside():
            valid = bool(tensor)
            if valid:
                template, named = call_names.check_arguments(frame)
        if valid:
            node = self.emit(
                check_valid, (self.operand(tensor), template, *map(self.operand, named))
            )
            self.checks.append(node)
        return valid

    def record(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` and append the call; to be used with the mode itself out of the way."""
        if other_modes() != self._entry_modes:
            raise self._stop("mode-change", "autocast or inference mode changes inside the block")
        node_args, node_kwargs = self.operand(args), self.operand(kwargs)
        self.check_generator()
        with self.audit.inside() as effects:
            try:
                result = func(*untraced(args), **untraced(kwargs))
            except Exception:
                # code that goes on from here would do so on some data and not on others
                self.raised = name
                raise
        drew = self._advance() or effects.device_draw
        if not effects.writes and not drew:
            if name == "broadcast_tensors" and self._broadcast(args, result):
                return result
            operand = self._same_tensor(name, args, kwargs, result)
            if operand is not None:
                self.know(result, operand)
                return result
        if name in call_names.BORROWING:
            self._mark_foreign(args, result)
        target, node_args, node_kwargs = self._form(
            func, name, node_args, node_kwargs, args, result, effects
        )
        if target is not getattr and functions.name_of(target) is None:
            raise self._stop("not-traceable", f"`{name}` has no public name to call it by")
        node = self.graph.call_function(target, node_args, node_kwargs)
        if drew:
            self.draws.append(node)
        out_of_place = (call_names.OUT_OF_PLACE.get(name), call_names.DRAWS_IN_PLACE.get(name))
        if effects.writes and target not in out_of_place:
            self.pure = False
            if self._entry_grad != torch.is_grad_enabled():
                raise self._stop("mode-change", "a tensor is written under another gradient mode")
        self.read |= name in sizes.PARTS
        if name in sizes.APART and self._handed(args, kwargs):
            self.parted.add(sizes.apart(untraced(args), untraced(kwargs)))
        self._adopt(result, node)
        return result

    def check_generator(self) -> None:
        """Stop if torch's generator moved otherwise than by a recorded draw."""
        if self._advance():
            raise self._stop("draw-order", "torch's generator is set or read outside a draw")

    def _advance(self) -> bool:
        with self.audit.inside():
            now = torch.get_rng_state()
            moved = not torch.equal(self._generator, now)
        offsets = device_offsets()
        moved |= offsets != self._offsets
        self._generator, self._offsets = now, offsets
        return moved

    def _broadcast(self, args: tuple[Any, ...], result: Any) -> bool:
        """Record the broadcast of some tensors to the shape that one of them has already."""
        tensors = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
        full = next((t for t, r in zip(tensors, result, strict=True) if t.shape == r.shape), None)
        if full is None:
            return False
        like, self.read = self.operand(full), True
        for tensor, each in zip(tensors, result, strict=True):
            node = self.operand(tensor)
            if tensor.shape != each.shape:
                node = self.emit(torch.Tensor.expand_as, (node, like))
                facts.put(node, spec=spec_of(each))
            self.audit.fresh(each)
            self.know(each, node)
        return True

    def _form(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        values: tuple[Any, ...],
        result: Any,
        effects: Effects,
    ) -> tuple[Any, Any, Any]:
        """The cheapest call that does the same, with as few fixed sizes as possible."""
        if name in call_names.DRAWS_IN_PLACE and self._sole_owner(values[0]):
            call = call_names.draw_of(name, args, kwargs, values[0])
            if call is not None:
                return call
        if effects.writes and self._out_of_place and not kwargs.get("out"):
            other = call_names.OUT_OF_PLACE.get(name)
            if other is not None and self._sole_owner(values[0]):
                return other, args, kwargs
        if (free := call_names.with_free_sizes(name, args, values, result)) is not None:
            args, self.read = free, True
        return call_names.cheapest(func, name, args, kwargs)

    def _sole_owner(self, tensor: torch.Tensor) -> bool:
        """Whether no other tensor that the code has seen shares this one's memory."""
        key = storage_key(tensor)
        return not any(
            isinstance(value, torch.Tensor) and value is not tensor and storage_key(value) == key
            for value, _ in self._nodes.values()
        )

    def _handed(self, args: Any, kwargs: Any) -> bool:
        """Whether a tensor is among the arguments that is no state: those are compared anyway."""
        given = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        return any(self._own(v) is None for v in given)

    def _same_tensor(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> fx.Node | None:
        """The node of the operand if the call handed it back, or a view that equals it."""
        if not args or not all(isinstance(t, torch.Tensor) for t in (result, args[0])):
            return None
        known = self._nodes.get(id(result))
        if known is not None and known[0] is result:
            # of another dtype, elsewhere or laid out otherwise, it would be another tensor
            self.typed |= name != "contiguous" and self._handed(args, kwargs)
            if name == "contiguous" or _has_format(args, kwargs):
                self.lay("order")
            return self.operand(result)
        source = args[0]
        same = name in call_names.RESHAPES and call_names.unchanged(source, result)
        if not same or self._vary == "all":  # `x.reshape(-1, 3)` may get another number of columns
            return None
        self.read = True  # of other sizes it may be more than the tensor itself
        return self.operand(source)

    def _adopt(self, result: Any, node: fx.Node) -> None:
        """Take what a call returned as the value of its node."""
        facts.put(node, spec=spec_of(result))
        if isinstance(result, torch.Tensor):
            self.audit.fresh(result)
            self.know(result, node)
        elif isinstance(result, tuple | list):
            for i, each in enumerate(result):
                if each is not None:
                    self._adopt(each, self.emit(operator.getitem, (node, i)))
        elif result is not None:
            raise self._stop("host-read", f"`{node.name}` makes a Python value out of a tensor")

    def _mark_foreign(self, args: tuple[Any, ...], result: Any) -> None:
        if any(isinstance(a, np.ndarray) for a in args) and isinstance(result, torch.Tensor):
            self.audit.foreign.add(storage_key(result))


def _has_format(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(v, torch.memory_format) for v in (*args, *kwargs.values()))
