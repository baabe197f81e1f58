"""Random rollouts: loops around a sharded simulator with random work hanging off them.

:func:`rollouts` draws a :class:`Rollout`, a program as text with its operations bound. All its
arithmetic is elementwise in float64, so a batch computed in parts has the bits of the whole.
"""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.testing.programs import Types, frozen
from rose_compiler.testing.samples import BodyTypes
from rose_compiler.testing.toys import ACT, OBS, ToyEnvs

STEPS = 4


def act(obs: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = 0.5 * h + obs[:, :ACT]
    return hidden * 0.25 + 0.125, hidden, obs[:, 1] * 3.0


def centre(obs: torch.Tensor) -> torch.Tensor:
    """Couples the rows of a batch."""
    return obs - obs.mean()


def amplify(obs: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return obs * gain


def adapt(gain: torch.Tensor, extra: torch.Tensor) -> None:
    """Late work that writes what the next trip's policy reads."""
    gain.mul_(0.5).add_(extra.abs().max() * 0.125 + 0.5)


def over(t: int) -> bool:
    return t == 2


def perturb(action: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return action + 0.25 * noise


def to_array(action: torch.Tensor) -> np.ndarray:
    return action.numpy()


def unpack(r: Any) -> tuple[Any, ...]:
    return tuple(r)


def to_obs(x: np.ndarray) -> torch.Tensor:
    # a float32 array as float64: a copy; the reward below is a view
    return torch.as_tensor(x, dtype=torch.float64)


def view(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x)


def mask(h: torch.Tensor, ended: np.ndarray) -> torch.Tensor:
    return h * torch.from_numpy(~ended)[:, None]


def store(rows: torch.Tensor, t: int, value: torch.Tensor) -> None:
    rows[t] = value


def halve(value: torch.Tensor) -> None:
    value.mul_(0.5)


def note(log: list[Any], value: Any) -> None:
    if isinstance(value, dict):
        log.append(sorted(value))
    else:
        log.append(float(np.asarray(value).sum()))


def look(envs: ToyEnvs, log: list[Any]) -> None:
    log.append(sum(s.calls for s in envs.shards()))


def add(total: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    return total + reward


BIND: dict[str, Callable[..., Any]] = {
    **{
        f.__name__: f
        for f in (
            *(act, perturb, to_array, unpack, to_obs, view, mask, halve, note, look, add),
            *(centre, amplify, adapt, over),
        )
    },
    "step": lambda action, envs: envs.step(action),
    **dict.fromkeys(("store_obs", "store_action", "store_value", "store_extra"), store),
}

SIGNATURES = """
@op(reads=[], writes=[], results=3, batch={"obs": 0, "h": 0, "return.0": 0, "return.1": 0, "return.2": 0}, exact=True)
def act(obs, h): ...

@op(kind="graph", reads=["rng:torch"], writes=["rng:torch"], results=3, batch={"obs": 0, "h": 0, "return.0": 0, "return.1": 0, "return.2": 0}, exact=True, may_raise=False)
def gauss(obs, h):
    half = h * 0.5
    near = torch.narrow(obs, 1, 0, 3)
    hidden = half + near
    mean = hidden * 0.25
    std = torch.abs(mean)
    action = torch.normal(mean, std)
    first = torch.select(obs, 1, 1)
    extra = first * 3.0
    return action, hidden, extra

@op(reads=[], writes=[])
def centre(obs): ...

@op(reads=["gain"], writes=[], batch={"obs": 0, "return.0": 0}, exact=True)
def amplify(obs, gain): ...

@op(reads=["gain"], writes=["gain"], results=0)
def adapt(gain, extra): ...

@op(reads=[], writes=[])
def over(t): ...

@op(reads=[], writes=[], batch={"action": 0, "noise": 0, "return.0": 0}, exact=True)
def perturb(action, noise): ...

@op(reads=[], writes=[], batch={"action": 0, "return.0": 0}, exact=True)
def to_array(action): ...

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

@op(reads=[], writes=[], results=5, batch={"r": 0, "return.0": 0, "return.1": 0, "return.2": 0, "return.3": 0}, exact=True)
def unpack(r): ...

@op(reads=[], writes=[], batch={"x": 0, "return.0": 0}, exact=True)
def to_obs(x): ...

@op(reads=[], writes=[], batch={"x": 0, "return.0": 0}, exact=True)
def view(x): ...

@op(reads=[], writes=[], batch={"h": 0, "ended": 0, "return.0": 0}, exact=True)
def mask(h, ended): ...

@op(kind="graph", reads=[], writes=[], batch={"obs": 0, "extra": 0, "return.0": 0}, exact=True, may_raise=False)
def value(obs, extra):
    doubled = obs * 2.0
    first = torch.Tensor.select(doubled, 1, 0)
    total = first + extra
    return total

@op(reads=[], writes=["rows[t]"], results=0)
def store_obs(rows, t, value): ...

@op(reads=[], writes=["rows[t]"], results=0)
def store_action(rows, t, value): ...

@op(reads=[], writes=["rows[t]"], results=0)
def store_value(rows, t, value): ...

@op(reads=[], writes=["rows[t]"], results=0)
def store_extra(rows, t, value): ...

@op(reads=["value"], writes=["value"], results=0)
def halve(value): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, value): ...

@op(reads=["envs", "log"], writes=["log"], results=0)
def look(envs, log): ...

@op(reads=[], writes=[])
def add(total, reward): ...
"""


def signatures(text: str, body: str) -> str:
    """Those of the operations in ``text`` that a program's body calls: the others take longer to
    read than all the rest."""
    called = set(re.findall(r"(\w+)\(", body))
    blocks = re.split(r"\n(?=@op)", text)
    return "\n".join(b for b in blocks if called.intersection(re.findall(r"^def (\w+)", b, re.M)))


@dataclass
class Rollout:
    """A random rollout as text, and the make of its simulator."""

    text: str
    shards: tuple[int, ...]
    lends: bool
    shares: bool = False  # observations are views of what the simulator returns
    more: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # operations to bind

    def program(self) -> Program:
        """A fresh program with the types of its values, as they are known after a first trip."""
        program = parse(self.text, {**BIND, **self.more})
        self.run(lambda p, values, objects: interp.run(p, values, objects, hooks=Types()), program)
        policy = program.ops.by_name.get("gauss")
        if policy is not None and policy.body is not None:
            n = sum(self.shards)
            given = (torch.zeros(n, OBS, dtype=torch.float64), torch.zeros(n, ACT).double())
            with torch.random.fork_rng(devices=[]):
                BodyTypes(policy.body).run(*given)
        return program

    def run(
        self, run: Callable[[Program, dict[str, Any], dict[str, Any]], Any], of: Program
    ) -> Any:
        """Everything that can be seen after ``run(program, values, objects)`` on fresh objects."""
        envs = ToyEnvs(self.shards, lends=self.lends)
        n = sum(self.shards)
        objects: dict[str, Any] = {
            "envs": envs,
            "log": [],
            "gain": torch.ones(1, dtype=torch.float64),
            "buf_obs": torch.zeros(STEPS, n, OBS, dtype=torch.float64),
            "buf_action": torch.zeros(STEPS, n, ACT, dtype=torch.float64),
            "buf_value": torch.zeros(STEPS, n, dtype=torch.float64),
            "buf_extra": torch.zeros(STEPS, n, dtype=torch.float64),
        }
        values = {
            "obs0": torch.as_tensor(
                envs.reset(), dtype=torch.float32 if self.shares else torch.float64
            ),
            "h0": torch.zeros(n, ACT, dtype=torch.float64),
            "total0": torch.zeros(n, dtype=torch.float64),
        }
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            result = run(of, values, objects)
            rng = torch.get_rng_state()
        seen: Mapping[str, Any] = {k: v for k, v in objects.items() if k != "envs"}
        return frozen(result), frozen(dict(seen)), frozen(copy.deepcopy(envs.state())), frozen(rng)


_ACT = """acted = {policy}(obs, h)
        action = acted[0]{own}
        hidden = acted[1]
        extra = acted[2]"""

LATE = (
    "store_obs(buf_obs, t, obs)",
    "store_action(buf_action, t, action)",
    "store_extra(buf_extra, t, extra)",
    "v = value(obs, extra)\n        store_value(buf_value, t, v)",
    "note(log, reward)",
    "note(log, infos)",
    "note(log, extra)",
    "look(envs, log)",
    "total_next = add(total, reward_t)",
    "note(log, hidden)",
    "adapt(gain, extra)",
)
IN_PLACE = ("halve(extra)", "halve(reward_t)", "halve(action)", "halve(obs)")


@st.composite
def rollouts(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Rollout:
    """Random rollouts of :data:`STEPS` trips."""
    shards = draw(st.sampled_from([(2, 2), (2, 1, 3), (1, 1, 1, 1), (4,)]))
    lends = draw(st.booleans())
    policy = draw(st.sampled_from(["act", "gauss", "noise"]))
    masked, shares = draw(st.booleans()), draw(st.booleans())
    late = draw(st.lists(st.sampled_from(LATE), max_size=7, unique=True))
    if draw(st.integers(0, 2)) == 0:
        late.append(draw(st.sampled_from(IN_PLACE)))
    special = draw(st.sampled_from(["", "", "", "centred", "amplified", "exit"]))
    n = sum(shards)
    own = ' @ facts(alias=["%action"])'
    lent = f' @ facts(alias=["{"envs.outputs" if lends else "%r"}"], borrowed={lends})'
    lines = [
        "mean, hidden, extra = act(obs, h)"
        if policy == "noise"
        else _ACT.format(own=own, policy=policy),
        f'noise = randn({n}, {ACT}, torch.float64, "cpu")\n        action = perturb(mean, noise){own}',
        f"a_np = to_array(action){own}\n        r = step(a_np, envs){lent}",
        f"x, reward, ended, cut, infos = unpack(r){lent}\n        reward_t = view(reward){lent}",
        f"next_obs = view(x){lent}" if shares else "next_obs = to_obs(x)",
    ]
    if policy != "noise":
        del lines[1]
    given = {"centred": "seen = centre(obs)", "amplified": "seen = amplify(obs, gain)"}.get(special)
    made = {"action": len(lines) - 3, "reward": len(lines) - 1, "infos": len(lines) - 1}
    made |= {"extra": 1, "hidden": 1}
    where: dict[int, list[str]] = {}
    for text in late:
        least = max((k for name, k in made.items() if name in text), default=0)
        where.setdefault(draw(st.integers(least, len(lines))), []).append(text)
    if given is not None:  # what the policy sees; the rest goes on with the observation
        lines[0] = f"{given}\n        {lines[0].replace('(obs, h)', '(seen, h)')}"
    body: list[str] = []
    for k, line in enumerate([*lines, None]):
        body += where.get(k, [])
        body += [line] if line else []
    h_next = "hidden"
    if masked:
        body.append("h_next = mask(hidden, ended)")
        h_next = "h_next"
    total = "total_next" if any("total_next" in b for b in body) else "total"
    if special == "exit":
        at = draw(st.integers(0, len(body)))
        body.insert(at, "stop = over(t)\n        break_if(stop, (obs, h, total))")
    inner = "\n        ".join(body)
    text = (
        signatures(SIGNATURES, inner)
        + "\ndef rollout(obs0, h0, total0, *, envs, log, gain, buf_obs, buf_action, buf_value, buf_extra):\n"
        + f"    for t, obs, h, total in trips(0, {STEPS}, 1, obs=obs0, h=h0, total=total0):\n"
        + f"        {inner}\n        yield next_obs, {h_next}, {total}\n"
        + "    return trips.obs, trips.h, trips.total\n"
    )
    return Rollout(text, shards, lends, shares)
