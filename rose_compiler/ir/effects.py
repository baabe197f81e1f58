"""States, effects and regions: what an operation reads and writes, as structure.

A state is named by a dotted path (``"buf.obs"``, ``"agent"``) below a root of the program, or is
one of the process-wide states (``"rng:torch"``, ``"host"``). A path covers everything below it. The
name ``"*"`` stands for every state there is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import sympy

EVERYTHING = "*"
HOST = "host"
RNG_TORCH = "rng:torch"
RNG_NUMPY = "rng:numpy"
RNG_PYTHON = "rng:python"
GLOBAL_STATES = (HOST, RNG_TORCH, RNG_NUMPY, RNG_PYTHON)
#: Root of the names of memory that values share on several trips and that no root leads to.
OUTSIDE = "outside"
#: Below the name of a container of the program's: which items it holds, told from their memory.
ITEMS = "items"

_ENTRY = re.compile(
    r"^(?P<root>@?[A-Za-z_][A-Za-z_0-9]*|rng:[A-Za-z_]+|\*)(?P<path>(?:\.[A-Za-z_0-9]+)*)(?:\[(?P<index>.*)\])?$"
)


@dataclass(frozen=True)
class Region:
    """Which part of a state along its leading axes: one sympy expression an axis.

    ``None`` at an axis means all of that axis; a state without region is touched as a whole. A
    region of fewer axes than the state covers all of the missing ones.
    """

    index: tuple[sympy.Expr | None, ...]

    def __str__(self) -> str:
        return ", ".join(":" if i is None else str(i) for i in self.index)


@dataclass(frozen=True)
class Effect:
    """One read or write of one state, of a region of it or of the whole."""

    write: bool
    state: str
    region: Region | None = None

    def __str__(self) -> str:
        mark = "W" if self.write else "R"
        return f"{mark} {self.state}" + (f"[{self.region}]" if self.region else "")


@dataclass(frozen=True)
class Entry:
    """A parsed effect entry of a signature: ``root.path[index]`` in terms of parameter names.

    A root that starts with ``@`` is no parameter: ``"@agent.params"`` names the state
    ``agent.params`` of the program itself, which an operation can reach without being handed it.
    """

    root: str
    path: str
    index: tuple[str | None, ...] | None

    @property
    def absolute(self) -> str | None:
        """The state that an ``@`` entry names, ``None`` for an entry rooted at a parameter."""
        if not self.root.startswith("@"):
            return None
        return self.root[1:] + (f".{self.path}" if self.path else "")

    def __str__(self) -> str:
        text = self.root + (f".{self.path}" if self.path else "")
        if self.index is None:
            return text
        return f"{text}[{', '.join(':' if i is None else i for i in self.index)}]"


def _split(index: str) -> list[str]:
    """The axes of an index: its parts between commas that stand in no brackets."""
    parts, depth = [""], 0
    for character in index:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


@lru_cache(maxsize=4096)
def parse_entry(text: str) -> Entry:
    """Parse one entry of ``reads=`` or ``writes=``.

    Raises:
        ValueError: when the text is no ``root.path[index]``.
    """
    match = _ENTRY.match(text.strip())
    if match is None:
        raise ValueError(f"not an effect entry: {text!r}")
    index = match["index"]
    axes: tuple[str | None, ...] | None = None
    if index is not None:
        axes = tuple(None if p.strip() == ":" else p.strip() for p in _split(index))
    return Entry(match["root"], match["path"].lstrip("."), axes)


def related(a: str, b: str) -> bool:
    """Whether two state names can mean the same memory: equal, one below the other, or ``*``."""
    if a == b or EVERYTHING in (a, b):
        return True
    return a.startswith(b + ".") or b.startswith(a + ".")


def disjoint(a: Region | None, b: Region | None) -> bool:
    """Whether two regions of one state provably share nothing, on the same trip of every loop."""
    if a is None or b is None:
        return False
    for i, j in zip(a.index, b.index, strict=False):
        if i is None or j is None:
            continue
        # sums of integers and symbols cancel as they are built; products need to be expanded
        difference = i - j
        if not (difference.is_Number or difference.is_Symbol):
            difference = sympy.expand(difference)
        if difference.is_nonzero:
            return True
    return False


def conflicts(a: Effect, b: Effect) -> bool:
    """Whether the order of two effects of the same trip matters."""
    if not (a.write or b.write) or not related(a.state, b.state):
        return False
    return not (a.state == b.state and disjoint(a.region, b.region))
