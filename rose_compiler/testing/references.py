"""Random rollouts with a loop behind them that looks at what was collected, trip by trip: what
:mod:`~rose_compiler.passes.interleave` is about.

:func:`references` draws a :class:`~rose_compiler.testing.rollouts.Rollout` with such a loop: forwards
of a frozen model over rows of the buffers, among random statements that touch what the rollout does.
"""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from rose_compiler.testing.program_pool import Draw
from rose_compiler.testing.rollouts import SIGNATURES as STEPPING
from rose_compiler.testing.rollouts import STEPS, Rollout, rollouts, signatures
from rose_compiler.testing.updates import indented


def judge(rows: torch.Tensor, t: int) -> torch.Tensor:
    return rows[t].flatten(1).sum(1).sin() if rows.dim() > 2 else rows[t].sin()


def judge_all(rows: torch.Tensor, t: int) -> torch.Tensor:
    """Of one trip, in proportion to all."""
    return judge(rows, t) + rows.sum()


def settle(rows: torch.Tensor, t: int) -> None:
    rows[t] *= 0.5


def jitter(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(len(x), dtype=torch.float64)


def mirrored(t: int) -> int:
    return STEPS - 1 - t


def keep(rows: torch.Tensor, t: int, x: torch.Tensor) -> None:
    rows[t] = x


BIND = {f.__name__: f for f in (judge, judge_all, settle, jitter, mirrored, keep)}

SIGNATURES = """
@op(reads=["rows[t]"], writes=[], calls=["module"])
def judge(rows, t): ...

@op(reads=["rows"], writes=[], calls=["module"])
def judge_all(rows, t): ...

@op(reads=["rows[t]"], writes=["rows[t]"], results=0)
def settle(rows, t): ...

@op(reads=["rng:torch"], writes=["rng:torch"])
def jitter(x): ...

@op(reads=[], writes=[])
def mirrored(t): ...

@op(reads=[], writes=["rows[t]"], results=0)
def keep(rows, t, x): ...
"""
#: Rows that trips of the first loop collect.
ROWS = ("buf_obs", "buf_obs", "buf_action", "buf_value", "buf_extra")
#: Statements of a trip of the second loop, of its index ``u`` and a value ``{x}`` of it; ``{new}``
#: is the next.
LOOKED = (
    *("keep(buf_extra, u, {x})", "keep(buf_extra, u, {x})", "keep(buf_value, u, {x})"),
    *("settle(buf_obs, u)", "settle(buf_extra, u)", "look(envs, log)", "adapt(gain, {x})"),
    *("{new} = jitter({x})", "{new} = amplify({x}, gain)", "halve({x})", "halve(gain)"),
    *("{new} = judge(buf_extra, u)", "{new} = judge_all(buf_value, u)", "note(log, {x})"),
    "{v} = mirrored(u)\n{new} = judge(buf_obs, {v})",
    "{v} = mirrored(u)\nkeep(buf_extra, {v}, {x})",
)
#: Statements between the two loops, and behind them.
AROUND = (
    *("look(envs, log)", "halve(gain)", "settle(buf_obs, 1)", "settle(buf_extra, 2)"),
    *("note(log, gain)", "{new} = jitter({x})\nnote(log, {new})"),
    "{new} = judge(buf_obs, 0)\nnote(log, {new})",
    "{new} = judge_all(buf_obs, 1)\nkeep(buf_value, 3, {new})",
)


class _Writer:
    """Statements, each with names of its own."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.made = draw, 0

    def some(self, options: Any, most: int, x: str) -> tuple[list[str], str]:
        """Random statements, ``x`` being the latest value, and the latest behind them."""
        lines: list[str] = []
        for form in self.draw(st.lists(st.sampled_from(options), max_size=most)):
            self.made += 1
            lines += form.format(x=x, new=(new := f"x{self.made}"), v=f"v{self.made}").splitlines()
            x = new if "{new}" in form else x
        return lines, x


@st.composite
def references(draw: Draw) -> Rollout:
    """A random rollout, and a loop behind it that looks at it."""
    made: Rollout = draw(rollouts())
    writer = _Writer(draw)
    looked, last = writer.some(LOOKED, 3, "x")
    inner = [f"x = judge({draw(st.sampled_from(ROWS))}, u)", *looked]
    carried = draw(st.integers(0, 3)) == 3
    if carried:
        inner.append(f"c_next = add(c, {last})")
    if draw(st.integers(0, 11)) == 11:
        at = draw(st.integers(1, len(inner)))
        inner[at:at] = ["stop_looking = over(u)", f"break_if(stop_looking, ({'c,' * carried}))"]
    trips = draw(st.sampled_from((STEPS,) * 9 + (STEPS - 1,)))
    index, given = ("u, c", ", c=total0") if carried else ("u", "")
    lines = [
        *writer.some(AROUND, 1, "total0")[0],
        f"for {index} in again(0, {trips}, 1{given}):",
        *indented(inner),
        f"    yield {'c_next' if carried else '()'}",
        *writer.some(AROUND, 1, "total0")[0],
    ]
    front, _, back = made.text[made.text.index("\ndef rollout(") :].rpartition("    return ")
    returned = back.rstrip() + ", again.c" * carried
    text = front + "\n".join(indented(lines)) + f"\n    return {returned}\n"
    known = signatures(STEPPING + SIGNATURES, text)
    return Rollout(known + text, made.shards, made.lends, made.shares, more=BIND)
