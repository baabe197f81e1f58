"""What a call really reads and writes, seen while it runs.

Torch operators are seen one by one and told apart by storage and byte range, whatever view, alias
or ``.data`` they go through; in-place, foreach and fused ones say in their schema what they write.
What torch does not see is compared before and after: generators, gradients, module modes, arrays
and tensors by a digest of their bytes, containers and attributes by the identity of what they hold.
Of what torch does not see being read, it is noted which attributes of objects are reached.
"""

from __future__ import annotations

import collections
import random
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rose_compiler.base.errors import SourceLocation
from rose_compiler.runtime.attributes import Attributes, Touched

Range = tuple[int, int]
Kind = Literal["generator", "mode", "content", "items"]

#: Bytes of one tensor or array that are looked at whole; of a larger one, this many in pages spread
#: over it.
DIGESTED = 1 << 20
_PAGE = 1 << 12
#: Entries of one container that are compared; of a longer one, only how many there are.
_ITEMS = 1000
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib")})


@dataclass
class Seen:
    """What one call touched. Byte ranges come with the user's line that touched them first, where
    one is known; memory that the call itself allocated is left out."""

    reads: dict[Range, SourceLocation | None] = field(default_factory=dict)
    writes: dict[Range, SourceLocation | None] = field(default_factory=dict)
    #: Names of watched things that changed, and how that showed.
    changed: dict[str, Kind] = field(default_factory=dict)
    #: Parameters whose gradient was made, replaced, dropped or written.
    gradients: list[torch.Tensor] = field(default_factory=list)
    #: Attributes that were reached or assigned, and tensors handed to numpy.
    touched: Touched = field(default_factory=Touched)


