# ruff: noqa: SIM905 (tables of names read better as words than as quoted lists)
"""Which torch functions the recorder passes, refuses, rewrites or enters, by name."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.distributions import Distribution

from rose_compiler.ir import functions, noise

#: values that a graph may hold as they are
STATIC = (
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(Ellipsis),
)
_PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
)
#: switches of thread-local modes, noticed by their effect
MODE_SWITCHES = frozenset(
    """
    _set_grad_enabled set_autocast_enabled set_autocast_dtype set_autocast_cache_enabled
    autocast_increment_nesting autocast_decrement_nesting clear_autocast_cache
    """.split()
)
#: what hangs on shapes and types only, never on data
METADATA = frozenset(
    """
    size dim ndimension numel nelement stride is_contiguous element_size is_floating_point
    is_complex is_signed is_conj is_neg is_inference is_shared is_pinned get_device dim_order
    has_names is_same_size result_type can_cast __len__ __hash__ is_storage
    """.split()
)
_HOST = ("host-read", "Python reads data of a tensor")
_PURE = ("not-pure", "it changes a tensor other than by computing")
_GRAD = ("grad-graph", "it runs or changes an autograd graph")
_OPAQUE = ("opaque-call", "what it does can't be recorded")
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        """
        item tolist numpy __array__ __float__ __int__ __index__ __complex__ __contains__ __format__
        __repr__ __str__ is_nonzero equal allclose data_ptr const_data_ptr storage untyped_storage
        __dlpack__ __array_wrap__ storage_offset is_set_to _is_view
        """.split(),
        _HOST,
    ),
    **dict.fromkeys(
        """
        requires_grad_ share_memory_ set_ resize_ resize_as_ apply_ map_ map2_ swap_tensors detach_
        module_load __setstate__
        """.split(),
        _PURE,
    ),
    **dict.fromkeys(
        """
        backward grad retain_grad register_hook register_post_accumulate_grad_hook
        """.split(),
        _GRAD,
    ),
    **dict.fromkeys("__deepcopy__ __reduce_ex__ compile save load as_subclass".split(), _OPAQUE),
}
#: properties that are views or copies of the data
VIEW_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag", "data")
#: methods whose result, if it has the operand's shape and strides, is the operand again
RESHAPES = frozenset("expand expand_as reshape view view_as flatten to float double half".split())
#: functions whose result borrows the memory of an array
BORROWING = frozenset("as_tensor asarray from_numpy frombuffer from_dlpack tensor".split())

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "matmul": operator.matmul,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
}
_UNARY: dict[str, Callable[..., Any]] = {
    "__invert__": operator.invert,
    "__neg__": operator.neg,
    "__abs__": operator.abs,
}
_METHODS = {"__eq__": "eq", "__ne__": "ne"}

# Methods that take sizes or axes one by one, where the function wants a tuple of them.
_SIZES_APART = ("reshape", "permute", "flip", "tile")

# Built-in functions behind those of Python, and behind fused modules: under no public name.
_INNER = {
    **{n: getattr(torch._C._nn, n) for n in dir(torch._C._nn) if not n.startswith("_")},
    **{
        n: getattr(torch._C._VariableFunctions, n)
        for n in (
            *("_native_multi_head_attention", "_transformer_encoder_layer_fwd", "einsum", "norm"),
            *("cdist", "tensordot", "meshgrid", "broadcast_tensors", "split", "split_with_sizes"),
            *("atleast_1d", "atleast_2d", "atleast_3d", "block_diag", "cartesian_prod", "stft"),
        )
    },
}
for _name, _function in _INNER.items():
    if callable(_function) and functions.name_of(_function) is None:
        functions.register(f"rose_compiler.nn.{_name}", _function)


def _out_of_place() -> dict[str, Callable[..., Any]]:
    kept = set(
        """
        copy_ fill_ zero_ set_ resize_ normal_ bernoulli_ random_ uniform_ exponential_ geometric_
        cauchy_ log_normal_ squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ detach_ dropout_
        requires_grad_ index_put_ rrelu_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_
        """.split()
    )
    found: dict[str, Callable[..., Any]] = {}
    for name in dir(torch.Tensor):
        if not name.endswith("_") or name.startswith("_") or name in kept:
            continue
        function = getattr(torch._C._VariableFunctions, name[:-1], None)
        function = function or getattr(torch.Tensor, name[:-1], None)
        if function is not None:
            found[name] = function
    return found


#: functions that do out of place what a method does in place
OUT_OF_PLACE = _out_of_place()


def cheapest(func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The same call in the form that costs least in Python: an operator, or a built-in function.

    A method whose name is also a function of torch is that function: both are generated from one
    declaration.
    """
    is_method = isinstance(func, types.MethodDescriptorType | types.WrapperDescriptorType)
    wanted = 3 if name == "__setitem__" else 2
    if is_method and name in _OPERATORS and len(args) == wanted and not kwargs:
        return _OPERATORS[name], args, kwargs
    if is_method and name in _UNARY and len(args) == 1:
        return _UNARY[name], args, kwargs
    if is_method:
        plain_name = _METHODS.get(name, name)
        function = getattr(torch._C._VariableFunctions, plain_name, None)
        if function is not None and getattr(torch, plain_name, None) is function:
            sizes = args[1:]
            if name in _SIZES_APART and sizes and not isinstance(sizes[0], tuple | list):
                args = (args[0], tuple(sizes))
            return function, args, kwargs
    return func, args, kwargs


