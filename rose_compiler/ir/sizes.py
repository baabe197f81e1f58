"""Sizes, types and layouts that a traced graph was proven for: it holds what Python code read.

Code that reads a size (``x.shape[0]``, ``len(x)``) leaves a number in its graph, or the arm of a
branch that the size chose; what does nothing (``x.float()``, ``x.contiguous()``) leaves nothing at
all. So a graph says for which sizes, types and layouts of its arguments it stands, and what is run
for any others: the user's own statements where they can take its place, an error where a pass has
changed what it computes, or drew its random numbers in one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base.errors import fail
from rose_compiler.ir import facts
from rose_compiler.ir.ops import JOIN_ROWS, Op
from rose_compiler.ir.program import is_call, is_item, op_of, placeholders

#: In the attributes of a traced operation: its :class:`Sizes`.
SIZES = "sizes"
#: Keys whose ``repr`` is what Python reads back.
_PLAIN = (str, int, bool, type(None))
#: What code read of how a tensor lies in memory: nothing, its order at most, or its strides.
Laid = Literal["any", "order", "strides"]


@dataclass(frozen=True)
class Shape:
    """What a tensor, or an ``array``, must be: its sizes, None for one that may be any, and for
    ``sizes`` that may all be; its dtype and device, where these were read; how it lies in memory,
    where that was: ``layout`` is its strides, () for any that make it contiguous. ``rows`` it had
    when it was traced; it may have others."""

    sizes: tuple[int | None, ...] | None
    array: bool = False
    dtype: Any = None
    device: Any = None
    layout: tuple[int, ...] | None = None
    rows: int | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        value: Any,
        sizes: tuple[int | None, ...] | None,
        *,
        typed: bool,
        laid: Laid = "any",
    ) -> Shape:
        """What a value was traced as; ``typed``: with its dtype and device."""
        array = not isinstance(value, torch.Tensor)
        dtype = value.dtype if typed else None
        device = value.device if typed and not array else None
        rows = value.shape[0] if value.ndim else None
        return cls(sizes, array, dtype, device, layout_of(value, laid), rows)


@dataclass(frozen=True)
class Items:
    """What a tuple, list or dict (``of``) must hold, by index or key, and how much."""

    items: tuple[tuple[Any, Shape | Items | None], ...]
    of: type[tuple[Any, ...]] | type[list[Any]] | type[dict[Any, Any]] = tuple


Known = Shape | Items


class Whole:
    """A tuple of more or fewer items than a graph takes, in the place of each that it takes."""

    __slots__ = ("items",)

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items


@dataclass(frozen=True)
class Part:
    """A part of an operation: what it is handed (``params``) and which ``results`` it makes, by
    number, None for a value from the middle of the graph.

    Of the parameters, other parts make some (``made``, by number too), and random numbers that were
    drawn in front are some (``noises``, in the order of the draws); ``draws`` are left inside.
    ``ahead``: whether it may do more than its share, before the other parts. ``rows`` is a
    parameter that is a batch of rows, if one is."""

    params: tuple[str, ...]
    results: tuple[int | None, ...]
    made: Mapping[str, int | None] = field(default_factory=dict)
    noises: tuple[str, ...] = ()
    draws: int = 0
    ahead: bool = True
    rows: str | None = None


Parts = Callable[[Part], Callable[..., Any] | None]


@dataclass(frozen=True, eq=False)
class Sizes:
    """What a graph was proven for, by parameter; ``instead`` takes the same arguments where they
    are others, and returns what the operation returns. Of part of its rows, or what lacks some of
    its arguments, nothing can: ``stop`` raises. ``parts`` gives what takes the place of a part, or
    None. ``batched`` parameters may be handed rows of what is meant, of some trips or
    some shards."""

    known: Mapping[str, Known]
    instead: Callable[..., Any]
    stop: Callable[..., Any]
    batched: frozenset[str] = frozenset()
    parts: Parts | None = None

    def differ(self, params: tuple[str, ...], args: tuple[Any, ...]) -> bool:
        """Whether the graph was not proven for arguments of these sizes, types or layouts."""
        return self._asked(dict(zip(params, args, strict=False)))

    @cached_property
    def _asked(self) -> Callable[[Mapping[str, Any]], bool]:
        return _asked(self.known)

    def text(self, refs: Mapping[str, str], bind: Callable[[Any, str], str]) -> str:
        """The same question as Python, asked of variables; empty where any will do. ``bind`` names
        a key of a dict that has no text."""
        return _all_text(self.known, refs, bind)

    def or_instead(
        self, function: Callable[..., Any], params: tuple[str, ...]
    ) -> Callable[..., Any]:
        """``function``, or what takes its place, as the arguments are."""

        def call(*args: Any) -> Any:
            return (self.instead if self.differ(params, args) else function)(*args)

        return call

    def of_parts(self) -> Sizes:
        """The same where rows of the batch, or of several trips, are handed over."""
        free = {p: _any_rows(k) if p in self.batched else k for p, k in self.known.items()}
        return replace(self, known=free, instead=self.stop)


def sizes_of(op: Op) -> Sizes | None:
    """What an operation was proven for, if that is less than all sizes."""
    found: Sizes | None = op.attributes.get(SIZES)
    return found if found is not None and found.known else None


def with_batch(op: Op) -> None:
    """Note which parameters of an operation are batches whose rows it keeps apart."""
    if (found := sizes_of(op)) is not None:
        op.attributes[SIZES] = replace(found, batched=frozenset(op.signature.separable()))


def of_part(
    of: Op,
    body: fx.GraphModule,
    batched: frozenset[str],
    root: Op,
    part: Part,
    told: tuple[str, int | None] | None = None,
) -> Sizes | None:
    """The sizes of a ``part`` of an operation, with its results by their numbers among those of the
    captured ``root``. ``told`` is a parameter, with its rows, by whose type the part in front tells
    that it ran the user's statements."""
    if (found := sizes_of(of)) is None:
        return None
    names = {n.name for n in placeholders(body.graph)}
    inner = dict(zip(of.signature.params, _names(of), strict=False))
    known = {inner[p]: k for p, k in found.known.items() if inner.get(p) in names}
    if told is not None:
        known.setdefault(told[0], Shape(None, rows=told[1]))
    whole = sizes_of(root)
    instead = None if whole is None or whole.parts is None else whole.parts(part)
    return Sizes(known, instead or found.stop, found.stop, batched)


