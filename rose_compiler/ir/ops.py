"""Operations: what a node of a program calls.

An :class:`Op` is the target of a ``call_function`` node. It has a signature (what it reads, writes
and along which axis it is separable), a kind, and an implementation or none: a program that was
parsed from text has unbound operations, which passes and verifier accept and which raise when run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from rose_compiler.base.apart import Apart, by_trip
from rose_compiler.base.errors import fail
from rose_compiler.base.frozen import frozen
from rose_compiler.ir import builtin_impls as impls

# What a node calls. "block": the user's own statements, kept as Python. "graph": straight-line
# torch, traced to an fx graph of torch calls. "loss": such a graph, and the way back through it:
# the gradients of its first result go to `.grad`, its other results come out. "component": one
# call of a component (policy, simulator, trainer). "step": a component call that advances a
# simulator. "builtin": see below.
#: Attribute of a loss: how many parameters, the last ones, say which gradients are left out.
DROPPED = "dropped"

KINDS = ("block", "graph", "loss", "component", "step", "builtin")


#: In the attributes of an operation that does nothing but read, or assign, one attribute.
LOADS, STORES = "loads", "stores"
#: In those of one that pickles an input of its to a file, and does nothing else with it: its name.
SAVES = "saves"


@dataclass(frozen=True)
class Signature:
    """What an operation is allowed to do.

    ``params`` are the parameter names in call order, state roots included. ``reads`` and ``writes``
    are effect entries in terms of these names (``"buf.obs[t]"``) or of process-wide states
    (``"rng:torch"``); ``None`` means unknown, that is everything. ``batch`` promises that the rows
    of the named parameters and results (``"return.0"``) along the given axis do not mix. ``exact``
    says whether a tile of rows was seen to give the same bits as the whole (``None``: not probed).
    ``records`` are the entries of what it uses while it records an autograd graph that somebody may
    go back through (``"*"`` for anything), empty if it records none, ``None`` if that is not known:
    then the type of its result tells.
    """

    name: str
    params: tuple[str, ...] = ()
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] | None = None
    results: int = 1  # 1: the value itself; n > 1: a tuple of n; 0: nothing
    batch: tuple[tuple[str, int], ...] | None = None
    exact: bool | None = None
    may_raise: bool = True
    declared: bool = False  # the user stated the effects
    records: tuple[str, ...] | None = None

    @property
    def pure(self) -> bool:
        """Whether the operation reads no state and writes none."""
        return self.reads == () and self.writes == ()

    def separable(self) -> Mapping[str, int]:
        """Batch axes by name; empty when nothing is promised."""
        return dict(self.batch or ())


class Op:
    """A callable with a signature; the target of a ``call_function`` node.

    Two operations are the same only if they are the same object. ``body`` is the traced graph of a
    ``"graph"`` or ``"loss"`` operation; ``source`` holds the user's statements, for dumps;
    ``attributes`` is a small mapping of further frozen facts that belong to the operation rather
    than to one call:

    * ``"step"``: ``{"env": param, "action": param}`` of a step;
    * ``"keeps"``: pairs ``(container, value)`` of parameters where the container goes on holding a
      reference to the value, so that who touches the container may read it;
    * ``"fused"``: the names of the operations that a loss, or a graph for Inductor, stands for;
    * ``"inductor"``: whether Inductor is to compile a graph;
    * ``"script"``: whether TorchScript is to run a graph, or a loss that Inductor does not compile;
    * ``"tiles"``: in how many tiles of rows TorchScript is to run a loss, if they add up;
    * ``"replayed"``: whether what Inductor makes of it is to be captured as a CUDA graph;
    * ``"retains"``: parameters whose values something goes on holding a reference to;
    * ``"items"``: parameters that are containers which get or lose items: what is written of them
      is which items they hold, not the memory of any;
    * ``"loads"``, ``"stores"``: ``(owner, attribute)`` and ``(owner, attribute, value)`` of an
      operation that does nothing but read, or assign, one attribute of an object;
    * ``"once"``: whether it is a part of a graph that a pass has moved in front of a loop;
    * ``"part_of"``: ``(operation, positions)`` of a part that a pass cut out of a captured
      operation: which of its results each result of the part is, ``None`` for a value inside;
    * ``"made"``, ``"noises"``: the parameters of such a part that other parts make, by the numbers
      of the results or ``None``, and those that are random numbers drawn in front.
    """

    def __init__(
        self,
        signature: Signature,
        impl: Callable[..., Any] | None = None,
        *,
        kind: str = "block",
        body: fx.GraphModule | None = None,
        source: tuple[str, ...] = (),
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown kind of operation: {kind!r}")
        self.signature = signature
        self.impl = impl
        self.kind = kind
        self.body = body
        self.source = source
        self.attributes: dict[str, Any] = dict(attributes or {})
        # fx prints call_function targets by these, and takes some names for more than names
        self.__name__ = re.sub(r"\W", "_", signature.name, flags=re.ASCII)
        self.__qualname__ = self.__name__
        self.__module__ = __name__

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def bound(self) -> bool:
        return self.impl is not None

    def with_signature(self, **changes: Any) -> Op:
        """A copy with a changed signature and the same implementation."""
        return Op(
            replace(self.signature, **changes),
            self.impl,
            kind=self.kind,
            body=self.body,
            source=self.source,
            attributes=self.attributes,
        )

    def __call__(self, *args: Any) -> Any:
        if self.impl is None:
            raise fail("parse-unbound", f"operation {self.name!r} was run without implementation")
        if self.kind == "graph" and any(type(a) is Apart for a in args):
            return self.by_trip(self.impl)(*args)
        return self.impl(*args)

    def by_trip(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which does what the operation does, for inputs that may be apart. Those of
        one trip are what the operation was captured with, or what runs instead is right for them.
        """
        axes, params = self.signature.separable(), self.signature.params
        sizes = self.attributes.get("sizes")
        each = None if sizes is None else sizes.or_instead(function, params)
        return by_trip(function, [k for k, p in enumerate(params) if p in axes], each)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


