"""What is known of the objects that a recurrence reads: as they are when a schedule is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base.recurrence import Recurrence, Type, types
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.ops import STATE, Signature
from rose_compiler.ir.program import LoopView, is_call, is_item, op_of
from rose_compiler.passes.scan_trip import Path, other_form

_FLOATS = ("float32", "float64")
_DEVICES = ("cpu", "cuda")


class Known:
    """The live objects of a program, and the types of values seen on the first trip.

    Nothing need be known: what a recurrence is given is looked at again whenever it runs. What is
    known not to fit is refused here, since running trip by trip would be slower than the loop.
    """

    def __init__(
        self,
        loop: LoopView,
        deps: Dependences,
        arguments: Sequence[fx.Node],
        examples: Mapping[str, Any],
    ) -> None:
        self.loop, self.deps, self.arguments = loop, deps, arguments
        self.examples = examples

    def number(self, value: Any) -> int | None:
        """A whole number as it was on the first trip; it is compared whenever it is used."""
        try:
            found = self._seen(value)
        except Exception:  # computing it runs the user's code
            return None
        return found if type(found) is int else None

    def _seen(self, value: Any) -> Any:
        """A value of the first trip: seen, or computed from such by what only reads.

        Raises:
            LookupError: when it can't be told.
        """
        if not isinstance(value, fx.Node):
            return value
        outer = self.deps.scope.resolve(value)
        if not isinstance(outer, fx.Node):
            return outer
        if facts.get(outer).state:
            return self._object(outer)
        if outer.name in self.examples:
            return self.examples[outer.name]
        if is_item(outer):
            return self._seen(outer.args[0])[outer.args[1]]
        spec = facts.get(outer).spec
        small = spec is not None and spec.kind in ("scalar", "tuple")
        if not small or not is_call(outer) or not _only_reads(op_of(outer).signature):
            raise LookupError(outer.name)
        return op_of(outer)(*(self._seen(a) for a in outer.args))

    def live(self, path: Path) -> Any:
        """The live object at a path.

        Raises:
            LookupError: when there is none that is known.
        """
        param = self.arguments[path.argument]
        outer = self.deps.scope.resolve(param)
        if not path.names and isinstance(outer, fx.Node) and not facts.get(outer).state:
            try:
                return self._seen(outer)
            except Exception as error:  # computing it runs the user's code
                raise LookupError(outer.name) from error
        found = self._object(param)
        for name in path.names:
            if not hasattr(found, name):
                raise LookupError(name)
            found = getattr(found, name)
        return found

    def _object(self, node: fx.Node) -> Any:
        outer = self.deps.scope.resolve(node)
        if isinstance(outer, fx.Node) and is_call(outer, STATE):
            return resolve(self._object(outer.args[0]), str(outer.args[1]))  # type: ignore[arg-type]
        state = facts.get(outer).state if isinstance(outer, fx.Node) else ""
        if state not in self.deps.program.objects:
            raise LookupError(str(node))
        return self.deps.program.objects[state]

    def check(self, found: Recurrence, numpy: bool = False) -> bool:
        """Refuse types, shapes and devices that would not fit, as far as they are known; whether
        rows are those of numpy's arrays. ``numpy``: functions of numpy are called.

        Raises:
            NotScan: when one does not.
        """
        given = [self._spec(Path(i.argument, i.path)) for i in found.inputs]
        last = [facts.get(n).spec for n in self.loop.carried_next if isinstance(n, fx.Node)]
        tensors = [s for s in (*given, *last) if s is not None and s.kind in ("tensor", "array")]
        arrays = any(s.kind == "array" for s in tensors)
        if any(s.kind == "tensor" for s in tensors) == arrays and tensors:
            raise other_form("arrays and tensors meet")
        if numpy and not arrays:
            raise other_form("functions of numpy compute with tensors")
        self._rows(found, given)
        floats = {s.dtype for s in tensors if "float" in s.dtype}
        if len(floats) > 1 or floats - set(_FLOATS):
            raise other_form(f"it computes with {' and '.join(sorted(floats))}")
        if arrays and not found.exact:
            raise other_form("numpy's last bits of what it computes may be others")
        if arrays and (found.inplace or any(i.function == "where" for i in found.items)):
            shapes = [given[k].shape for k in found.touched if given[k] is not None]  # type: ignore[union-attr]
            if any(len(shape) < 2 for shape in shapes):
                raise other_form("rows are numbers, which are not changed in place or picked")
        if len({s.device for s in tensors}) > 1:
            raise other_form("its tensors lie on several devices")
        if arrays:
            pass
        elif any(s.device.partition(":")[0] not in _DEVICES for s in tensors):
            raise other_form(f"there is no form for {tensors[0].device}", "not-available")
        if floats and None not in given:
            own = floats.pop()
            types(found, [_type(s, own) for s in given if s is not None])
        return arrays

    def _rows(self, found: Recurrence, given: Sequence[Spec | None]) -> None:
        rows = {i.source for i in found.items if i.kind == "row"} | {s.source for s in found.stores}
        shapes = set()
        for k in rows:
            spec = given[k]
            if spec is not None and spec.kind not in ("tensor", "array"):
                raise other_form(f"rows are those of a {spec.type_name}, and no tensor's")
            if spec is not None:
                shapes.add(spec.shape[1:])
        if len(shapes) > 1:
            raise other_form(f"rows of several shapes meet: {', '.join(map(str, sorted(shapes)))}")

    def _spec(self, path: Path) -> Spec | None:
        """The type of an input; None where nothing is known."""
        outer = self.deps.scope.resolve(self.arguments[path.argument])
        spec = facts.get(outer).spec if isinstance(outer, fx.Node) else None
        if not path.names and spec is not None:
            return spec
        try:
            found = self.live(path)
        except (LookupError, AttributeError):
            return None
        name = f"{type(found).__module__}.{type(found).__qualname__}"
        if isinstance(found, np.ndarray):
            return Spec("array", name, tuple(found.shape), str(found.dtype))
        if not isinstance(found, torch.Tensor):
            return Spec("scalar" if type(found) in (int, float) else "object", name)
        dtype = str(found.dtype).removeprefix("torch.")
        return Spec("tensor", name, tuple(found.shape), dtype, str(found.device))


def _type(spec: Spec, own: str) -> Type:
    if spec.type_name in ("numpy.float32", "numpy.float64"):
        return "value" if spec.type_name.endswith(own) else "other"
    if spec.kind not in ("tensor", "array"):
        plain = spec.type_name in ("builtins.int", "builtins.float")
        return "number" if plain else "other"
    if spec.dtype == own:
        return "value"
    return "bool" if spec.dtype == "bool" else "other"


def _only_reads(signature: Signature) -> bool:
    """Whether an operation may be run once more, for what it computes out of states as they are."""
    reads = signature.reads
    if reads is None or signature.writes != ():
        return False
    return not any(r.startswith(("rng:", "host")) for r in reads)
