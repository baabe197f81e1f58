"""Takes draws out of a traced function: the graph is given the random numbers as inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.trace import Traced
from rose_compiler.ir.draws import Hoisted as Hoisted
from rose_compiler.ir.draws import Noise as Noise
from rose_compiler.ir.draws import differs, take_draws


def hoist_draws(traced: Traced, example_inputs: Sequence[Any]) -> Hoisted | Blocker:
    """Rewrite every draw of a traced graph, or say which one can't be.

    ``example_inputs`` are values for all placeholders of ``traced.gm``: the rewrite is checked on
    them bit for bit. Torch's generator is left as it was found.
    """
    hoisted = take_draws(traced.gm, traced.draws)
    if isinstance(hoisted, Blocker) or not traced.draws:
        return hoisted
    return differs(traced.gm, hoisted, example_inputs, traced.contexts) or hoisted
