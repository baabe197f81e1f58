"""The arguments of :func:`rose_compiler.compile`, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rose_compiler.api.quotas import VIRTUAL
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import RoseError, fail, nearest
from rose_compiler.base.machine import load_machine
from rose_compiler.base.sizes import parse_bytes
from rose_compiler.passes.base import Pass
from rose_compiler.passes.manager import select
from rose_compiler.passes.pipeline import PIPELINE

Numerics = Literal["close", "bitwise"]
_NUMERICS = ("close", "bitwise")
_BACKENDS = ("auto", "cpu", "cuda")
#: Seconds of training iterations that tuning takes at most, where nothing else is said.
TUNE_BUDGET = 120.0


@dataclass(frozen=True)
class Options:
    """Checked options of one compiled function. ``decision`` is given when nothing is to be
    tuned.
    """

    numerics: Numerics = "close"
    staleness: int = 0
    passes: tuple[Pass, ...] | None = None
    backend: str = "auto"
    tune: bool = True
    decision: Decision | None = None
    check: bool = False
    memory_limit: float | None = None
    timeout: float | None = None
    run_ahead: bool = True
    tune_budget: float = TUNE_BUDGET
    iterations: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pipeline(self) -> tuple[Pass, ...]:
        """The passes, in order, before settings select some by name."""
        return PIPELINE if self.passes is None else self.passes

    def check_settings(self) -> None:
        """Refuse settings in force that would stop the first schedule from being built.

        Raises:
            ConfigError: for a name in ``ROSE_PASSES`` that no pass has.
        """
        select(self.pipeline, knobs.current().passes)

    def asked(self) -> Options:
        """What schedules hang on: without what only says how long to look for them."""
        return replace(self, passes=None, timeout=None, tune_budget=TUNE_BUDGET, iterations=None)


def make_options(
    *,
    numerics: str,
    staleness: Any,
    passes: Sequence[Any] | None,
    backend: str,
    tune: bool | str | Path,
    check: bool,
    memory_limit: float | str | None,
    timeout: float | None,
    run_ahead: bool,
    tune_budget: float = TUNE_BUDGET,
    iterations: int | None = None,
) -> Options:
    """Check the arguments of ``compile``.

    Raises:
        ConfigError: for a value that does not exist.
        NotImplementedError: for one whose capability comes later.
    """
    if numerics not in _NUMERICS:
        raise fail(
            "config-numerics",
            f"numerics={numerics!r}{nearest(str(numerics), _NUMERICS)}",
            expected="'close' or 'bitwise'",
            found=repr(numerics),
        )
    if staleness not in (0, None, {}):
        raise NotImplementedError(
            "staleness: asynchronous training is not there yet; leave it at 0"
        )
    for name, flag in (("check", check), ("run_ahead", run_ahead)):
        if not isinstance(flag, bool):
            raise fail(
                "config-argument",
                f"{name}={flag!r}",
                expected="True or False",
                found=repr(flag),
            )
    if str(backend).startswith(VIRTUAL):
        load_machine(str(backend).removeprefix(VIRTUAL))
    elif backend not in _BACKENDS:
        raise fail(
            "config-argument",
            f"backend={backend!r}{nearest(str(backend), _BACKENDS)}",
            expected="one of " + ", ".join(map(repr, _BACKENDS)) + ", 'virtual:' and a machine",
            found=repr(backend),
        )
    if iterations is not None and (
        isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1
    ):
        raise fail(
            "config-argument",
            f"iterations={iterations!r}",
            expected="a positive whole number or None",
            found=repr(iterations),
        )
    if isinstance(memory_limit, str):
        memory_limit = _bytes(memory_limit)
    numbers = (("memory_limit", memory_limit), ("timeout", timeout), ("tune_budget", tune_budget))
    for name, value in numbers:
        if (value is not None or name == "tune_budget") and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0
        ):
            raise fail(
                "config-argument",
                f"{name}={value!r}",
                expected="a positive number" + (" or None" if name != "tune_budget" else ""),
                found=repr(value),
            )
    decision = None
    if isinstance(tune, (str, Path)):
        decision = Decision.load(tune)
    elif not isinstance(tune, bool):
        raise fail(
            "config-argument",
            f"tune={tune!r}",
            expected="True, False or the path of a decision",
            found=repr(tune),
        )
    return Options(
        numerics,  # type: ignore[arg-type]
        0,
        None if passes is None else _passes(passes),
        backend,
        tune is True and not check,  # times in checking mode say nothing
        decision,
        check,
        memory_limit,
        timeout,
        run_ahead,
        tune_budget,
        iterations,
    )


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise fail(
            "config-argument",
            f"memory_limit={text!r}",
            expected="bytes as a positive number, or text such as '2GiB'",
            found=repr(text),
        ) from error


def _passes(given: Any) -> tuple[Pass, ...]:
    """The passes, in order, each under a name of its own."""
    if isinstance(given, Pass):
        raise _no_passes(f"a single pass, {given.name}")
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise _no_passes(repr(given))
    passes = tuple(given)
    for one in passes:
        if isinstance(one, type):
            raise _no_passes(f"the class {one.__name__}")
        if not isinstance(one, Pass):
            raise _no_passes(repr(one))
    names = [one.name for one in passes]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise _no_passes(f"two passes named {twice[0]!r}")
    return passes


def _no_passes(found: str) -> RoseError:
    return fail(
        "config-argument",
        "passes= is no list of passes",
        expected="instances of rose_compiler.Pass, each under a name of its own, in order",
        found=found,
        help="rose_compiler.passes.pipeline.pipeline([own]) is the package's own list with passes "
        "of yours; ROSE_PASSES, or knobs(passes=...), selects passes by name",
    )
