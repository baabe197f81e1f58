"""Every error a user can meet, in one shape.

A :class:`RoseError` has a code, says what is wrong and where, what was expected and found, and
what to do. The codes stand in :data:`CATALOGUE`; a module that needs more of them calls
:func:`register` when it is imported. ``docs/errors.md`` has a section for each.
"""

from __future__ import annotations

import difflib
import linecache
import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class SourceLocation:
    """A place in the user's source.

    ``line`` counts from 1, ``column`` from 0 as in :mod:`ast`. ``text`` is the source line; left
    out, it is read from the file when it is shown.
    """

    file: str
    line: int
    column: int | None = None
    text: str | None = None

    def __str__(self) -> str:
        """``file:line``, the file relative to the working directory where it lies below it."""
        return f"{shown_path(self.file)}:{self.line}"

    @property
    def source(self) -> str:
        """The source line without indentation, empty if it can't be read."""
        text = linecache.getline(self.file, self.line) if self.text is None else self.text
        return text.strip()


def shown_path(file: str) -> str:
    """A path as messages show it: relative to the working directory where it lies below it."""
    if not os.path.isabs(file):
        return file
    try:
        inside = os.path.relpath(file)
    except (OSError, ValueError):  # the working directory is gone, or on another drive
        return file
    return file if inside.startswith(os.pardir) else inside


class RoseError(Exception):
    """Base of every error that this package raises on purpose.

    ``code`` is a key of :data:`CATALOGUE`. ``expected`` and ``found`` are kept as text, so that
    the error can be pickled whatever they were. Notes added with ``add_note`` survive pickling,
    ``__cause__`` and the traceback do not.
    """

    def __init__(
        self,
        *,
        code: str,
        what: str,
        where: SourceLocation | None = None,
        expected: object = None,
        found: object = None,
        help: str | None = None,
    ) -> None:
        self.code = code
        self.what = what
        self.where = where
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.help = help
        super().__init__(self._render())

    def _render(self) -> str:
        lines = [f"[{self.code}] {self.what}"]
        if self.where is not None:
            source = self.where.source
            lines.append(f"  at {self.where}: {source}" if source else f"  at {self.where}")
        for label, text in (
            ("expected: ", self.expected),
            ("found: ", self.found),
            ("help: ", self.help),
        ):
            if text is not None:
                # continuation lines stay under the text, so that one entry reads as one entry
                lines.append(f"  {label}" + text.replace("\n", "\n  " + " " * len(label)))
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self)), self.__dict__.copy()


def _rebuild(cls: type[RoseError], message: str) -> RoseError:
    # not through __init__: it takes keywords only, and the location may be unreadable over there
    return cls.__new__(cls, message)


class CaptureError(RoseError):
    """The source holds a construct that can't be compiled soundly."""


class DeclarationError(RoseError):
    """A ``component``, ``declare``, ``phase`` or ``loop`` declaration is malformed or untrue."""


class VerifyError(RoseError):
    """A program breaks an invariant of its stage: a fault in a pass, not in the user's code."""


class ParseError(RoseError):
    """The text of a dump can't be read back."""


class ConfigError(RoseError):
    """A setting or an argument has a name or a value that does not exist."""


class QuotaError(RoseError):
    """A quota can't be had: the device has less, hands it out otherwise, or refused it."""


class RuntimeFault(RoseError):
    """Something failed while a schedule ran."""


class HostDied(RuntimeFault):
    """A host process ended while it was needed."""


class HostTimeout(RuntimeFault):
    """A host or a task did not answer within its time limit."""


class FactoryError(RuntimeFault):
    """A component's factory can't be sent to its host, or raised there."""


class CatalogueEntry(NamedTuple):
    """What a code stands for: the class raised, one line about it, and what usually helps."""

    error: type[RoseError]
    description: str
    help: str | None = None


#: Every error code in use, with what it stands for; ``catalogue.py`` and :func:`register` fill it.
CATALOGUE: dict[str, CatalogueEntry] = {}

_CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def register(code: str, cls: type[RoseError], description: str, help: str | None = None) -> None:
    """Add a code to the catalogue; the same registration again changes nothing.

    Raises ``ValueError`` for a malformed code, or one that already stands for something else.
    """
    if not _CODE.fullmatch(code):
        raise ValueError(f"error code {code!r} is not lower-case words joined by hyphens")
    entry = CatalogueEntry(cls, description, help)
    if CATALOGUE.setdefault(code, entry) != entry:
        raise ValueError(f"error code {code!r} is registered already: {CATALOGUE[code]}")


def fail(
    code: str,
    what: str,
    *,
    where: SourceLocation | None = None,
    expected: object = None,
    found: object = None,
    help: str | None = None,
) -> RoseError:
    """Build the error that ``code`` stands for, to be raised by the caller.

    Without ``help`` the catalogue's own line is used. Raises ``LookupError`` for a code that
    nobody registered.
    """
    entry = CATALOGUE.get(code)
    if entry is None:
        raise LookupError(f"error code {code!r} is not registered{nearest(code, CATALOGUE)}")
    return entry.error(
        code=code,
        what=what,
        where=where,
        expected=expected,
        found=found,
        help=entry.help if help is None else help,
    )


def nearest(name: str, names: Any) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``names``, empty if none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
