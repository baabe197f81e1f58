"""Known callables of numpy: functions, ufuncs, array methods, generators."""

# ruff: noqa: SIM905 (tables of names read better as words than as quoted lists)

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rose_compiler.frontend.known_base import (
    HOST_READ,
    HOST_WRITE,
    PURE,
    Answer,
    CallShape,
    KnownEffects,
    Rule,
    aliases_arguments,
    register_callable,
    register_callable_rule,
    register_method_rule,
    register_methods,
    through_file,
    with_out,
)

#: functions whose result owns its memory
_FRESH = """
    all allclose amax amin any append arange argmax argmin argpartition argsort argwhere around
    array_equal array_equiv array_repr array_str average bincount blackman block broadcast_shapes
    choose clip compress concatenate concat convolve copy corrcoef correlate count_nonzero cov
    cross cumprod cumsum cumulative_prod cumulative_sum delete diff digitize dot dstack ediff1d
    empty empty_like extract eye fix flatnonzero format_float_positional full full_like geomspace
    gradient hamming hanning histogram histogram2d histogramdd hstack identity in1d indices inner
    insert interp intersect1d isclose isin iscomplexobj isreal isrealobj isscalar kaiser kron
    lexsort linspace logspace mask_indices max may_share_memory mean median min min_scalar_type
    nan_to_num nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin
    nanpercentile nanprod nanquantile nanstd nansum nanvar ndim nonzero ones ones_like outer
    partition percentile piecewise poly polyadd polydiv polyfit polyint polymul polyval prod
    promote_types ptp quantile ravel_multi_index repeat resize result_type roll round searchsorted
    select setdiff1d setxor1d shape shares_memory sinc size sort stack std sum take
    take_along_axis tensordot tile trapezoid trapz tri tril tril_indices triu triu_indices union1d
    unique unravel_index unwrap vander var vdot vstack where zeros zeros_like array2string
    can_cast common_type isneginf isposinf iterable
""".split()
#: functions whose result may be a view of an argument, or the argument itself
_VIEWS = """
    array asanyarray asarray asarray_chkfinite ascontiguousarray asfortranarray atleast_1d
    atleast_2d atleast_3d array_split broadcast_arrays broadcast_to column_stack diag diagonal
    dsplit einsum expand_dims flip fliplr flipud frombuffer hsplit imag matrix_transpose meshgrid
    moveaxis permute_dims ravel real real_if_close reshape require rollaxis rot90 split squeeze
    swapaxes trace transpose vsplit trim_zeros unstack
""".split()
#: functions that write their first argument
_WRITES_FIRST = "copyto fill_diagonal place put put_along_axis putmask".split()

_ARRAY_FRESH = """
    all any argmax argmin argpartition argsort choose clip compress conj conjugate copy cumprod
    cumsum dot flatten max mean min nonzero prod ptp repeat round searchsorted std sum take
    tobytes tostring trace var item tolist dumps astype
""".split()
_ARRAY_VIEWS = "diagonal ravel reshape squeeze swapaxes transpose view getfield __array__".split()
_ARRAY_WRITES = "sort fill partition put resize setflags itemset setfield byteswap".split()

GLOBAL_DRAW = KnownEffects(reads=("rng:numpy",), writes=("rng:numpy",), kind="draw")
SELF_DRAW = KnownEffects(reads=("self",), writes=("self",), kind="draw")


def _object_free(call: CallShape) -> bool:
    """A callback among the arguments (``np.piecewise``, ``key=``) is the user's code."""
    return not any(t is not None and hasattr(t, "__code__") for t in call.positional)


def _fresh(call: CallShape) -> Answer:
    return with_out(PURE, call) if _object_free(call) else None


def _ufunc(call: CallShape) -> KnownEffects:
    return with_out(PURE, call)


def _writes_first(call: CallShape) -> KnownEffects:
    first = "arg0" if call.positional else call.args()[0]
    return KnownEffects(reads=(first,), writes=(first,))


def _nan_to_num(call: CallShape) -> KnownEffects:
    if "copy" in call.keywords or len(call.positional) > 1:
        return KnownEffects(writes=("arg0",), alias=("arg0",))
    return PURE


def _global_draw(call: CallShape) -> KnownEffects:
    return GLOBAL_DRAW


