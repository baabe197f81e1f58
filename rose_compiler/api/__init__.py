"""The public entry: :func:`compile`. The one part of the package that imports every layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose_compiler.api.compiled import Compiled
from rose_compiler.api.options import TUNE_BUDGET, make_options

__all__ = ["Compiled", "compile"]


def compile(
    fn: Any = None,
    *,
    numerics: str = "close",
    staleness: Any = 0,
    passes: Sequence[Any] | None = None,
    backend: str = "auto",
    tune: bool | str | Path = True,
    check: bool = False,
    memory_limit: float | str | None = None,
    timeout: float | None = None,
    run_ahead: bool = True,
    tune_budget: float = TUNE_BUDGET,
    iterations: int | None = None,
) -> Any:
    """Compile a training loop. Works as a decorator too, on functions and methods.

    Args:
        fn: one training iteration, or the whole loop over iterations, as plain Python.
        numerics: ``"bitwise"`` gives every bit as eager execution; ``"close"`` lets batches be
        tiled
            where each rewritten operation agrees with eager to ``rtol=1e-5`` on the same inputs.
        staleness: bounded staleness of a named state; 0, fully synchronous, is all there is so far.
        passes: the passes to run, in order, as :class:`rose_compiler.Pass` objects; the package's
            own pipeline by default. ``ROSE_PASSES`` selects by name.
        backend: ``"auto"``, ``"cpu"`` or ``"cuda"``; ``"virtual:h200"``, or ``"virtual:"`` and the
            path of a description, plans quotas for a GPU that is not there.
        tune: try several schedules on real iterations and keep the fastest; ``False`` takes the
            default schedule; a path takes the decision saved there.
        check: checking mode: run each iteration one operation at a time, compute again what passes
            rewrote, and hold declarations against what is touched. Slow; nothing is tuned.
        memory_limit: bytes, or text such as ``"2GiB"``, that an iteration may take at its peak: of
            the CUDA device that it uses, of the process where it uses none. Schedules that are
            predicted to take more are left out; what is written runs in any case. No limit by
            default.
        timeout: seconds to wait for a lane before giving up with an error; no limit by default.
        run_ahead: start operations before an earlier one that may raise has ended.
        tune_budget: seconds of iterations that tuning may take; what it knows by then decides.
        iterations: how many the run will have, if that is known: tuning takes at most a tenth of
            them. Of a whole loop over ``range`` it is known without being said.

    Returns:
        A :class:`Compiled`, called like ``fn``.

    Raises:
        CaptureError: for a builtin, lambda, class, generator, or a function without source.
        ConfigError: for an argument with a value that does not exist, or a name in ``ROSE_PASSES``
            that no pass has.
        NotImplementedError: for ``staleness``, which is not there yet.
    """
    options = make_options(
        numerics=numerics,
        staleness=staleness,
        passes=passes,
        backend=backend,
        tune=tune,
        check=check,
        memory_limit=memory_limit,
        timeout=timeout,
        run_ahead=run_ahead,
        tune_budget=tune_budget,
        iterations=iterations,
    )
    if fn is None:
        return lambda function: Compiled(function, options)
    return Compiled(fn, options)
