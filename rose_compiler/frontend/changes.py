"""Which attributes, globals and closure variables the program itself may assign while it runs.

Capture takes an attribute path for constant (folds a number, resolves a component) only if nothing
that the program can call assigns it. What it can call is found by name: every function that a
reachable function names, and every method of that name of any class that an object within reach
has. So the answer errs to "may change".
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend import source
from rose_compiler.frontend.reachable import fields_of

#: Classes of libraries that keep configuration: nothing but the user's own statements sets them.
_CONFIGURATION = ("types", "argparse", "omegaconf", "ml_collections", "easydict", "addict", "hydra")
#: Attributes of library objects that stay as they are.
_STABLE = frozenset(
    """num_envs observation_space action_space single_observation_space single_action_space shape
    dtype device ndim n low high start nvec spec in_features out_features in_channels out_channels
    num_embeddings embedding_dim hidden_size num_layers max_episode_steps num_obs num_actions
    max_episode_length env_id id weight bias reward_range copy autoreset_mode metadata unwrapped env
    envs""".split()  # noqa: SIM905
)
_TENSOR_CONSTANTS = frozenset(("shape", "dtype", "device", "ndim", "layout"))


@dataclass
class Changes:
    """What may change: attributes by name and owning classes (``None``: any owner), globals by the
    id of their module's namespace and name, closure variables by the id of their cell."""

    attributes: dict[str, set[type | None]] = field(default_factory=dict)
    globals: set[tuple[int, str]] = field(default_factory=set)
    cells: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # every attribute name that is read
    methods: set[str] = field(default_factory=set)  # of any class of the user's within reach
    #: owning classes of which an attribute is set by a name that is not known
    kinds: set[type] = field(default_factory=set)
    anything: bool = False  # so is one of any owner
    modules: bool = False  # of what may be a module
    #: the same where methods are called that nothing names
    far: Changes | None = None

    def attribute(self, owner: Any, name: str) -> bool:
        """Whether ``owner.name`` may be another object later."""
        if isinstance(owner, types.ModuleType):
            return self.modules or self.global_(vars(owner), name)
        value = _own(owner, name)
        if isinstance(owner, (torch.Tensor, np.ndarray)):
            return name not in _TENSOR_CONSTANTS and value is not _ABSENT
        if isinstance(owner, dict) and getattr(owner, "__dict__", None) is owner:
            return value is not _ABSENT  # its entries are its attributes
        if isinstance(owner, torch.nn.Module) and name == "training":
            return True
        if (self.anything or isinstance(owner, tuple(self.kinds))) and value is not _ABSENT:
            return True
        kinds = self.attributes.get(name, ())
        if None in kinds and value is not _ABSENT:
            return True
        if any(k is not None and isinstance(owner, k) for k in kinds):
            return True
        if value is _ABSENT and _of_class(owner, name):
            # set for the class, or for who knows what
            of = isinstance(owner, type)
            return self.anything or any(
                k is None or issubclass(k, type) or (of and issubclass(owner, k)) for k in kinds
            )
        if value is _ABSENT or source.is_user_type(type(owner)):
            return False
        if (type(owner).__module__ or "").split(".")[0] in _CONFIGURATION:
            return False
        return name not in _STABLE and not _stays(value)

    def global_(self, space: dict[str, Any], name: str) -> bool:
        """Whether a global variable may be rebound."""
        return (id(space), name) in self.globals or None in self.attributes.get(name, ())

    def cell(self, cell: types.CellType) -> bool:
        """Whether a closure variable may be rebound."""
        return id(cell) in self.cells or "cell_contents" in self.attributes


_ABSENT = object()


def _own(owner: Any, name: str) -> Any:
    """An attribute that is data of the object, not of its class; properties count as data."""
    for key, value in fields_of(owner):
        if key == name:
            return value
    if isinstance(owner, torch.nn.Module):
        for pool in (owner._parameters, owner._buffers, owner._modules):
            if name in pool:
                return pool[name]
    for cls in type(owner).__mro__:
        if name in cls.__dict__:
            raw = cls.__dict__[name]
            kinds = (types.FunctionType, staticmethod, classmethod)
            if isinstance(raw, kinds) or not hasattr(type(raw), "__get__"):
                return _ABSENT
            try:
                found = getattr(owner, name) if not source.is_user_type(cls) else raw
            except Exception:  # a property of a library that can't be read now
                return raw
            return _ABSENT if callable(found) else found
    return _ABSENT


def _of_class(owner: Any, name: str) -> bool:
    """Whether an attribute is data of a class of the user's that an object is of, or is itself."""
    for cls in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if name in cls.__dict__:
            raw = cls.__dict__[name]
            plain = not callable(raw) and not hasattr(type(raw), "__get__")
            return plain and source.is_user_type(cls)
    return False


def _stays(value: Any) -> bool:
    """Whether a library keeps such an object where it is: components, spaces, functions."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.nn.Parameter)):
        return True
    module = type(value).__module__ or ""
    return callable(value) or module.startswith(("gymnasium", "envpool", "rose_compiler"))


def mangled(name: str, owner: str | None) -> str:
    """An attribute's name as the compiler spells it inside a class."""
    if owner is None or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{owner.lstrip('_')}{name}"