def hands_over(op: Op) -> bool:
    """Whether other sizes don't stop an operation: the user's statements take its place."""
    found = sizes_of(op)
    return found is not None and found.instead is not found.stop


def _names(op: Op) -> tuple[str, ...]:
    return () if op.body is None else tuple(n.name for n in placeholders(op.body.graph))


def takes_parts(node: fx.Node) -> bool:
    """Whether a node is handed rows of some shards, or of several trips, as a batch."""
    op = op_of(node)
    found = sizes_of(op)
    if found is None:
        return False
    # all that is batched has as many rows
    counts = (_rows(found.known.get(name)) for name in op.signature.params if name in found.batched)
    whole = next((n for n in counts if n is not None), None)
    for name, value in zip(op.signature.params, node.args, strict=False):
        if name not in found.batched or not isinstance(value, fx.Node):
            continue
        rows = facts.rows_of(facts.get(value).spec)
        if _joined(value) or (rows is not None and rows != whole):
            return True
    return False


def joined_as(node: fx.Node) -> tuple[Known, ...]:
    """What the entries that a node joins must be one by one, for the operations that take the
    whole: of that, it can't be seen any more."""
    found: list[Known] = []
    for user in node.users:
        if not is_call(user) or (sizes := sizes_of(op_of(user))) is None:
            continue
        for name, value in zip(op_of(user).signature.params, user.args, strict=False):
            if value is node and (known := sizes.known.get(name)) is not None:
                found.append(known)
    return tuple(found)


def all_as(known: Sequence[Known]) -> Callable[[Sequence[Any]], bool]:
    """Whether all entries of a list are what was proven."""
    differs = _asked({str(k): one for k, one in enumerate(known)})
    names = [str(k) for k in range(len(known))]
    return lambda entries: not any(differs(dict.fromkeys(names, e)) for e in entries)


def may_be_others(node: fx.Node) -> bool:
    """Whether an operation that is handed a draw may draw itself in its place."""
    users = (op_of(u) for u in node.users if is_call(u))
    return any(u.attributes.get("noises") and u.signature.writes for u in users)


