"""Known callables of other libraries: simulators, loggers, progress bars.

These libraries are optional, so nothing here imports them: a method is the library's own when
the function that its type resolves to is defined in the library's package.
"""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

from rose_compiler.frontend.known_base import (
    Answer,
    CallShape,
    KnownEffects,
    aliases_arguments,
    defined_in,
    register_callable_rule,
    register_method_rule,
)

HOST_LOG = KnownEffects(reads=("self", "host"), writes=("self", "host"), kind="log")

#: packages whose simulators touch nothing but themselves (their generators included)
_SIMULATORS = ("gymnasium", "envpool", "gymnasium_robotics", "shimmy", "rose_compiler.sim")
LOGGERS = (
    "torch.utils.tensorboard",
    "tensorboardX",
    "tqdm",
    "rich.progress",
    "wandb",
    "aim",
    "mlflow",
    "neptune",
)

_READ = KnownEffects(reads=("self",))
_READ_OUT = KnownEffects(reads=("self",), alias=("self",))
_CHANGE = KnownEffects(reads=("self",), writes=("self",), alias=("self",))
_STEP = replace(_CHANGE, kind="step")
_RESET = replace(_CHANGE, kind="reset")
_ENV_METHODS: dict[str, KnownEffects] = {
    "step": _STEP,
    "step_async": replace(_STEP, alias=()),
    "step_wait": _STEP,
    "send": replace(_STEP, alias=()),
    "recv": _STEP,
    "reset": _RESET,
    "reset_async": replace(_RESET, alias=()),
    "reset_wait": _RESET,
    "async_reset": replace(_RESET, alias=()),
    "call": _CHANGE,
    "call_async": _CHANGE,
    "call_wait": _CHANGE,
    "render": _CHANGE,
    "seed": _CHANGE,
    "set_attr": replace(_CHANGE, retains=("arg1",)),
    "get_attr": _READ_OUT,
    "get_wrapper_attr": _READ_OUT,
    "has_wrapper_attr": _READ,
    "shards": _READ_OUT,
    # renderers and worker processes go with it
    "close": KnownEffects(reads=("self", "host"), writes=("self", "host")),
}
_SPACE_METHODS: dict[str, KnownEffects] = {
    # a space draws from a generator of its own, which belongs to the object that holds the space
    "sample": KnownEffects(reads=("self",), writes=("self",), kind="draw"),
    "seed": KnownEffects(reads=("self",), writes=("self",)),
    "contains": _READ,
    "to_jsonable": _READ,
    "from_jsonable": _READ,
}


def _derives(owner: type, *names: str) -> bool:
    return any(f"{b.__module__}.{b.__qualname__}" in names for b in owner.__mro__)


def is_simulator_type(owner: type) -> bool:
    """Whether values of the type follow gymnasium's protocol, single or vector."""
    return _derives(
        owner,
        "gymnasium.core.Env",
        "gymnasium.vector.vector_env.VectorEnv",
        "envpool.python.envpool.EnvPoolMixin",
    )


def _simulator_method(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if name not in _ENV_METHODS or not is_simulator_type(owner):
        return None
    return _ENV_METHODS[name] if defined_in(function, _SIMULATORS) else None


def _space_method(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if name not in _SPACE_METHODS or not _derives(owner, "gymnasium.spaces.space.Space"):
        return None
    return _SPACE_METHODS[name] if defined_in(function, ("gymnasium",)) else None


def _logger_method(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if not defined_in(owner, LOGGERS) or not defined_in(function, LOGGERS):
        return None
    if name.startswith("__") and name != "__call__":
        return None
    # a logger may keep what it is given until it flushes
    return replace(HOST_LOG, retains=call.args())


def _logger_function(obj: Any, call: CallShape) -> Answer:
    if isinstance(obj, types.FunctionType | type) and defined_in(obj, LOGGERS):
        if isinstance(obj, type):
            return replace(aliases_arguments(call), reads=("host",), writes=("host",))
        return KnownEffects(
            reads=("host",), writes=("host",), retains=call.args(), alias=call.args(), kind="log"
        )
    return None


def register() -> None:
    """Enter this table."""
    register_method_rule(_simulator_method)
    register_method_rule(_space_method)
    register_method_rule(_logger_method)
    register_callable_rule(_logger_function)
