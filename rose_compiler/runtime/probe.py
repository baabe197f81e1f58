"""Compares results bit for bit or to a tolerance, and probes whether a batch may be tiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from rose_compiler.base.gaps import shown_again

Verdict = Literal["bits", "close", "differ"]

RTOL = 1e-5  # of numerics="close"
#: absolute part of the tolerance, as a share of the largest magnitude in the tensor compared: a sum
#: near zero keeps the rounding errors of its terms
ATOL_SHARE = 1e-6


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are of the same types and shapes and equal in every bit, NaNs too."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            return False
        return torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype == object:
            return all(same_bits(x, y) for x, y in zip(np.ravel(a), np.ravel(b), strict=True))
        return a.tobytes() == b.tobytes()
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        same_kind = isinstance(a, list) == isinstance(b, list)
        return same_kind and len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    return type(a) is type(b) and bool(a == b)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def compare_outputs(a: Any, b: Any, rtol: float = RTOL, atol: float | None = None) -> Verdict:
    """Compare two results, nested containers included.

    ``"close"`` means ``|a - b| <= atol + rtol * |a|`` everywhere, with ``atol`` by default
    :data:`ATOL_SHARE` times the largest finite magnitude of ``a`` (per tensor); whole numbers and
    truth values must be equal.
    """
    if same_bits(a, b):
        return "bits"
    return "close" if _close(a, b, rtol, atol) else "differ"


def _close(a: Any, b: Any, rtol: float, atol: float | None) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if not (a.is_floating_point() or a.is_complex()):
            return torch.equal(a, b)
        if atol is None:
            finite = a.detach().abs()
            finite = finite[torch.isfinite(finite)]
            atol = ATOL_SHARE * (float(finite.max()) if finite.numel() else 0.0)
        return torch.allclose(b.detach(), a.detach(), rtol=rtol, atol=atol, equal_nan=True)
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        if a.dtype == object or a.dtype != b.dtype or a.dtype.kind in "SUMmV":
            return same_bits(a, b)
        return _close(torch.from_numpy(np.array(a)), torch.from_numpy(np.array(b)), rtol, atol)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_close(x, y, rtol, atol) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[k], b[k], rtol, atol) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return bool(np.isclose(b, a, rtol=rtol, atol=atol or 0.0, equal_nan=True))
    return same_bits(a, b)


def probe_tile(
    fn: Callable[..., Any],
    args: Sequence[Any],
    batched: Mapping[int, int],
    splits: Sequence[int],
    *,
    results: Mapping[int, int] | None = None,
    trials: int = 2,
    rtol: float = RTOL,
    atol: float | None = None,
) -> Verdict:
    """Compare ``fn`` on a whole batch with ``fn`` on its tiles, joined: the worst over some data.

    The data are ``args`` as they are, and ``trials`` times random values of the same shape, dtype
    and scale in the batched ones. Thread counts and modes are the caller's. Results that ``fn``
    draws at random differ, of course.

    Args:
        args: example values of a whole batch.
        batched: axis of the batch, by position in ``args``.
        splits: rows of each tile; their sum is the batch's.
        results: axis of the batch by position of the result (0 for a result that is no tuple). Left
            out, every tensor and array of the result is batched along axis 0.

    Raises:
        ValueError: when the splits do not add up to the batch.
    """
    total = sum(splits)
    for position, axis in batched.items():
        for one in _arrays(args[position]):
            if one.shape[axis] != total:
                raise ValueError(
                    f"argument {position} has {one.shape[axis]} rows along axis {axis}, "
                    f"the splits have {total}"
                )
    worst: Verdict = "bits"
    generator = torch.Generator().manual_seed(0)
    for trial in range(trials + 1):
        values = list(args)
        if trial:
            for position in batched:
                values[position] = _random_like(args[position], generator)
        whole = fn(*values)
        parts, low = [], 0
        for rows in splits:
            tile = list(values)
            for position, axis in batched.items():
                tile[position] = _rows(values[position], axis, low, low + rows)
            parts.append(fn(*tile))
            low += rows
        joined = _joined(parts, whole, results)
        verdict = compare_outputs(whole, joined, rtol, atol)
        if verdict == "differ" or not _laid_out_alike(whole, joined):
            return "differ"
        if verdict == "close":
            worst = "close"
    return worst


def _laid_out_alike(a: Any, b: Any) -> bool:
    """Whether results lie in memory alike: ``view`` may raise, and sums be rounded otherwise, for
    others."""
    if isinstance(a, torch.Tensor):
        return a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())
    if isinstance(a, np.ndarray):
        return bool(a.strides == b.strides or (a.flags.c_contiguous and b.flags.c_contiguous))
    if isinstance(a, dict):
        return all(_laid_out_alike(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return all(map(_laid_out_alike, a, b))
    return True


def _arrays(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]


def _random_like(example: Any, generator: torch.Generator) -> Any:
    """Random values of the example's type, shape and scale; whole numbers are its own, mixed."""
    if isinstance(example, dict):
        return {key: _random_like(item, generator) for key, item in example.items()}
    if isinstance(example, np.ndarray):
        return _random_like(torch.from_numpy(np.array(example)), generator).numpy()
    if example.numel() == 0:
        return example
    if example.dtype == torch.bool:
        return (torch.rand(example.shape, generator=generator, device="cpu") < 0.5).to(
            example.device
        )
    if not example.is_floating_point():
        order = torch.randperm(example.numel(), generator=generator, device="cpu").to(
            example.device
        )
        return example.reshape(-1)[order].reshape(example.shape)
    noise = torch.randn(example.shape, generator=generator, device="cpu").to(
        example.device, example.dtype
    )
    data = example.detach()
    # both signs, of examples that are all alike too
    spread = data.abs().mean() + (data.std() if data.numel() > 1 else 0.0)
    return data.mean() + noise * (spread + 1e-3)


def _rows(value: Any, axis: int, low: int, high: int) -> Any:
    if isinstance(value, dict):
        return {key: _rows(item, axis, low, high) for key, item in value.items()}
    index = (slice(None),) * axis + (slice(low, high),)
    return value[index]


def _joined(parts: list[Any], whole: Any, results: Mapping[int, int] | None) -> Any:
    if isinstance(whole, tuple):
        return tuple(
            _join([p[i] for p in parts], each, 0 if results is None else results.get(i))
            for i, each in enumerate(whole)
        )
    return _join(parts, whole, 0 if results is None else results.get(0))


def _join(parts: list[Any], whole: Any, axis: int | None) -> Any:
    if axis is not None and isinstance(whole, dict):
        return {key: _join([p[key] for p in parts], item, axis) for key, item in whole.items()}
    if axis is not None and isinstance(whole, torch.Tensor):
        again = None if axis else shown_again(parts)
        return torch.cat(parts, dim=axis) if again is None else again
    if axis is not None and isinstance(whole, np.ndarray):
        return np.concatenate(parts, axis=axis)
    # not batched: every tile must have made the whole's value
    different = next((p for p in parts if not same_bits(p, parts[0])), None)
    return parts[0] if different is None else different