@dataclass(frozen=True)
class Builtin:
    """One row of the built-in table: a structural operation with a fixed meaning."""

    op: Op
    doc: str


BUILTINS: dict[str, Builtin] = {}


def _builtin(
    name: str,
    params: tuple[str, ...],
    doc: str,
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    results: int = 1,
    impl: Callable[..., Any] | None = None,
    batch: tuple[tuple[str, int], ...] | None = None,
    attributes: Mapping[str, Any] | None = None,
    may_raise: bool = False,
) -> Op:
    signature = Signature(
        name, params, reads, writes, results=results, may_raise=may_raise, batch=batch
    )
    op = Op(signature, impl, kind="builtin", attributes=attributes)
    BUILTINS[name] = Builtin(op, doc)
    return op


# Structure. Their layout of arguments is read only through the views in program.py.
LOOP = _builtin("loop", ("body", "bounds", "carried", "captured"), "a loop; see program.LoopView")
BRANCH = _builtin(
    "branch", ("pred", "then", "orelse", "captured"), "a branch; see program.BranchView"
)
BREAK_IF = _builtin(
    "break_if", ("pred", "carried"), "leave the loop, handing out the carried values"
)
CONTINUE_IF = _builtin("continue_if", ("pred", "carried"), "go on with the next trip")
STATE = _builtin("state", ("root", "path"), "an object below a root: root.path, resolved at entry")


class _Unbound:
    """The value of a variable that no statement has assigned yet."""

    _instance: _Unbound | None = None

    def __new__(cls) -> _Unbound:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "UNBOUND"

    def __reduce__(self) -> str:
        return "UNBOUND"  # one object, by whatever way it is handed on


UNBOUND = _Unbound()


