"""What gymnasium's vector wrappers do to the independence of the rows they pass on.

A wrapper is separable if row i of everything it returns, and of what it remembers, depends on row
i of what it was given. Such a wrapper may also be put around each shard: build it in the shard's
factory. A coupling wrapper mixes rows, and the simulator under it can't advance in parts.
"""

from __future__ import annotations

from typing import Any

_SEPARABLE = (
    "ArrayConversion",
    "ClipAction",
    "ClipReward",
    "DictInfoToList",
    "DtypeObservation",
    "FilterObservation",
    "FlattenObservation",
    "GrayscaleObservation",
    "JaxToNumpy",
    "JaxToTorch",
    "NumpyToTorch",
    "RecordEpisodeStatistics",
    "RescaleAction",
    "RescaleObservation",
    "ReshapeObservation",
    "ResizeObservation",
    "VectorizeTransformAction",
    "VectorizeTransformObservation",
    "VectorizeTransformReward",
)

_COUPLING = {
    "HumanRendering": "it shows all environments in one window",
    "NormalizeObservation": "its running mean and variance are shared by all environments",
    "NormalizeReward": "its running variance of returns is shared by all environments",
    "RecordVideo": "it films all environments in one picture",
    "TransformAction": "its function sees the whole batch of actions",
    "TransformObservation": "its function sees the whole batch of observations",
    "TransformReward": "its function sees the whole batch of rewards",
}


def innermost(env: Any) -> Any:
    """The environment under all wrappers, found through their attribute ``env``."""
    return _unwrap(env)[0]


def sharded_base(env: Any) -> tuple[Any | None, list[type]]:
    """The :class:`ShardedEnv` under an environment's wrappers, and the wrappers' classes.

    The classes are listed from the outermost. The first item is None if the innermost
    environment has no ``shards``; a user's own simulator that has them counts.
    """
    base, classes = _unwrap(env)
    return (base if callable(getattr(base, "shards", None)) else None), classes


def why_coupled(wrapper: type) -> str | None:
    """Why a wrapper class mixes the rows of a batch; None if it is known to keep them apart.

    Only gymnasium's own classes are known to do so: a subclass may do anything.
    """
    # importing gymnasium is left to whoever made the wrapper
    home = wrapper.__module__
    if home.startswith("gymnasium.wrappers.vector."):
        if wrapper.__name__ in _SEPARABLE:
            return None
        if wrapper.__name__ in _COUPLING:
            return _COUPLING[wrapper.__name__]
    return f"what {wrapper.__qualname__} does with the rows of a batch is not known"


def _unwrap(env: Any) -> tuple[Any, list[type]]:
    classes: list[type] = []
    seen: set[int] = set()
    while id(env) not in seen:
        seen.add(id(env))
        # not getattr: a wrapper may forward unknown attributes to what it wraps
        inner = vars(env).get("env") if hasattr(env, "__dict__") else None
        if inner is None or not (hasattr(inner, "step") and hasattr(inner, "reset")):
            break
        classes.append(type(env))
        env = inner
    return env, classes