#: in-place draws, and the function that makes a new tensor of such numbers
DRAWS_IN_PLACE: dict[str, Callable[..., Any]] = {
    "normal_": noise.normal,
    "uniform_": noise.uniform,
    "exponential_": noise.exponential,
}
_UNFILLED = (
    torch.empty,
    torch.empty_like,
    torch.Tensor.new_empty,
    torch.zeros,
    torch.zeros_like,
    torch.Tensor.new_zeros,
)


def draw_of(name: str, args: Any, kwargs: Any, tensor: torch.Tensor) -> Any:
    """The call that makes what an in-place draw fills a just-made tensor with, if it is one."""
    made = args[0]
    unfilled = isinstance(made, fx.Node) and made.target in _UNFILLED and not made.users
    if not unfilled or kwargs or not tensor.is_contiguous():
        return None
    rest = {"dtype": tensor.dtype, "device": tensor.device}
    return DRAWS_IN_PLACE[name], (tuple(tensor.shape), *args[1:]), rest


def expand_sizes(tensor: torch.Tensor, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes for ``tensor.expand`` with -1 wherever the tensor has that size already."""
    flat = _flat(sizes)
    new = len(flat) - tensor.dim()
    return tuple(
        -1 if i >= new and type(s) is int and s == tensor.shape[i - new] else s
        for i, s in enumerate(flat)
    )


def reshape_sizes(result: torch.Tensor, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes for a reshape to ``result`` with -1 for the first: batches mostly come first, and then
    the call does for any number of rows. Where -1 stands elsewhere, the first is meant as it is."""
    flat = _flat(sizes)
    fixed = all(type(s) is int for s in flat)
    if not fixed or result.numel() == 0 or len(flat) != result.dim() or -1 in flat[1:]:
        return sizes
    return ((-1, *result.shape[1:]),) if flat else sizes


def with_free_sizes(
    name: str, args: tuple[Any, ...], values: tuple[Any, ...], result: Any
) -> tuple[Any, ...] | None:
    """The operands of an ``expand``, ``view`` or ``reshape`` with -1 for sizes that the code gives
    as numbers, ``None`` where it gives no such. With other operands the code may raise, or mean
    something else: where the first size is fixed and a later one is not, rows are not rows."""
    if name == "expand" and values:
        sizes = expand_sizes(values[0], args[1:])
    elif name in ("view", "reshape") and isinstance(result, torch.Tensor):
        sizes = reshape_sizes(result, args[1:])
        if -1 in _flat(sizes)[1:]:
            return args
    else:
        return None
    return None if _flat(sizes) == _flat(args[1:]) else (args[0], *sizes)


def _flat(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes


def unchanged(source: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a view equals the tensor that it is one of."""
    return (
        source.data_ptr() == result.data_ptr()
        and source.shape == result.shape
        and source.stride() == result.stride()
        and source.dtype == result.dtype
        and source.requires_grad == result.requires_grad
    )


_ENTERED = ("torch.nn.functional", "torch.functional", "torch._tensor")
_KEPT_WHOLE = ("multi_head_attention_forward",)


class Bodies:
    """Python functions of torch, as functions that the recorder can see into.

    Such a function first asks whether a mode overrides it, and hands itself over if so. The same
    code with that question answered "no" makes its inner calls one by one instead: built-in
    functions, which cost less to call.
    """

    def __init__(self) -> None:
        self._globals: dict[str, dict[str, Any]] = {}
        self._bodies: dict[Any, Callable[..., Any]] = {}

    def of(self, func: Any) -> Callable[..., Any] | None:
        """The function to enter in place of ``func``; ``None`` to record ``func`` itself."""
        if not isinstance(func, types.FunctionType):
            return None
        module = func.__globals__.get("__name__", "")
        if module not in _ENTERED or func.__name__ in _KEPT_WHOLE:
            return None
        if func not in self._bodies:
            self._bodies[func] = self._enter(func, module)
        return self._bodies[func]

    def _enter(self, func: types.FunctionType, module: str) -> Callable[..., Any]:
        if module not in self._globals:
            overrides = (n for n in func.__globals__ if n.startswith("has_torch_function"))
            self._globals[module] = {**func.__globals__, **dict.fromkeys(overrides, _no)}
        entered = types.FunctionType(
            func.__code__,
            self._globals[module],
            func.__name__,
            func.__defaults__,
            func.__closure__,
        )
        entered.__kwdefaults__ = func.__kwdefaults__
        return entered


def _no(*args: object) -> bool:
    return False


_REPR = getattr(Distribution, "__repr__", None)


def check_arguments(frame: types.FrameType) -> tuple[str, tuple[Any, ...]]:
    """The message of a failed check of a distribution, as a template, and the values it shows.

    ``frame`` is that of ``Distribution.__init__`` or ``_validate_sample``, at the check.
    """
    names = frame.f_locals
    distribution, value = names["self"], names["value"]
    shown: tuple[Any, ...] = ()
    if getattr(type(distribution), "__repr__", None) is _REPR:
        parameters = [k for k in distribution.arg_constraints if k in distribution.__dict__]
        inner = ", ".join(f"{k}: {{{i}}}" for i, k in enumerate(parameters))
        described = f"{type(distribution).__name__}({inner})"
        shown = tuple(distribution.__dict__[k] for k in parameters)
    else:
        described = _literal(repr(distribution))
    if "param" in names:
        template = (
            f"Expected parameter {_literal(names['param'])} ({{type}} of shape {{shape}}) of "
            f"distribution {described} to satisfy the constraint "
            f"{_literal(repr(names['constraint']))}, but found invalid values:\n{{value}}"
        )
    else:
        template = (
            f"Expected value argument ({{type}} of shape {{shape}}) to be within the support "
            f"({_literal(repr(names['support']))}) of the distribution {described}, "
            f"but found invalid values:\n{{value}}"
        )
    return template, (value, *shown)


def plain(value: Any) -> Any:
    """A constant without the class that it may have of the user's: torch reads the number itself,
    whatever ``__float__`` gives."""
    if isinstance(value, bool):
        return value
    return next((read(value) for kind, read in _PLAIN if isinstance(value, kind)), value)


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