# Data movement that passes introduce.
ROWS = _builtin("rows", ("value", "lo", "hi"), "rows lo..hi of a batch, a view", impl=impls.rows)
CONCAT = _builtin("concat", ("parts",), "shards joined along the batch axis", impl=impls.concat)
RANDN = _builtin(
    "randn",
    ("shape", "dtype", "device"),
    "standard normal draw of the whole batch",
    reads=(RNG := "rng:torch",),
    writes=(RNG,),
    impl=impls.randn,
)
DRAW = _builtin(
    "draw_noise",
    ("kind", "shape", "parameters", "dtype", "device"),
    "any other draw of the whole batch: a function of rose_compiler.ir.noise by name",
    reads=(RNG,),
    writes=(RNG,),
    impl=impls.draw,
)
SHARD = _builtin(
    "shard", ("env", "index"), "one independent shard of a simulator: env.shards()[index]"
)
MERGE = _builtin(
    "merge",
    ("env", "results"),
    "the whole batch's result out of its shards' results",
    impl=impls.merge,
)


SNAPSHOT = _builtin(
    "snapshot",
    ("value",),
    "a copy that owns its memory, of what its maker may write again",
    impl=impls.snapshot,
    attributes={"maybe_unbound": ("value",)},  # a variable that nothing has assigned stays so
)
VERSION = _builtin(
    "version",
    ("value",),
    "a copy of a parameter as it is now, for those who read it while it is trained",
    reads=("value",),
    impl=impls.snapshot,
)
FREEZE = _builtin(
    "freeze",
    ("value",),
    "an object as pickling finds it now, to be written to a file later",
    reads=("value",),
    impl=frozen,
    attributes={"maybe_unbound": ("value",)},
    may_raise=True,  # an object may say that it can't be pickled
)
# Values of all trips of a loop: a list that lives across it, one entry a trip.
NEW_LIST = _builtin("new_list", (), "an empty list", impl=list)
APPEND = _builtin(
    "append",
    ("items", "value"),
    "one more entry at the end of a list",
    reads=("items",),
    writes=("items",),
    results=0,
    impl=impls.append,
    attributes={"keeps": (("items", "value"),)},
)
JOIN_ROWS = _builtin(
    "join_rows",
    ("items",),
    "the entries of a list joined along the batch axis, or apart where they are not of one kind",
    reads=("items",),
    impl=impls.join_rows,
)
SPLIT_ROWS = _builtin(
    "split_rows",
    ("value", "items"),
    "rows cut into views, as many each as the entries of a list have",
    reads=("items",),
    impl=impls.split_rows,
)
PIECE = _builtin(
    "piece",
    ("parts", "index", "start", "step"),
    "the part that belongs to one trip of a range: parts[(index - start) // step]",
    impl=impls.piece,
)


FUSE = _builtin(
    "fuse",
    ("optimizer",),
    "steps of an optimizer run as fused kernels from here to the end of the run",
    reads=("optimizer",),
    writes=("optimizer",),
    results=0,
    impl=impls.fuse,
)


BATCH_WRAPPERS = _builtin(
    "batch_wrappers",
    ("env",),
    "the wrappers of a simulator's environments advance at once from here to the end of the run",
    reads=("env",),
    writes=("env",),
    results=0,
    impl=impls.batch_wrappers,
)

#: Switches that are on for a run.
SWITCHES = (FUSE, BATCH_WRAPPERS)


@dataclass
class OpTable:
    """Operations of one program by name; names are unique."""

    by_name: dict[str, Op] = field(default_factory=dict)

    def fresh(self, stem: str) -> str:
        """A name that no operation has yet."""
        if stem not in self.by_name and stem not in BUILTINS:
            return stem
        n = 1
        while f"{stem}_{n}" in self.by_name:
            n += 1
        return f"{stem}_{n}"

    def add(self, op: Op) -> Op:
        if op.name in self.by_name and self.by_name[op.name] is not op:
            raise ValueError(f"two operations named {op.name!r}")
        self.by_name[op.name] = op
        return op
