"""Known callables of torch: functions, tensor methods, modules, optimizers, distributions.

Whether a function writes an argument, draws at random or hands out a view is read from the schemas
of the operators of its name; what the schemas can't say stands in the lists below.
"""

# ruff: noqa: SIM905 (tables of names read better as words than as quoted lists)

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import get_overridable_functions

from rose_compiler.frontend.known_base import (
    DRAW,
    HOST_READ,
    HOST_WRITE,
    PURE,
    Answer,
    CallShape,
    KnownEffects,
    Rule,
    aliases_arguments,
    register_callable,
    register_method_rule,
    through_file,
    with_out,
)

RNG_WRITE = KnownEffects(writes=("rng:torch",))

# Not in the overridable functions, pure all the same.
_CREATION = """
    arange bartlett_window blackman_window broadcast_shapes can_cast complex empty empty_like
    empty_strided eye full full_like hamming_window hann_window linspace logspace ones ones_like
    promote_types result_type scalar_tensor tensor tril_indices triu_indices vander zeros
    zeros_like is_tensor is_storage typename is_grad_enabled is_inference_mode_enabled
    is_autocast_enabled get_default_dtype get_num_threads device Size finfo iinfo Generator
""".split()
_DRAWS = """
    bernoulli multinomial normal poisson rand rand_like randint randint_like randn randn_like
    randperm binomial
""".split()
# Functions whose result may be (a view of) an argument although no schema says so.
_MAY_ALIAS = """
    as_strided as_tensor asarray atleast_1d atleast_2d atleast_3d broadcast_tensors cartesian_prod
    einsum from_dlpack from_numpy frombuffer meshgrid real imag sum_to_size type_as __getitem__
    data detach_copy_ type to cpu cuda float double half bfloat16 int long short char byte bool
    numpy __array__ H T mH mT requires_grad_ pin_memory align_to align_as refine_names rename
    dropout alpha_dropout feature_alpha_dropout feature_dropout new as_subclass positive dropout1d
    dropout2d dropout3d rrelu pad interpolate upsample contiguous resolve_conj resolve_neg
""".split()
_F_DRAWS = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu gumbel_softmax
    scaled_dot_product_attention multi_head_attention_forward fractional_max_pool2d
    fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
""".split()
# Functions of which nothing is said: they run code handed to them, or change global modes.
_UNKNOWN_FUNCTIONS = """
    compile fork wait vmap cond while_loop lobpcg set_default_dtype set_default_device
    embedding_bag_ _assert_async
""".split()
# Methods that make a Python value out of data.
_HOST_READS = """
    item tolist __bool__ __int__ __float__ __index__ __len___ equal allclose is_nonzero nonzero
    unique unique_consecutive masked_select argwhere __contains__ numpy __array__ __complex__ cpu
""".split()
# Methods that are neither pure nor in place by name.
_UNKNOWN_METHODS = """
    register_hook register_post_accumulate_grad_hook apply_ map_ map2_ module_load set_ resize_
    reinforce _reinforce_ storage untyped_storage data_ptr const_data_ptr set_data swap_tensors
    share_memory_ as_subclass retain_grad
""".split()


@dataclass(frozen=True)
class _Schema:
    writes: frozenset[int]
    aliases: frozenset[int]
    draws: bool


@functools.cache
def _schema(name: str) -> _Schema | None:
    """What the operators of a name say together: arguments written, arguments viewed, draws."""
    for namespace in ("aten", "_C_nn"):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            break
    else:
        return None
    writes: set[int] = set()
    aliases: set[int] = set()
    draws = False
    for overload in packet.overloads():
        op = getattr(packet, overload)
        draws |= torch.Tag.nondeterministic_seeded in op.tags
        for i, argument in enumerate(op._schema.arguments):
            info = argument.alias_info
            if info is None or argument.is_out:
                continue
            (writes if info.is_write else aliases).add(i)
    return _Schema(frozenset(writes), frozenset(aliases), draws)


def in_place_name(name: str) -> bool:
    """Whether torch's naming says that a method works in place: ``add_``, ``__iadd__``."""
    if name.startswith("__"):
        return name in _IN_PLACE_DUNDERS
    return name.endswith("_")


_IN_PLACE_DUNDERS = {
    f"__i{n}__"
    for n in "add and div floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
} | {"__setitem__", "__idiv__"}