class Watch:
    """Observes calls. ``things`` are the live objects that may change, each with the name it is
    told by; several objects may share a name. They are held strongly. ``owners`` are those whose
    attributes are watched being reached, ``things`` by default.

    Torch's, numpy's and Python's global generators are watched too, as ``rng:torch``, ``rng:numpy``
    and ``rng:python``.
    """

    def __init__(
        self,
        things: Iterable[tuple[str, Any]] = (),
        owners: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        self._things = list(things)
        self._attributes = Attributes(self._things if owners is None else owners)
        self._probes = [p for name, thing in self._things for p in _probes(name, thing)]
        self._leaves = [t for _, t in self._things if _is_leaf(t)]

    @contextmanager
    def observing(
        self, more: Iterable[tuple[str, Any]] = (), *, contents: bool = True
    ) -> Iterator[Seen]:
        """Observe what runs in this context, on this thread.

        ``more`` are things that only this call may change. Without ``contents``, bytes that torch
        does not see being written are not looked at.
        """
        seen = Seen()
        more = list(more)
        probes = [*_GLOBAL, *self._probes, *(p for name, t in more for p in _probes(name, t))]
        probes = [p for p in probes if contents or p.kind != "content"]
        leaves = [*self._leaves, *(t for _, t in more if _is_leaf(t))]
        before = [p.look() for p in probes]
        gradients = [_gradient(p) for p in leaves]
        try:
            with self._attributes.noting() as seen.touched, _Operators(seen):
                yield seen
        finally:
            for tensor in seen.touched.tensors:
                if (found := byte_range(tensor)) is not None:
                    seen.reads.setdefault(found, None)
            seen.touched.tensors.clear()
            for probe, old in zip(probes, before, strict=True):
                for name in _differences(probe.name, old, probe.look()):
                    seen.changed.setdefault(name, probe.kind)
            for leaf, was in zip(leaves, gradients, strict=True):
                if _gradient(leaf) != was:
                    seen.gradients.append(leaf)


@dataclass(frozen=True)
class _Probe:
    """Looks at one thing: what it gives differs when the thing has changed."""

    name: str
    kind: Kind
    look: Callable[[], Any]


class _Attributes(dict[str, Any]):
    """Marks of an object's attributes: a change is told by the name of the attribute."""


def _differences(name: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, _Attributes):
        yield from (f"{name}.{k}" for k in {**old, **new} if old.get(k) != new.get(k))
    elif old != new:
        yield name


def _probes(name: str, thing: Any) -> Iterator[_Probe]:
    if isinstance(thing, torch.Tensor):
        if thing.device.type == "cpu" and thing.layout == torch.strided:
            yield _Probe(name, "content", lambda: _digest_tensor(thing))
    elif isinstance(thing, np.ndarray):
        if thing.dtype != object:
            yield _Probe(name, "content", lambda: _digest(thing))
    elif isinstance(thing, torch.Generator):
        yield _Probe(name, "generator", lambda: _bytes_of(thing.get_state()))
    elif isinstance(thing, np.random.Generator):
        yield _Probe(name, "generator", lambda: repr(thing.bit_generator.state))
    elif isinstance(thing, np.random.RandomState):
        yield _Probe(name, "generator", lambda: repr(thing.get_state()))
    elif isinstance(thing, random.Random):
        yield _Probe(name, "generator", lambda: hash(thing.getstate()))
    elif isinstance(thing, torch.nn.Module):
        yield _Probe(name, "mode", lambda: [m.training for m in thing.modules()])
        yield _Probe(name, "items", lambda: _attributes(thing, _MODULE))
    elif isinstance(thing, torch.optim.Optimizer):
        yield _Probe(name, "items", lambda: _settings(thing))
    elif isinstance(thing, dict | list | set | collections.deque):
        yield _Probe(name, "items", lambda: _items(thing))
    elif not isinstance(thing, type) and (
        isinstance(getattr(thing, "__dict__", None), dict) or _slots(thing.__class__)
    ):
        yield _Probe(name, "items", lambda: _attributes(thing, frozenset()))


def _is_leaf(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and thing.is_leaf and thing.requires_grad


_MODULE = frozenset(vars(torch.nn.Module()))


class _Operators(TorchDispatchMode):
    """Notes what every torch operator reads and writes."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        # a weak reference keeps the identity of a storage from being given out again
        self._own: dict[int, StorageWeakRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # the wrapper that torch would put around __torch_dispatch__ imports torch._dynamo: seconds
        return False

    def __torch_dispatch__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written, is_view = _layout(func)
        given: set[int] = set()
        for position, value in enumerate(args):
            self._note(value, position in written, is_view, given)
        for name, value in kwargs.items():
            self._note(value, name in written, is_view, given)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            key = _storage(tensor)
            if key is not None and key not in given and key not in self._own:
                self._own[key] = StorageWeakRef(tensor.untyped_storage())
        return result

    def _note(self, value: Any, write: bool, is_view: bool, given: set[int]) -> None:
        for tensor in _tensors(value):
            key = _storage(tensor)
            if key is None:
                continue
            given.add(key)
            if key in self._own or (is_view and not write):
                continue
            found = byte_range(tensor)
            entries = self.seen.writes if write else self.seen.reads
            if found is not None and found not in entries:
                entries[found] = _user_line() if write else None


@lru_cache(maxsize=4096)
def _layout(func: Any) -> tuple[frozenset[int | str], bool]:
    """The arguments that an operator writes, by position and name, and whether it reads no data: it
    only makes views."""
    written: set[int | str] = set()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
    views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
    return frozenset(written), bool(views) and all(views)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None  # sparse, fake


def byte_range(tensor: torch.Tensor) -> Range | None:
    """First and last address of the bytes that a tensor's elements lie in; ``None`` without any."""
    try:
        start = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if not start or not tensor.numel():
        return None
    size = tensor.element_size()
    low = start + tensor.storage_offset() * size
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(low), int(low + (last + 1) * size)


def _user_line() -> SourceLocation | None:
    """The innermost line on the stack that belongs to no library."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<", *_LIBRARIES)):
            return SourceLocation(name, frame.f_lineno)
        frame = frame.f_back
    return None


def _gradient(leaf: torch.Tensor) -> tuple[int, int] | None:
    grad = leaf.grad
    return None if grad is None else (id(grad), grad._version)


def _torch_generators() -> Any:
    devices: tuple[Any, ...] = ()
    if torch.cuda.is_initialized():
        devices = tuple(g.get_offset() for g in torch.cuda.default_generators)
    return _bytes_of(torch.get_rng_state()), devices


def _python_generator() -> Any:
    return hash(random.getstate())


def _numpy_generator() -> Any:
    # the legacy generator is one of the states that users draw from
    _, key, position, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return np.asarray(key).tobytes(), position, rest


_GLOBAL = (
    _Probe("rng:torch", "generator", _torch_generators),
    _Probe("rng:numpy", "generator", _numpy_generator),
    _Probe("rng:python", "generator", _python_generator),
)


def _bytes_of(state: torch.Tensor) -> bytes:
    return bytes(state.numpy())


def _digest_tensor(tensor: torch.Tensor) -> Any:
    if not tensor.numel() or tensor.is_quantized:
        return tensor.shape
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        plain = plain.contiguous() if plain.numel() * plain.element_size() < DIGESTED else plain
    if not plain.is_contiguous():
        return tensor._version
    return _digest(plain.reshape(-1).view(torch.uint8).numpy())


def _digest(array: np.ndarray[Any, Any]) -> Any:
    """A digest of an array's bytes, or of pages spread over them."""
    if array.nbytes <= DIGESTED or not array.flags.c_contiguous:
        return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    flat = array.reshape(-1).view(np.uint8)
    starts = np.linspace(0, flat.size - _PAGE, DIGESTED // _PAGE).astype(np.int64)
    found = 0
    for start in starts:
        found = zlib.crc32(flat[start : start + _PAGE].data, found)
    return found


def _mark(value: Any) -> Any:
    """What tells a value from another one: a number itself, an object by identity."""
    return (type(value), repr(value)) if isinstance(value, _SCALARS) else id(value)


def _items(container: Any) -> Any:
    if len(container) > _ITEMS:
        return len(container)
    if isinstance(container, dict):
        return [(_mark(k), _mark(v)) for k, v in list(container.items())]
    return [_mark(v) for v in list(container)]  # which another thread may change meanwhile


def _attributes(thing: Any, left_out: frozenset[str]) -> Any:
    slots = [(k, getattr(thing, k)) for k in _slots(thing.__class__) if hasattr(thing, k)]
    own = getattr(thing, "__dict__", {}).items()
    return _Attributes((k, _mark(v)) for k, v in (*own, *slots) if k not in left_out)


@lru_cache(maxsize=1024)
def _slots(cls: Any) -> tuple[str, ...]:
    """The attributes of a class written in Python that have slots rather than a dictionary."""
    found: list[str] = []
    for each in cls.__mro__:
        slots = each.__dict__.get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return tuple(k for k in found if not k.startswith("__"))


def _settings(optimizer: torch.optim.Optimizer) -> Any:
    return [
        [(k, _mark(v)) for k, v in group.items() if k != "params"]
        for group in optimizer.param_groups
    ]
