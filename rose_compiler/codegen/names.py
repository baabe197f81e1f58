"""Names in emitted code: each is given out once, close to what the user called the thing."""

from __future__ import annotations

import keyword
import re

_NUMBERED = re.compile(r"(.*\D)_\d+")


def identifier(text: str) -> str:
    """A Python name as close to the text as can be."""
    clean = re.sub(r"\W", "_", text, flags=re.ASCII)
    if not clean or clean[0].isdigit() or keyword.iskeyword(clean):
        clean = f"_{clean}"
    return clean


def stem(text: str) -> str:
    """A name without the number that made it unique where it stood."""
    clean = identifier(text)
    found = _NUMBERED.fullmatch(clean)
    return found[1] if found else clean


class Names:
    """Gives out names. What ``outer`` has given out is taken here too, not the other way round."""

    def __init__(self, reserved: frozenset[str] = frozenset(), outer: Names | None = None) -> None:
        self._taken: set[str] = set(reserved)
        self._outer = outer

    def taken(self, name: str) -> bool:
        return name in self._taken or (self._outer is not None and self._outer.taken(name))

    def fresh(self, text: str, *, exact: bool = False) -> str:
        """``text`` as a name, with a number behind it if that name is taken already. A number that
        it ends in is left out, unless ``exact``."""
        base = identifier(text) if exact else stem(text)
        name, n = base, 1
        while self.taken(name):
            n += 1
            name = f"{base}_{n}"
        self._taken.add(name)
        return name

    def take(self, name: str) -> str:
        """Reserve exactly this name."""
        self._taken.add(name)
        return name
