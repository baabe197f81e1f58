"""Random trainings that update an actor on some trips only: what :mod:`~rose_compiler.passes.
unswitch` is about.

:func:`updates` draws an :class:`Update`, a program as text with its operations bound: a policy and
a simulator, an update of a critic behind each step, and one of the actor under a condition, with
random statements between them that read and write the same few states.
"""

# ruff: noqa: E501 (programs as text have long lines)

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

Net = list[float]


class Envs:
    """A simulator of one environment. ``lends``: each observation is its own buffer, which the next
    step overwrites."""

    def __init__(self, *, lends: bool) -> None:
        self.lends = lends
        self.trace = [0.5]
        self.outputs = torch.zeros(2, dtype=torch.float64)

    def step(self, action: float) -> tuple[torch.Tensor, float]:
        self.trace.append(self.trace[-1] * 0.5 + action)
        self.outputs[0], self.outputs[1] = self.trace[-1], -action
        return self.outputs if self.lends else self.outputs.clone(), self.trace[-1] * 0.25


def _uniform() -> float:
    return float(torch.rand((), dtype=torch.float64))


def act(obs: torch.Tensor, actor: Net) -> float:
    return float(obs[0]) * 0.3 + actor[-1]


def explore(obs: torch.Tensor, actor: Net) -> float:
    return act(obs, actor) + 0.125 * _uniform()


def add(buf: Net, obs: torch.Tensor, reward: float) -> None:
    buf.append(float(obs.sum()) + reward)


def sample(buf: Net) -> tuple[float, float]:
    return buf[-1], buf[len(buf) // 2]


def choose(buf: Net) -> tuple[float, float]:
    return buf[int(_uniform() * len(buf))], buf[-1]


def train_critic(a: float, b: float, critic: Net) -> float:
    critic.append(critic[-1] * 0.9 + 0.01 * (a + b))
    return critic[-1]


def train_actor(a: float, critic: Net, actor: Net) -> float:
    actor.append(actor[-1] * 0.9 + 0.01 * (a + critic[-1]))
    return actor[-1]


def follow(target: Net, critic: Net) -> None:
    target.append(target[-1] * 0.75 + critic[-1] * 0.25)


def shrink(net: Net) -> None:
    net.append(net[-1] * 0.875)


def peek(net: Net) -> float:
    return net[-1] + len(net)


def note(log: list[Any], x: float, y: float) -> None:
    log.append((x, y))


def shown(log: list[Any], x: float) -> None:
    log.append(x)


def store(buf: Net, x: float) -> None:
    buf.append(x)


def blend(x: float, y: float) -> float:
    return x * 0.5 - y


def wobble(x: float) -> float:
    return x + _uniform()


def fresh(x: float) -> Net:
    return [x]


def poke(cell: Net, x: float) -> None:
    cell[0] = cell[0] * 0.5 + x


def count(n: int) -> int:
    return n + 1


def warm(t: int) -> bool:
    return t > 1


def due(t: int) -> bool:
    return t % 3 == 0


def full(log: list[Any]) -> bool:
    return len(log) % 3 == 0


def over(t: int) -> bool:
    return t == 5


BIND: dict[str, Callable[..., Any]] = {
    **{
        f.__name__: f
        for f in (
            *(act, explore, add, sample, choose, train_critic, train_actor, follow, shrink, peek),
            *(note, shown, store, blend, wobble, fresh, poke, count, warm, due, full, over),
        )
    },
    "step": lambda action, envs: envs.step(action),
    "unpack": tuple,
    "own": lambda x: x.clone(),
}
_PURE = "@op(reads=[], writes=[], may_raise=False)"
_DRAWS = 'reads=["rng:torch"], writes=["rng:torch"]'
SIGNATURES = f"""
@op(reads=["actor"], writes=[])
def act(obs, actor): ...

@op(reads=["actor", "rng:torch"], writes=["rng:torch"])
def explore(obs, actor): ...

@op(kind="step", reads=["envs"], writes=["envs"], attributes={{"step": {{"env": "envs", "action": "action"}}}})
def step(action, envs): ...

@op(reads=[], writes=[], results=2)
def unpack(r): ...

@op(reads=["x"], writes=[])
def own(x): ...

@op(reads=["buf"], writes=["buf"], results=0)
def add(buf, obs, reward): ...

@op(reads=["buf"], writes=[], results=2)
def sample(buf): ...

@op(reads=["buf", "rng:torch"], writes=["rng:torch"], results=2)
def choose(buf): ...

@op(reads=["critic"], writes=["critic"], calls=["backward", "optimizer"])
def train_critic(a, b, critic): ...

@op(reads=["critic", "actor"], writes=["actor"], calls=["backward", "optimizer"])
def train_actor(a, critic, actor): ...

@op(reads=["target", "critic"], writes=["target"], results=0)
def follow(target, critic): ...

@op(reads=["net"], writes=["net"], results=0)
def shrink(net): ...

@op(reads=["net"], writes=[])
def peek(net): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, x, y): ...

@op(reads=["log"], writes=["log", "host"], results=0)
def shown(log, x): ...

@op(reads=["buf"], writes=["buf"], results=0)
def store(buf, x): ...

{_PURE}
def blend(x, y): ...

@op({_DRAWS})
def wobble(x): ...

{_PURE}
def fresh(x): ...

@op(reads=["cell"], writes=["cell"], results=0)
def poke(cell, x): ...

{_PURE}
def count(n): ...

{_PURE}
def warm(t): ...

{_PURE}
def due(t): ...

@op(reads=["log"], writes=[], may_raise=False)
def full(log): ...

{_PURE}
def over(t): ...
"""


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