def _joined(value: fx.Node) -> bool:
    """Whether a value holds what several trips made."""
    while is_item(value) and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    if not is_call(value) or is_call(value, JOIN_ROWS):
        return is_call(value)
    return op_of(value).kind == "graph" and any(map(_joined, value.all_input_nodes))


def _rows(known: Known | None) -> int | None:
    while isinstance(known, Items):
        known = next((k for _, k in known.items if k is not None), None)
    return known.rows if isinstance(known, Shape) else None


def refused(*args: Any) -> Any:
    """Stop: a graph would compute something else for sizes that it was not proven for.

    Raises:
        RuntimeFault: always.
    """
    shapes = [tuple(a.shape) for a in args if hasattr(a, "shape")]
    raise fail(
        "sizes-changed",
        "an operation that was taken apart is handed values of sizes that were not seen before, or "
        "of other types or layouts: " + ", ".join(map(str, shapes)),
    )


def layout_of(value: Any, laid: Laid) -> tuple[int, ...] | None:
    """What to compare of how a tensor or array lies in memory."""
    if laid == "any":
        return None
    array = not isinstance(value, torch.Tensor)
    if laid == "order" and (value.flags.c_contiguous if array else value.is_contiguous()):
        return ()
    return tuple(value.strides if array else value.stride())


def _asked(known: Mapping[str, Known]) -> Callable[[Mapping[str, Any]], bool]:
    """:meth:`Sizes.text` as a function of the arguments by parameter."""
    names: dict[str, Any] = {"torch": torch}

    def bind(thing: Any, name: str) -> str:
        names[f"{name}_{len(names)}"] = thing
        return next(reversed(names))

    text = _all_text(known, {p: f"given[{p!r}]" for p in known}, bind)
    found: Callable[[Mapping[str, Any]], bool] = eval(f"lambda given: {text or False}", names)
    return found


def _all_text(
    known: Mapping[str, Known], refs: Mapping[str, str], bind: Callable[[Any, str], str]
) -> str:
    found = (part for p, k in known.items() if p in refs for part in _text(refs[p], k, bind))
    return " or ".join(found)


def _text(ref: str, known: Known | None, bind: Callable[[Any, str], str]) -> Iterator[str]:
    if known is None:
        return
    if isinstance(known, Items):
        keys = [repr(k) if type(k) in _PLAIN else bind(k, "key") for k, _ in known.items]
        yield f"not isinstance({ref}, {known.of.__name__})"
        # in their order: code may go through them
        is_dict = known.of is dict
        yield f"[*{ref}] != [{', '.join(keys)}]" if is_dict else f"len({ref}) != {len(keys)}"
        for (_, inner), at in zip(known.items, keys, strict=True):
            yield from _text(f"{ref}[{at}]", inner, bind)
        return
    # numbers and None have neither sizes nor a dtype
    kind = bind(np.ndarray, "ndarray") if known.array else "torch.Tensor"
    yield f"not isinstance({ref}, {kind})"
    if known.dtype is not None:
        kept = f"dtype.str != {known.dtype.str!r}" if known.array else f"dtype is not {known.dtype}"
        yield f"{ref}.{kept}"
    if known.device is not None:
        cpu = known.device.type == "cpu"
        yield f"not {ref}.is_cpu" if cpu else f"{ref}.get_device() != {known.device.index}"
    if known.layout is not None:
        strides = "strides" if known.array else "stride()"
        order = "flags.c_contiguous" if known.array else "is_contiguous()"
        yield f"{ref}.{strides} != {known.layout}" if known.layout else f"not {ref}.{order}"
    if known.sizes is None:
        return
    first, *rest = known.sizes or (0,)
    if None not in known.sizes:
        yield f"{ref}.shape != {known.sizes}"
    elif rest and None not in rest and first is None:
        yield f"{ref}.shape[1:] != {tuple(rest)}"
    else:
        yield f"{ref}.ndim != {len(known.sizes)}"


def _any_rows(known: Known) -> Known:
    if isinstance(known, Items):
        parts = ((k, None if inner is None else _any_rows(inner)) for k, inner in known.items)
        return replace(known, items=tuple(parts))
    return replace(known, sizes=(None, *known.sizes[1:])) if known.sizes else known
