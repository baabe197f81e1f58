"""Simulators made of independent shards, and simulators written in torch.

Names are loaded when they are first used: a worker process that holds a shard must not import
torch for the sake of a simulator it does not run, and gymnasium is an optional dependency.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rose_compiler.sim.protocol import Shard as Shard
    from rose_compiler.sim.protocol import Sharded as Sharded
    from rose_compiler.sim.quiet import quiet_mujoco as quiet_mujoco
    from rose_compiler.sim.sharded import ShardedEnv as ShardedEnv
    from rose_compiler.sim.together import batching as batching
    from rose_compiler.sim.torch_envs import TorchCartPole as TorchCartPole
    from rose_compiler.sim.torch_envs import TorchPendulum as TorchPendulum
    from rose_compiler.sim.wrappers import innermost as innermost
    from rose_compiler.sim.wrappers import sharded_base as sharded_base
    from rose_compiler.sim.wrappers import why_coupled as why_coupled

_HOME = {
    "batching": "together",
    "Shard": "protocol",
    "Sharded": "protocol",
    "ShardedEnv": "sharded",
    "TorchCartPole": "torch_envs",
    "TorchPendulum": "torch_envs",
    "innermost": "wrappers",
    "quiet_mujoco": "quiet",
    "sharded_base": "wrappers",
    "why_coupled": "wrappers",
}

__all__ = [
    "Shard",
    "Sharded",
    "ShardedEnv",
    "TorchCartPole",
    "TorchPendulum",
    "batching",
    "innermost",
    "quiet_mujoco",
    "sharded_base",
    "why_coupled",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if error.name == "gymnasium":
            error.add_note(f"{name} needs gymnasium: pip install 'rose-compiler[sim]'")
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