def _shuffle(effects: KnownEffects) -> Rule:
    def rule(call: CallShape) -> KnownEffects:
        return replace(effects, writes=(*effects.writes, "arg0"), reads=(*effects.reads, "arg0"))

    return rule


def _drawn(effects: KnownEffects) -> Rule:
    def rule(call: CallShape) -> KnownEffects:
        return with_out(effects, call)

    return rule


def _register_random() -> None:
    for owner in (np.random.Generator, np.random.RandomState):
        for name in dir(owner):
            if name.startswith("_") or not callable(getattr(owner, name)):
                continue
            if name == "get_state":
                register_methods(owner, [name], KnownEffects(reads=("self",), alias=("self",)))
            elif name == "shuffle":
                register_methods(owner, [name], _shuffle(SELF_DRAW))
            else:
                register_methods(owner, [name], _drawn(SELF_DRAW))
    for name in np.random.__all__:
        function = getattr(np.random, name)
        if isinstance(function, type):
            continue
        if name == "default_rng":
            register_callable(function, aliases_arguments)
        elif name == "get_state":
            register_callable(function, KnownEffects(reads=("rng:numpy",)))
        elif name == "shuffle":
            register_callable(function, _shuffle(GLOBAL_DRAW))
        else:
            register_callable(function, _global_draw)
    for generator in (np.random.RandomState, np.random.Generator, np.random.PCG64):
        register_callable(generator, aliases_arguments)


def _is_ufunc(obj: Any, call: CallShape) -> Answer:
    if type(obj) is np.ufunc:
        return _ufunc(call)
    return None


def _ufunc_methods(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if owner is not np.ufunc:
        return None
    if name in ("reduce", "accumulate", "outer", "reduceat"):
        return with_out(PURE, call)
    if name == "at":
        return KnownEffects(reads=("arg0",), writes=("arg0",))
    return None


def _scalar_methods(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    """numpy scalars are immutable: their methods are an array's, on a copy."""
    if owner.__module__ != "numpy" or not issubclass(owner, np.generic) or name.startswith("_"):
        return None
    return PURE if name in _ARRAY_FRESH or name in _ARRAY_VIEWS else None


def _dtype_class(obj: Any, call: CallShape) -> Answer:
    if isinstance(obj, type) and issubclass(obj, np.generic | np.dtype):
        return PURE if obj.__module__.partition(".")[0] == "numpy" else None
    return None


def register() -> None:
    """Enter this table."""
    for name in _FRESH:
        if hasattr(np, name):
            register_callable(getattr(np, name), _fresh)
    for name in _VIEWS:
        if hasattr(np, name):
            register_callable(getattr(np, name), aliases_arguments)
    for name in _WRITES_FIRST:
        register_callable(getattr(np, name), _writes_first)
    register_callable(np.nan_to_num, _nan_to_num)
    for module in (np.linalg, np.fft):
        for name in getattr(module, "__all__", ()):
            function = getattr(module, name)
            if callable(function) and not isinstance(function, type):
                register_callable(function, aliases_arguments)
    for name in ("save", "savez", "savez_compressed"):
        register_callable(getattr(np, name), through_file(0, "file", HOST_WRITE))
    register_callable(np.savetxt, through_file(0, "fname", HOST_WRITE))
    register_callable(np.load, through_file(0, "file", HOST_READ))
    register_methods(
        np.ndarray, _ARRAY_FRESH, lambda call: with_out(KnownEffects(reads=("self",)), call)
    )
    # astype(copy=False) hands out the array itself
    register_methods(np.ndarray, ["astype"], _astype)
    register_methods(np.ndarray, _ARRAY_VIEWS, KnownEffects(reads=("self",), alias=("self",)))
    register_methods(
        np.ndarray, _ARRAY_WRITES, KnownEffects(reads=("self",), writes=("self",), alias=("self",))
    )
    _register_random()
    register_callable_rule(_is_ufunc)
    register_callable_rule(_dtype_class)
    register_method_rule(_ufunc_methods)
    register_method_rule(_scalar_methods)


def _astype(call: CallShape) -> KnownEffects:
    aliases = "copy" in call.keywords or len(call.positional) > 4
    return KnownEffects(reads=("self",), alias=("self",) if aliases else ())
