"""Effects of expressions: names, attribute paths, subscripts, operators, comprehensions."""

from __future__ import annotations

import ast
import inspect
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rose_compiler.frontend import effects_call, effects_iter
from rose_compiler.frontend.attributes import NOT_STATIC, read_attribute
from rose_compiler.frontend.changes import mangled
from rose_compiler.frontend.effects_val import (
    FRESH,
    IMMUTABLE,
    Effects,
    Val,
    grads_of,
    has_plain_items,
    is_tensor,
    iterated,
    joined,
    loaded,
)
from rose_compiler.frontend.scalar import is_scalar
from rose_compiler.frontend.source import is_user_type
from rose_compiler.ir.effects import OUTSIDE

if TYPE_CHECKING:
    from rose_compiler.frontend.effects_of import Surroundings

_OPERANDS = (*IMMUTABLE, torch.Tensor, np.ndarray, list, tuple, dict, set)
_META = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout"))
_ITEMS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict, tuple)


class ExpressionWalker:
    """The part of the walk that looks at expressions; one instance a function walked."""

    def __init__(
        self,
        around: Surroundings,
        globals_: dict[str, Any],
        bindings: dict[str, Val],
        closure: dict[str, Any] | None = None,
        chain: tuple[Any, ...] = (),
        owner: str | None = None,
    ) -> None:
        self.around = around
        self.globals = globals_
        self.bindings = bindings
        self.closure = closure or {}
        self.chain = chain
        self.owner = owner
        self.returned: list[Val] = []
        self.yielded: list[Val] | None = None  # of a generator's body

    @property
    def out(self) -> Effects:
        return self.around.out

    def statements(self, statements: list[ast.stmt]) -> None:
        """Walk statements in order."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Val) -> None:
        """Bind or store a value."""
        raise NotImplementedError

    def keep(self, holders: frozenset[str], value: Val) -> None:
        """A container or object keeps a reference to a value."""
        raise NotImplementedError

    # -- effects -------------------------------------------------------------------------------

    def read(self, value: Val, suffix: str = "") -> None:
        """The data of a value is read, an index of it if one is given; once is enough."""
        if value.loaded:
            return
        for place in value.places:
            self.out.reads.setdefault(place + suffix)
        for place in value.shares:
            self.out.reads.setdefault(place)

    def write_inside(self, value: Val, suffix: str = "", *, items: bool = False) -> None:
        """The contents of a value are changed in place; with ``items`` only which items it has."""
        for place in value.places:
            self.out.writes.setdefault(place + suffix)
        for place in value.shares:
            self.out.writes.setdefault(place)
        self.out.inside |= value.places | value.shares
        if not items:
            self.out.deep |= value.places | value.shares

    def unknown(self, what: str, node: ast.AST) -> Val:
        """Something of which nothing is known."""
        if not self.out.unknown:
            self.out.unknown = f"{what} (line {getattr(node, 'lineno', '?')})"
        return FRESH

    def live(self, obj: Any, written: frozenset[str], *, fixed: bool = True) -> Val:
        """A live object that a path leads to; ``fixed`` says that the path always leads to it."""
        name = self.around.names.name_of(obj)
        if name is None and not written:
            name = self.around.named(obj)
        own = written if name is None else frozenset({self.around.entry(name)})
        shares = frozenset(self.around.entry(n) for n in self.around.names.shared(obj))
        if not fixed:
            return Val(own | written, NOT_STATIC, type(obj), loaded=False, shares=shares)
        return Val(own, obj, type(obj), loaded=False, shares=shares)

    def iterate(self, value: Val, node: ast.AST) -> Val:
        """Reading all items of a value; an iterator is used up by it."""
        self.read(value)
        pending = effects_iter.pending(self, value, node)
        if pending is not None:
            self.write_inside(value)
            self.out.add(pending)
            return iterated(value)
        if value.type is not None and value.each is None and value.items is None:
            kind: type[Any] = value.type
            if hasattr(kind, "__next__"):
                self.write_inside(value)
                if is_user_type(kind) or issubclass(kind, types.GeneratorType):
                    return self.unknown(f"iteration over a {kind.__name__}", node)
            elif is_user_type(kind) and hasattr(kind, "__iter__"):
                return self.unknown(f"iteration over a {kind.__name__}", node)
        return iterated(value)

    # -- expressions ---------------------------------------------------------------------------

    def expr(self, node: ast.expr, load: bool = True) -> Val:
        """The value of an expression; with ``load`` its data counts as read."""
        value = self.walk(node)
        if load and not value.loaded:
            self.read(value)
            value = loaded(value)
        return value

    def walk(self, node: ast.expr) -> Val:
        """The value of an expression, its data not read where it is a path."""
        if isinstance(node, ast.Constant):
            return Val(type=type(node.value), obj=node.value)
        if isinstance(node, ast.Name):
            return self.name(node)
        if isinstance(node, ast.Attribute):
            return self.attribute(node)
        if isinstance(node, ast.Subscript):
            return self.subscript(node)
        if isinstance(node, ast.Call):
            return effects_call.call(self, node)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self.comprehension(node)
        if isinstance(node, ast.NamedExpr):
            value = self.expr(node.value)
            self.bindings[node.target.id] = value
            return value
        if isinstance(node, ast.Lambda):
            return self.unknown("a lambda", node)
        if isinstance(node, ast.Yield) and self.yielded is not None:
            self.yielded.append(Val() if node.value is None else self.expr(node.value))
            return FRESH
        if isinstance(node, ast.YieldFrom) and self.yielded is not None:
            self.yielded.append(self.iterate(self.expr(node.value), node))
            return FRESH
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            return self.unknown(f"`{type(node).__name__.lower()}`", node)
        if isinstance(node, ast.Starred):
            return self.iterate(self.expr(node.value), node)
        return self.compound(node)

    def compound(self, node: ast.expr) -> Val:
        """Operators and displays: read every part; the result may hold or be one of them."""
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            parts = [self.expr(e) for e in node.elts]
            kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
            if any(isinstance(e, ast.Starred) for e in node.elts):
                return Val(type=kind, each=joined(parts))
            items = tuple(parts) if kind is not set else None
            return Val(type=kind, items=items, each=joined(parts) if kind is set else None)
        if isinstance(node, ast.Dict):
            return self.dict_display(node)
        operands = [self.expr(c) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare)):
            return self.operator(node, operands)
        if isinstance(node, ast.BoolOp):
            return joined(operands)
        if isinstance(node, ast.IfExp):
            return joined(operands[1:])
        if isinstance(node, (ast.JoinedStr, ast.FormattedValue)):
            return Val(type=str)
        if isinstance(node, ast.Slice):
            return Val(type=slice)
        places = frozenset(p for o in operands for p in o.all_places)
        return Val(places)

    def dict_display(self, node: ast.Dict) -> Val:
        """A dict: by key where all keys are text."""
        items: dict[str, Val] = {}
        others: list[Val] = []
        for key, value in zip(node.keys, node.values, strict=True):
            found = self.expr(value)
            if key is not None:
                self.expr(key)
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                items[key.value] = found
            else:
                others.append(found)
        if others:
            places = frozenset(p for v in (*items.values(), *others) for p in v.all_places)
            return Val(places, NOT_STATIC, dict)
        return Val(type=dict, items=items)

    def operator(self, node: ast.expr, operands: list[Val]) -> Val:
        """An operator: a new value, unless a class of the user's defines it."""
        kinds = [o.type for o in operands]
        if any(t is not None and is_user_type(t) and not issubclass(t, _OPERANDS) for t in kinds):
            identity = isinstance(node, ast.Compare) and all(
                isinstance(o, (ast.Is, ast.IsNot)) for o in node.ops
            )
            if not identity and not isinstance(node, ast.UnaryOp):
                return self.unknown(f"an operator of `{ast.unparse(node)}`", node)
        is_array = any(t is not None and issubclass(t, np.ndarray) for t in kinds)
        if any(t is not None and issubclass(t, torch.Tensor) for t in kinds):
            return Val(type=torch.Tensor)
        if is_array:
            return Val(type=np.ndarray)
        if isinstance(node, ast.Compare) or isinstance(getattr(node, "op", None), ast.Not):
            return Val(type=bool if None not in kinds else None)
        kind = kinds[0] if len(set(kinds)) == 1 else None
        if kind in (list, tuple):
            return Val(type=kind, each=joined([iterated(o) for o in operands]))
        if kind is int and isinstance(getattr(node, "op", None), ast.Div):
            kind = float
        return Val(type=kind)

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Val:
        before = dict(self.bindings)
        for generator in node.generators:
            self.assign(generator.target, self.iterate(self.expr(generator.iter), node))
            for condition in generator.ifs:
                self.expr(condition)
        if isinstance(node, ast.DictComp):
            self.expr(node.key)
            made = Val(self.expr(node.value).all_places, NOT_STATIC, dict)
        else:
            kind = {ast.ListComp: list, ast.SetComp: set}.get(type(node))
            made = Val(type=kind, each=self.expr(node.elt))
        self.bindings = before
        return made

    def name(self, node: ast.Name) -> Val:
        found = self.bindings.get(node.id)
        if found is not None:
            return found
        if node.id in self.closure:
            return self.outside(node.id, self.closure[node.id])
        space = self.globals
        builtin = space.get("__builtins__", __builtins__)
        builtin = builtin if isinstance(builtin, dict) else vars(builtin)
        if node.id in space:
            if self.around.changes.global_(space, node.id):
                self.out.reads.setdefault("host")  # a rebound global has no state of its own
                return Val(type=type(space[node.id]))
            return self.outside(node.id, space[node.id])
        if node.id in builtin:
            return Val(obj=builtin[node.id], type=type(builtin[node.id]))
        return FRESH

    def outside(self, name: str, value: Any) -> Val:
        """A global or closure variable of a function that is called."""
        if is_scalar(value) or inspect.isroutine(value) or inspect.ismodule(value):
            return Val(obj=value, type=type(value))
        if isinstance(value, type):
            return Val(obj=value, type=type(value))
        return self.live(value, frozenset())

    # -- paths ---------------------------------------------------------------------------------

    def attribute(self, node: ast.Attribute) -> Val:
        base = self.expr(node.value, load=False)
        name = mangled(node.attr, self.owner)
        if base.static:
            return self.attribute_of_live(base, name, node)
        if is_tensor(base) or (base.type is None and name == "grad"):
            return self.attribute_of_tensor(base, name)
        if isinstance(base.items, dict) and name in ("items", "keys", "values", "get"):
            return Val(base.all_places)
        kind = base.type
        raw = None if kind is None else inspect.getattr_static(kind, name, None)
        if isinstance(raw, property) and kind is not None and is_user_type(kind):
            return effects_call.property_call(self, node, raw, base)
        for place in base.all_places:
            self.out.reads.setdefault(f"{place}.{name}" if place in base.places else place)
        return Val(frozenset(f"{p}.{name}" for p in base.places) | base.shares)

    def attribute_of_live(self, base: Val, name: str, node: ast.Attribute) -> Val:
        """An attribute of an object that is known."""
        written = frozenset(f"{p}.{name}" for p in base.places)
        value = read_attribute(base.obj, name)
        if value is NOT_STATIC:
            raw = inspect.getattr_static(base.obj, name, None)
            if isinstance(raw, property):
                return effects_call.property_call(self, node, raw, base)
            if raw is not None or is_user_type(type(base.obj)):
                self.read(base)
                return Val(written)
            return self.unknown(f"attribute `{name}`", node)
        fixed = not self.around.changes.attribute(base.obj, name)
        if inspect.ismethod(value) or inspect.isbuiltin(value):
            if fixed:
                return Val(base.places, value, type(value), shares=base.shares)
            return Val(base.places | written, NOT_STATIC, None)
        if is_tensor(base):
            return self.attribute_of_tensor(base, name)
        if fixed and (inspect.isroutine(value) or isinstance(value, type) or not base.places):
            return Val(frozenset(), value, type(value))
        if not fixed:
            if not written and isinstance(base.obj, type):  # no state: whoever sets it is unknown
                self.out.reads.setdefault(f"@{OUTSIDE}.{base.obj.__name__}_{name}")
            for place in written:  # which object it is, is read here
                self.out.reads.setdefault(place)
            if value is None:
                return Val(written)
            if is_scalar(value) and type(value) is not tuple:
                return Val(type=type(value))
            return self.live(value, written, fixed=False)
        if is_scalar(value):
            return Val(type=type(value), obj=value)
        return self.live(value, written)

    def attribute_of_tensor(self, base: Val, name: str) -> Val:
        if name in _META:
            return FRESH
        if name == "grad":
            places = frozenset(grads_of(p) for p in base.all_places)
            self.out.reads.update(dict.fromkeys(places))
            return Val(places, NOT_STATIC, torch.Tensor)
        if name in ("T", "mT", "H", "mH", "flat"):
            return base.view(base.type, loaded=base.loaded)
        kind = base.type if name in ("data", "real", "imag") else None
        return Val(base.places, NOT_STATIC, kind, loaded=base.loaded, shares=base.shares)

    def subscript(self, node: ast.Subscript) -> Val:
        base = self.expr(node.value, load=False)
        self.expr(node.slice)
        constant = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(base.items, tuple) and type(constant) is int:
            inside = -len(base.items) <= constant < len(base.items)
            return base.items[constant] if inside else FRESH
        if isinstance(base.items, dict) and isinstance(constant, str) and constant in base.items:
            return base.items[constant]
        if base.static and isinstance(base.obj, _ITEMS) and constant is not None:
            try:
                inner = base.obj[constant]  # type: ignore[index]
            except (IndexError, TypeError, KeyError):
                return Val(base.all_places)
            return self.live(inner, base.places)
        if base.static and type(base.obj) is dict and isinstance(constant, str):
            found = base.obj.get(constant)
            if isinstance(found, (torch.Tensor, np.ndarray)) and constant.isidentifier():
                written = frozenset(f"{p}.{constant}" for p in base.places)
                return self.live(found, written, fixed=False)
        self.read(base, self.region(node.slice, base))
        if has_plain_items(base):
            return FRESH
        if base.each is not None or base.items is not None:
            return iterated(base)
        return base.view(base.type if is_tensor(base) else None)

    # -- indices -------------------------------------------------------------------------------

    def region(self, index: ast.expr, base: Val) -> str:
        """The index of a subscript as the text of an effect entry, "" for the whole."""
        if not is_tensor(base):
            return ""
        texts: list[str] = []
        for axis in index.elts if isinstance(index, ast.Tuple) else [index]:
            text = self.axis(axis)
            if text == ":" and not isinstance(axis, ast.Slice):
                break  # a mask or an ellipsis: later parts index other axes than they seem to
            texts.append(text)
        return "" if all(t == ":" for t in texts) else f"[{', '.join(texts)}]"

    def axis(self, index: ast.expr) -> str:
        """One axis of an index: an affine expression in integer variables, or ":"."""
        if isinstance(index, ast.Constant) and type(index.value) is int and index.value >= 0:
            return str(index.value)
        if isinstance(index, ast.Name):
            found = self.bindings.get(index.id)
            if found is not None and found.type is int and found.index:
                return found.index
        if isinstance(index, ast.BinOp) and isinstance(index.op, (ast.Add, ast.Sub, ast.Mult)):
            left, right = self.axis(index.left), self.axis(index.right)
            if ":" not in (left, right):
                op = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(index.op)]
                return f"({left} {op} {right})"
        return ":"