def _function_effects(name: str, call: CallShape, *, drawn: bool = False) -> Answer:
    """Effects of a torch function of this name; its tensors are ``arg0`` onwards."""
    schema = _schema(name)
    base = DRAW if drawn or (schema is not None and schema.draws) else PURE
    args, memory = call.args(), call.memory()
    writes: tuple[str, ...] = ()
    alias: tuple[str, ...] = ()
    if in_place_name(name):
        writes = alias = args[:1] or ("arg0",)
    elif name in _MAY_ALIAS:
        alias = memory
    if schema is not None:
        writes = (*writes, *(f"arg{i}" for i in sorted(schema.writes) if f"arg{i}" not in writes))
        alias = alias or tuple(f"arg{i}" for i in sorted(schema.aliases))
    if "inplace" in call.keywords:
        writes, alias = memory, memory
    if call.keywords.get("generator", type(None)) is not type(None):
        writes = (*writes, "kw_generator")
    present = set(args)
    effects = KnownEffects(
        reads=base.reads,
        writes=(*base.writes, *(w for w in writes if w in present)),
        alias=tuple(a for a in alias if a in present),
        kind=base.kind,
        host_read=name in _HOST_READS,
    )
    return with_out(effects, call)


def _named(name: str, *, drawn: bool = False) -> Rule:
    return lambda call: _function_effects(name, call, drawn=drawn)


def _attention(call: CallShape) -> KnownEffects:
    """``F.scaled_dot_product_attention``: it draws where it is handed a dropout rate, its fifth
    argument; calls with ``*args`` or ``**kwargs`` may hand one over unseen."""
    shown = len(call.positional) + len(call.keywords) >= 3 and "**" not in call.keywords
    return PURE if shown and call.given(4, "dropout_p") is None else DRAW


def _writes_statistics(call: CallShape) -> KnownEffects:
    """``F.batch_norm``, ``F.instance_norm``: running statistics are written in training mode."""
    places = [call.given(1, "running_mean"), call.given(2, "running_var")]
    types_ = [
        *call.positional[1:3],
        call.keywords.get("running_mean"),
        call.keywords.get("running_var"),
    ]
    if all(t is None or t is type(None) for t in types_) and type(None) in types_:
        return PURE
    found = tuple(p for p in places if p is not None)
    return KnownEffects(reads=found, writes=found)


def _python_only(call: CallShape) -> Answer:
    """torch.tensor and the like read sequences; a type of the user's may run code."""
    return PURE


def _register_functions() -> None:
    table = get_overridable_functions()
    for module in (torch, torch.functional, F, torch.linalg, torch.fft, torch.special):
        for function in table.get(module, ()):
            name = getattr(function, "__name__", "")
            if name in _UNKNOWN_FUNCTIONS or isinstance(function, type):
                continue
            drawn = (module is F and name in _F_DRAWS) or name in _DRAWS
            register_callable(function, _named(name, drawn=drawn))
    for name in dir(torch):
        function = getattr(torch, name)
        if name.endswith("_") and not name.startswith("_") and hasattr(torch.Tensor, name):
            register_callable(function, _named(name))
    for name in _CREATION:
        if hasattr(torch, name):
            register_callable(getattr(torch, name), _named(name))
    for name in _DRAWS:
        register_callable(getattr(torch, name), _named(name, drawn=True))
    for name in ("as_tensor", "asarray", "from_numpy", "from_dlpack", "frombuffer", "as_strided"):
        register_callable(getattr(torch, name), aliases_arguments)
    for name in ("sigmoid", "tanh", "hardswish", "hardsigmoid"):
        register_callable(getattr(F, name), _named(name))
    for name in (
        "relu_",
        "elu_",
        "celu_",
        "selu_",
        "leaky_relu_",
        "hardtanh_",
        "threshold_",
        "rrelu_",
    ):
        register_callable(getattr(F, name), _named(name))
    for module in (torch, F):
        for name in ("batch_norm", "instance_norm"):
            register_callable(
                getattr(module, name), _writes_statistics if module is F else _torch_norm
            )
    register_callable(F.scaled_dot_product_attention, _attention)
    for name in ("manual_seed", "seed", "set_rng_state"):
        register_callable(getattr(torch, name), RNG_WRITE)
    register_callable(torch.get_rng_state, KnownEffects(reads=("rng:torch",)))
    register_callable(torch.initial_seed, KnownEffects(reads=("rng:torch",)))
    register_callable(
        torch.random.fork_rng, KnownEffects(reads=("rng:torch",), writes=("rng:torch",))
    )
    # global switches that other operations read: ordered like host output
    for name in ("set_num_threads", "set_printoptions", "set_float32_matmul_precision"):
        register_callable(getattr(torch, name), HOST_WRITE)
    register_callable(torch.save, through_file(1, "f", HOST_WRITE))
    register_callable(torch.load, through_file(0, "f", HOST_READ))
    register_callable(torch.get_num_threads, PURE)
    register_callable(torch.cuda.is_available, PURE)
    register_callable(torch.cuda.synchronize, replace(HOST_READ, host_read=True))
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast):
        register_callable(context, PURE)
    register_callable(torch.autograd.grad, KnownEffects(kind="backward"))
    register_callable(
        torch.autograd.backward, KnownEffects(writes=("arg0#graph",), kind="backward")
    )
    grads = KnownEffects(reads=("arg0#grads",), writes=("arg0#grads",))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        register_callable(getattr(nn.utils, name), grads)
    register_callable(nn.utils.parameters_to_vector, PURE)
    register_callable(
        nn.utils.vector_to_parameters, KnownEffects(reads=("arg0",), writes=("arg1",))
    )
    for name in dir(nn.init):
        if name.endswith("_") and not name.startswith("_"):
            write = KnownEffects(
                reads=("rng:torch",), writes=("arg0", "rng:torch"), alias=("arg0",), kind="draw"
            )
            register_callable(getattr(nn.init, name), write)


