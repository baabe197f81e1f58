"""Every setting: its name, type, default and meaning, from the environment or a ``with`` block.

``ROSE_DUMP=dir`` in the environment and ``with rose_compiler.knobs(dump="dir"):`` mean the same;
the block wins. Blocks are context variables: another thread does not see them, so a lane is
handed the :class:`Settings` that its owner took with :func:`current`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rose_compiler.base.errors import RoseError, fail, nearest

PREFIX = "ROSE_"
#: Values of the ``cache`` setting that are no folder: the user's cache folder, and none at all.
AUTO, OFF = "auto", "off"


@dataclass(frozen=True)
class Settings:
    """The settings in force, as one value."""

    dump: str | None = None
    facts: bool = False
    remarks: bool = False
    verify: int = 1
    passes: tuple[str, ...] = ()
    fuel: int | None = None
    interp: bool = False
    serial: bool = False
    trace: str | None = None
    edit: str | None = None
    cache: str = AUTO
    progress: bool = True


@dataclass(frozen=True)
class Knob:
    """One setting. ``type`` says in words what it takes; ``parse`` reads text and values alike."""

    name: str
    type: str
    default: Any
    help: str
    parse: Callable[[Any], Any]

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    def read(self, value: Any, given_as: str) -> Any:
        """The setting's value for ``value``; raises ``ConfigError`` (``config-knob``)."""
        try:
            return self.parse(value)
        except (TypeError, ValueError):
            raise fail(
                "config-knob",
                f"{given_as} has a value that it can't take",
                expected=self.type,
                found=repr(value),
                help=f"{self.variable}: {self.help}",
            ) from None


def _flag(value: Any) -> bool:
    if value in (True, False):  # 1 and 0 too
        return bool(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
    raise ValueError(value)


def _path(value: Any) -> str | None:
    if value is None:
        return None
    text = os.fspath(value)
    if not isinstance(text, str) or not text:
        raise ValueError(value)
    return text


def _folder(value: Any) -> str:
    try:
        return AUTO if _flag(value) else OFF
    except ValueError:
        return _path(value) or AUTO


def _level(value: Any) -> int:
    level = _count(value)
    if level is None or level > 2:
        raise ValueError(value)
    return level


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(value)
    count = int(value)
    if count < 0:
        raise ValueError(value)
    return count


def _names(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else tuple(value)
    names = tuple(item.strip() for item in items)
    if any(not name.lstrip("-") or any(map(str.isspace, name)) for name in names):
        raise ValueError(value)
    return names


_DEFAULT = Settings()
_PATH = "a path"
_FLAG = "0 or 1"

_LIST = (
    ("dump", _PATH, "a folder for a numbered dump after each pass, and the emitted code", _path),
    ("facts", _FLAG, "print what is known of each operation (times, activity, origins)", _flag),
    ("remarks", _FLAG, "print remarks to standard error as passes make them", _flag),
    (
        "verify",
        "0, 1 or 2",
        "0 checks nothing between passes, 1 checks the rules of the stage, 2 adds the dump's "
        "round trip and runs iterations in checking mode",
        _level,
    ),
    (
        "passes",
        "names of passes with commas between them",
        "`-name` leaves a pass out; names without a minus sign run those passes alone",
        _names,
    ),
    ("fuel", "a whole number, 0 or more", "stop after this many rewrites, to bisect", _count),
    ("interp", _FLAG, "run the captured program in the reference interpreter", _flag),
    ("serial", _FLAG, "run the same schedule on one lane: tells a race from a rewrite", _flag),
    ("trace", _PATH, "a file for the timeline of what ran, in Chrome's trace format", _path),
    ("edit", _PATH, "a file with edited emitted code, to run in place of the compiler's", _path),
    (
        "cache",
        "a folder, 1 or 0",
        "where schedules that tuning settled on are kept for later runs: 1 is the user's cache "
        "folder, 0 keeps nothing",
        _folder,
    ),
    ("progress", _FLAG, "show how tuning goes on, where standard error is a terminal", _flag),
)

#: Every setting by its name in lower case, without the prefix.
KNOBS: Mapping[str, Knob] = MappingProxyType(
    {
        name: Knob(name, type, getattr(_DEFAULT, name), help, parse)
        for name, type, help, parse in _LIST
    }
)
_VARIABLES = {knob.variable: knob for knob in KNOBS.values()}

_NONE: Mapping[str, Any] = MappingProxyType({})
_overrides: ContextVar[Mapping[str, Any]] = ContextVar("rose_compiler_knobs", default=_NONE)


def current(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force here and now: defaults, the environment, then ``with`` blocks.

    An empty variable counts as unset. Raises ``ConfigError`` (``config-knob``) for a ``ROSE_*``
    variable that does not exist, naming the nearest, or that has a value it can't take.
    """
    global _seen
    if environ is None:
        # asked for on every iteration: as long as the environment is as it was, so is the answer
        data = getattr(os.environ, "_data", None)
        if _seen is None or data is None or _seen[0] != data:
            _seen = (dict(data or {}), _read(os.environ))
        found = _seen[1]
    else:
        found = _read(environ)
    overrides = _overrides.get()
    return replace(found, **overrides) if overrides else found


_seen: tuple[dict[Any, Any], Settings] | None = None


def _read(environ: Mapping[str, str]) -> Settings:
    values: dict[str, Any] = {}
    for variable in environ:
        if variable.startswith(PREFIX):
            knob = _VARIABLES.get(variable)
            if knob is None:
                raise _unknown(variable, _VARIABLES)
            if text := environ[variable].strip():
                values[knob.name] = knob.read(text, variable)
    return replace(_DEFAULT, **values)


def knobs(**settings: Any) -> AbstractContextManager[Settings]:
    """Set some settings inside a ``with`` block; blocks nest, the inner one wins.

    ``None`` puts a setting back to its default. Raises ``ConfigError`` (``config-knob``) at once
    for a name or a value that does not exist.
    """
    values: dict[str, Any] = {}
    for name, value in settings.items():
        knob = KNOBS.get(name)
        if knob is None:
            raise _unknown(name, KNOBS)
        values[name] = knob.default if value is None else knob.read(value, f"{name}=")
    return _block(values)


@contextmanager
def _block(values: Mapping[str, Any]) -> Iterator[Settings]:
    token = _overrides.set({**_overrides.get(), **values})
    try:
        yield current()
    finally:
        _overrides.reset(token)


def _unknown(name: str, names: Mapping[str, Any]) -> RoseError:
    return fail(
        "config-knob",
        f"there is no setting {name!r}{nearest(name, names)}",
        expected="one of " + ", ".join(names),
        found=repr(name),
    )
