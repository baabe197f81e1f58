"""Random trainings that update an actor on some trips only: what :mod:`~rose_compiler.passes.
unswitch` is about.

:func:`updates` draws an :class:`Update`, a program as text with its operations bound: a policy and
a simulator, an update of a critic behind each step, and one of the actor under a condition, with
random statements between them that read and write the same few states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.testing.program_pool import Draw
from rose_compiler.testing.programs import Types, frozen
from rose_compiler.testing.rollouts import signatures
from rose_compiler.testing.update_ops import BIND, SIGNATURES, Envs

#: Statements between those of the skeleton, as often as they are named.
HOW = (
    *("note", "note", "blend", "blend", "peek", "follow", "follow", "store", "shrink"),
    *("cell", "cell", "wobble", "shown"),
)


@dataclass
class Update:
    """A random training as text, and the make of its simulator."""

    text: str
    trips: int
    lends: bool

    def program(self) -> Program:
        """A fresh program with the types of its values, as they are known after a first trip."""
        program = parse(self.text, BIND)
        self.run(lambda p, values, objects: interp.run(p, values, objects, hooks=Types()), program)
        return program

    def run(
        self, run: Callable[[Program, dict[str, Any], dict[str, Any]], Any], of: Program
    ) -> Any:
        """Everything that can be seen after ``run(program, values, objects)`` on fresh objects."""
        envs = Envs(lends=self.lends)
        objects: dict[str, Any] = {k: [1.0] for k in ("actor", "critic", "target", "buf", "log")}
        objects["envs"] = envs
        values = {"obs0": torch.tensor([0.5, 0.0], dtype=torch.float64), "n": self.trips}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            result = run(of, values, objects)
            rng = torch.get_rng_state()
        del objects["envs"]
        return frozen(result), frozen(objects), frozen([envs.trace, envs.outputs]), frozen(rng)


@dataclass
class _Pool:
    """Names in sight: numbers, and lists that were born on this trip."""

    numbers: list[str]
    cells: list[str] = field(default_factory=list)

    def inside(self) -> _Pool:
        return _Pool([*self.numbers], [*self.cells])


class _Writer:
    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.made = 0

    def pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def chance(self, one_in: int) -> bool:
        return bool(self.draw(st.integers(0, one_in - 1)) == one_in - 1)

    def name(self, stem: str) -> str:
        self.made += 1
        return f"{stem}{self.made}"

    def number(self, pool: _Pool) -> str:
        return str(self.pick(pool.numbers[-4:]))

    def statements(self, pool: _Pool, most: int) -> list[str]:
        return [
            line for _ in range(self.draw(st.integers(0, most))) for line in self.statement(pool)
        ]

    def statement(self, pool: _Pool) -> list[str]:
        """A statement that reads or writes something that the skeleton does, too."""
        how = self.pick(HOW)
        x = self.number(pool)
        if how == "note":
            return [f"note(log, {x}, {self.number(pool)})"]
        if how == "shown":
            return [f"shown(log, {x})"]
        if how == "follow":
            return ["follow(target, critic)"]
        if how == "store":
            return [f"store(buf, {x})"]
        if how == "shrink":
            return [
                f"shrink({self.pick(['target', 'target', 'critic', 'critic', 'buf', 'actor'])})"
            ]
        if how == "cell" and not pool.cells:
            pool.cells.append(self.name("cell"))
            return [f"{pool.cells[-1]}: state = fresh({x})"]
        if how == "cell" and self.chance(2):
            return [f"poke({self.pick(pool.cells)}, {x})"]
        made = self.name("v")
        text = {
            "blend": f"blend({x}, {self.number(pool)})",
            "peek": f"peek({self.pick(['target', 'critic', 'critic', 'buf', 'actor'])})",
            "wobble": f"wobble({x})",
            "cell": f"peek({self.pick(pool.cells)})" if pool.cells else "",
        }[how]
        pool.numbers.append(made)
        return [f"{made} = {text}"]

    # the skeleton

    def body(self, lends: bool) -> list[str]:
        """The statements of a trip, up to what it hands on."""
        lent = f' @ facts(alias=["{"envs.outputs" if lends else "%r"}"], borrowed={lends})'
        pool = _Pool(["last", "0.5"])
        lines = self.statements(pool, 1)
        lines += [f"action = {'explore' if self.chance(8) else 'act'}(obs, actor)"]
        lines += self.statements(pool, 1)
        lines += [f"r = step(action, envs){lent}", f"x, reward = unpack(r){lent}"]
        lines += ["next_obs = own(x)"]
        pool.numbers.append("action")
        lines += self.statements(pool, 1)
        lines += ["add(buf, obs, reward)"]
        lines += self.statements(pool, 1)
        lines += [f"a, b = {'choose' if self.chance(6) else 'sample'}(buf)"]
        pool.numbers += ["a", "b"]
        lines += self.statements(pool, 2)
        if self.chance(12):
            lines += ["stop = over(t)", "break_if(stop, (obs, count0, last))"]
        nested = self.chance(2)
        if nested:
            lines += [f"ready = {self.pick(['warm(t)', 'warm(count0)'])}"]
            lines += self.gated(pool)
        else:
            lines += ["loss = train_critic(a, b, critic)"]
            pool.numbers.append("loss")
        lines += self.statements(pool, 2)
        lines += self.gate(pool, nested)
        lines += self.statements(pool, 2)
        lines += [f"note(log, loss, {self.number(pool)})", "count1 = count(count0)"]
        return lines

    def gated(self, pool: _Pool) -> list[str]:
        """The critic's update under a condition."""
        inside = pool.inside()
        lines = ["if ready:", "    trained = train_critic(a, b, critic)"]
        inside.numbers.append("trained")
        lines += indented(self.statements(inside, 1))
        lines += [f"    loss = {self.number(inside)}", "else:", "    loss = 0.25"]
        pool.numbers.append("loss")
        return lines

    def gate(self, pool: _Pool, nested: bool) -> list[str]:
        """The actor's update under a condition, in a branch of its own or in one inside another."""
        test = self.pick(["due(t)"] * 3 + ["due(count0)", "full(log)", "full(log)"])
        if not nested:
            lines = [f"pred = {test}", *self.statements(pool, 1)]
            lines += self.arms(pool, "pred", "result")
        else:
            inside = pool.inside()
            head = self.statements(inside, 1)
            inner = [*head, f"pred = {test}", *self.statements(inside, 1)]
            inner += self.arms(inside, "pred", "inner")
            lines = ["if ready:", *indented(inner), f"    result = {self.number(inside)}"]
            lines += ["else:", *indented(self.other(pool.inside())), "    result = 0.125"]
        pool.numbers.append("result")
        return lines

    def arms(self, pool: _Pool, test: str, result: str) -> list[str]:
        then = pool.inside()
        lines = self.statements(then, 1)
        lines += ["value = train_actor(a, critic, actor)"]
        then.numbers.append("value")
        lines += self.statements(then, 1)
        made = [f"if {test}:", *indented(lines), f"    {result} = {self.number(then)}"]
        orelse = pool.inside()
        other = self.other(orelse)
        made += ["else:", *indented(other), f"    {result} = {self.number(orelse)}"]
        pool.numbers.append(result)
        return made

    def other(self, pool: _Pool) -> list[str]:
        """What the other arm does, mostly nothing."""
        return self.statement(pool) if self.chance(8) else []


def indented(lines: list[str]) -> list[str]:
    """Lines of source as a body."""
    return [f"    {line}" for line in lines]


@st.composite
def updates(draw: Draw) -> Update:
    """Random trainings of a few trips."""
    lends = draw(st.booleans())
    lines = _Writer(draw).body(lends)
    last = draw(st.sampled_from(["loss", "result", "last"]))
    inner = "\n".join(indented(indented([*lines, f"yield next_obs, count1, {last}"])))
    text = (
        signatures(SIGNATURES, inner)
        + "\ndef train(obs0, n, *, actor, critic, target, envs, buf, log):\n"
        + "    for t, obs, count0, last in trips(0, n, 1, obs=obs0, count0=0, last=0.75):\n"
        + f"{inner}\n    return trips.obs, trips.count0, trips.last\n"
    )
    return Update(text, draw(st.sampled_from([7, 7, 4, 2, 1, 0])), lends)
