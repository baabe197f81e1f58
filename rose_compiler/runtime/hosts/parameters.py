"""Parameters handed to a host as versions, in memory shared once.

There are two places, used in turn. The writer marks a place with the version before it copies and
again behind it; the reader looks at both marks before and after it copies, so that a version which
is half written is never taken for a whole one. The writer does not touch a place while a call that
was issued with the version in it may still read.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rose_compiler.base.errors import RuntimeFault, fail, register
from rose_compiler.runtime.hosts import arrays

register(
    "host-version",
    RuntimeFault,
    "a host found another version of the parameters than its call was issued with",
    "publish and call from one thread only",
)
register(
    "host-parameters",
    RuntimeFault,
    "parameters can't be handed to this component",
    "publish a module or a dict of tensors, to a component that is a module or has "
    "`load_state_dict(state)`",
)

_MARK = struct.Struct("<Q")
_HEAD = arrays.ALIGNMENT
PLACES = 2

#: Names and layouts of parameters, and the memory with their versions.
Published = tuple[tuple[str, ...], tuple[arrays.Layout, ...], Any]


def state_of(source: Any) -> dict[str, Any]:
    """Names and arrays of what is published: a module, or a dict of tensors or arrays.

    Raises ``RuntimeFault`` (``host-parameters``) for anything else.
    """
    found = source.state_dict() if hasattr(source, "state_dict") else source
    if not isinstance(found, Mapping):
        raise fail("host-parameters", f"a {type(source).__name__} was published")
    for name, value in found.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            what = f"{name!r} of what was published is no tensor and no array"
            raise fail("host-parameters", what, found=type(value).__name__)
    return dict(found)


def place_size(layouts: Sequence[arrays.Layout]) -> int:
    """Bytes of one place."""
    return 2 * _HEAD + arrays.room(layouts)


def store(
    memory: Any, version: int, values: Sequence[Any], layouts: Sequence[arrays.Layout]
) -> None:
    """Write a version into its place."""
    size = place_size(layouts)
    start = (version % PLACES) * size
    _MARK.pack_into(memory, start, version)
    arrays.write(memory, start + _HEAD, values, layouts)
    _MARK.pack_into(memory, start + size - _HEAD, version)


def stored(memory: Any, version: int, layouts: Sequence[arrays.Layout]) -> list[Any]:
    """Copies of a version's arrays, on the side that wrote them."""
    start = (version % PLACES) * place_size(layouts)
    return arrays.read(memory, start + _HEAD, layouts)


class Reader:
    """The worker's side: gives the component the version that a call was issued with."""

    def __init__(
        self, memory: Any, names: Sequence[str], layouts: Sequence[arrays.Layout], component: Any
    ) -> None:
        torch = sys.modules.get("torch")
        if not callable(getattr(component, "load_state_dict", None)):
            what = f"{type(component).__name__} has no `load_state_dict`"
            raise fail("host-parameters", what)
        self._memory = memory
        self._names = tuple(names)
        self._layouts = tuple(layouts)
        self._component = component
        # a module copies what it is given; anything else may keep it, so it gets its own
        self._copy = torch is None or not isinstance(component, torch.nn.Module)

    def take(self, version: int) -> None:
        """Load a version. Raises ``RuntimeFault`` (``host-version``) if it is not there, whole."""
        size = place_size(self._layouts)
        start = (version % PLACES) * size
        self._check(version, start, size)
        values = arrays.read(self._memory, start + _HEAD, self._layouts, copy=self._copy)
        if self._copy:
            self._check(version, start, size)
        self._component.load_state_dict(dict(zip(self._names, values, strict=True)))
        self._check(version, start, size)

    def _check(self, version: int, start: int, size: int) -> None:
        marks = [_MARK.unpack_from(self._memory, at)[0] for at in (start, start + size - _HEAD)]
        if marks != [version, version]:
            raise fail("host-version", f"version {version} is not there", found=marks)