def _torch_norm(call: CallShape) -> KnownEffects:
    """``torch.batch_norm(x, weight, bias, running_mean, running_var, ...)``."""
    places = tuple(p for p in (call.given(3, "running_mean"), call.given(4, "running_var")) if p)
    return KnownEffects(reads=places, writes=places)


# --- tensor methods ---


def is_plain_tensor(owner: type | None) -> bool:
    """Whether a type is torch's own tensor or parameter, not a subclass that redirects calls."""
    return owner in (torch.Tensor, nn.Parameter, nn.Buffer)


@functools.cache
def _tensor_method_names() -> frozenset[str]:
    return frozenset(n for n in dir(torch.Tensor) if callable(getattr(torch.Tensor, n, None)))


def _tensor_method(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if not is_plain_tensor(owner) or name in _UNKNOWN_METHODS:
        return None
    if name not in _tensor_method_names() or getattr(torch.Tensor, name, None) is not getattr(
        owner, name
    ):
        return None
    if name == "backward":
        return KnownEffects(reads=("self",), writes=("self#graph",), kind="backward")
    if name == "requires_grad_":
        return KnownEffects(reads=("self",), writes=("self#mode",), alias=("self",))
    if name.startswith("__") and name not in _IN_PLACE_DUNDERS and name not in _SAFE_DUNDERS:
        return None
    if name.startswith("_") and not name.startswith("__"):
        return None
    receiver_first = CallShape((owner, *call.positional), call.keywords)
    inner = _function_effects(name, receiver_first, drawn=name in _TENSOR_DRAWS)
    return None if inner is None else _unshifted(inner)


_TENSOR_DRAWS = """
    bernoulli bernoulli_ multinomial normal_ uniform_ exponential_ cauchy_ log_normal_ geometric_
    random_
""".split()
_SAFE_DUNDERS = """
    __getitem__ __len__ __iter__ __contains__ __bool__ __int__ __float__ __index__ __add__
    __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __mod__
    __pow__ __rpow__ __matmul__ __neg__ __pos__ __abs__ __invert__ __and__ __or__ __xor__ __eq__
    __ne__ __lt__ __le__ __gt__ __ge__ __array__ __deepcopy__ __hash__ __format__ __repr__
""".split()


def _unshifted(effects: KnownEffects) -> KnownEffects:
    """Effects of a function with its first argument as those of the method of that argument."""

    def move(place: str) -> str:
        if place == "arg0":
            return "self"
        if place.startswith("arg"):
            return f"arg{int(place[3:]) - 1}"
        return place

    return replace(
        effects,
        reads=("self", *map(move, effects.reads)),
        writes=tuple(map(move, effects.writes)),
        alias=tuple(map(move, effects.alias)),
    )


def register() -> None:
    """Enter this table."""
    _register_functions()
    register_method_rule(_tensor_method)
