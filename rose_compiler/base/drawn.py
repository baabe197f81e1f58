"""Random numbers drawn in front of what uses them, with the generator's state before the draw.

Where it turns out that something else is to be drawn, the generator is set back, and the user's own
statements draw.
"""

from __future__ import annotations

from typing import Any


def after(state: Any, noise: Any) -> Any:
    """``noise``, which was drawn from this state of torch's generator; it is kept beside it."""
    noise.rose_drawn_after = state
    return noise


def state_before(noise: Any) -> Any:
    """The state of torch's generator before ``noise`` was drawn; None where that is not known, as
    of a part of it."""
    return getattr(noise, "rose_drawn_after", None)
