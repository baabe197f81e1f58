"""Random recurrences over time, as text: what advantages, returns and running sums look like."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

TRIPS = 17
BUFFERS = ("a", "b", "c", "d", "mask", "out", "more")
SHAPES = ((), (1,), (3,), (5,), (2, 3))


class Writer:
    """Writes the source of one recurrence."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.reverse = self.random.random() < 0.6
        self.before = "t + 1" if self.reverse else "t - 1"
        self.first = f"{TRIPS - 1}" if self.reverse else "0"

    def number(self) -> str:
        return self.random.choice(["0.5", "1", "-0.25", "k.gamma", "k.gamma * k.scale", "2.0"])

    def free(self, depth: int = 2) -> str:
        """An expression that hangs on nothing carried."""
        r = self.random
        if depth == 0 or r.random() < 0.3:
            return r.choice(
                [
                    "buf.a[t]",
                    "buf.b[t]",
                    "buf.c[t]",
                    "buf.d[t]",
                    "ahead",
                    "buf.mask[t].float()",
                    "same",
                ]
            )
        left, right = self.free(depth - 1), r.choice([self.number(), self.free(depth - 1)])
        form = r.choice(
            [
                "({} + {})",
                "({} - {})",
                "({} * {})",
                "({1} - {0})",
                "-({} * {})",
                "torch.where(buf.mask[t], {}, {})",
                "({} / {})",
            ]
        )
        if "/" in form or "where" in form:
            right = self.free(0)
        return form.format(left, right)

    def chain(self, name: str, others: list[str]) -> str:
        """An expression that a carried value goes through once."""
        r, text = self.random, name
        for _ in range(r.randint(1, 3)):
            other = r.choice([self.number(), self.free(1), *others])
            plain = self.free(0)
            text = r.choice(
                [
                    f"({text} + {other})",
                    f"{other} * ({text})",
                    f"({text}) * {other}",
                    f"({other} - {text})",
                    f"({text} - {other})",
                    f"torch.where(buf.mask[t], {plain}, {text})",
                    f"torch.where(~buf.mask[t], {text}, {plain})",
                    f"-({text})",
                ]
            )
        return text

    def source(self) -> str:
        r = self.random
        init = r.choice(["start", "torch.zeros_like(start)", "0.0"])
        trips = f"range({TRIPS})"
        lines = ["import torch", "", "", "def recurrence(buf, k, start, same):"]
        lines += [f"    x = {init}", "    y = start", "    z = start.clone()"]
        if self.reverse:
            counted = r.random() < 0.3
            if counted:
                lines += [f"    for i in {trips}:", f"        t = {TRIPS - 1} - i"]
            else:
                lines.append(f"    for t in reversed({trips}):")
        else:
            lines.append(f"    for t in {trips}:")
        if r.random() < 0.5:
            lines += [
                f"        if t == {self.first}:",
                "            ahead = same * 2.0",
                "        else:",
                f"            ahead = buf.d[{self.before}]",
            ]
        else:
            lines.append("        ahead = buf.d[t] * 0.5")
        lines.append(f"        s = {self.free()}")
        lines.append(f"        x = {self.chain('(x + s)', ['s'])}")
        kind = r.choice(["shift", "second", "place", "buffer", "none"])
        if kind == "shift":
            lines += [f"        buf.more[t] = y + {self.free(1)}", "        y = buf.c[t]"]
        elif kind == "second":
            lines += [f"        y = {self.chain('y', ['x', 's'])}", "        buf.more[t] = y - x"]
        elif kind == "buffer":
            lines += [
                f"        w = start if t == {self.first} else buf.more[{self.before}]",
                f"        buf.more[t] = {self.chain('w', ['x', 's'])}",
            ]
        elif kind == "place":
            lines += [f"        z += {self.free(1)}", "        buf.more[t] = z"]
        lines.append(f"        buf.out[t] = {r.choice(['x', 'x + s', 'x.clone()', 's * x'])}")
        lines.append("    return x, y, z")
        return "\n".join(lines) + "\n"


def world(seed: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(TRIPS, *shape, generator=g) for n in BUFFERS}
    buf = SimpleNamespace(**made)
    buf.mask = buf.mask > 0.5
    start, same = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    return buf, SimpleNamespace(gamma=0.97, scale=0.9), start, same


def bits(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        # the sign of what is no number hangs on the order of operands in the machine's code
        values = torch.where(values.isnan(), torch.nan, values)
        return values.dtype, tuple(values.shape), values.contiguous().numpy().tobytes()
    if isinstance(values, tuple):
        return tuple(map(bits, values))
    return values


def seen(result: Any, given: tuple[Any, ...]) -> Any:
    return bits(result), bits(tuple(getattr(given[0], n) for n in BUFFERS)), bits(given[2])
