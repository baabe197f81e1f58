"""Random trainings with a simulator, as text: what surrounds an actor and its update in practice.

References over what was collected, evaluations, checkpoints and copies of a league, policies and
losses that integrate a flow, regions of ``autocast``, simulators that render, sizes that are others
later on, and calls of which nothing is known that change numbers. :func:`functions` writes a module
with a function ``main(s)``, one iteration or several, and a class ``World`` of what it is handed.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from rose_compiler.testing.program_pool import Draw

HEADER = """
import copy
import operator
import threading

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import rose_compiler
from rose_compiler.sim import ShardedEnv

STEPS, ENVS = 3, 4


class Net(nn.Module):
    temperature = 1.0

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head, self.critic = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
        self.flow = nn.Linear(5, 2)
        self.log_std = nn.Parameter(torch.zeros(2))
        self.gain, self.calls = 1.0, 0
        self.cfg = {"scale": 1.0}

    def mean(self, obs):
        return self.head(torch.tanh(self.body(obs))) * self.gain

    def value(self, obs):
        return self.critic(torch.tanh(self.body(obs))).squeeze(-1)

    def sample(self, obs):
        mean = self.mean(obs)
        return torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean)).sample()

    def noisy(self, obs):
        mean = self.mean(obs)
        return mean + torch.randn_like(mean) * self.log_std.exp() * self.cfg["scale"]

    def integrate(self, obs):
        x = torch.randn(len(obs), 2, dtype=obs.dtype)
        for k in range(3):
            x = x + self.flow(torch.cat([x, obs], 1)) * self.cfg["scale"] / 3
        return x

    def explore(self, obs):
        return self.noisy(obs) + 0.25 * self.integrate(obs)

    def log_prob(self, obs, action):
        scaled = (action - self.mean(obs)) / self.log_std.exp()
        return (-0.5 * scaled**2 - self.log_std).sum(-1)

    def energy(self, obs, action):
        x, total = action, torch.zeros(len(obs), dtype=obs.dtype)
        for k in range(3):
            v = self.flow(torch.cat([x, obs], 1)) * self.gain
            x = x + v / 3
            total = total + v.pow(2).sum(1)
        return total

    def sized(self, obs):
        if len(obs) < ENVS:
            return self.mean(obs) * 0.5
        return self.mean(obs) / obs.shape[0]

    def hot(self, obs):
        return self.mean(obs) * Net.temperature

    def anneal(self):
        self.gain *= 0.75

    def rescale(self):
        self.cfg["scale"] *= 0.5

    def late(self):
        self.calls += 1
        if self.calls == 5:
            self.gain, self.cfg["scale"] = 0.3, 0.6


def cool():
    Net.temperature *= 0.5


class Env(gym.Env):
    observation_space = gym.spaces.Box(-9.0, 9.0, (3,))
    action_space = gym.spaces.Box(-9.0, 9.0, (2,))

    def __init__(self):
        self.x, self.count = np.zeros(3, np.float32), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        self.count = 0
        return self.x.copy(), {}

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, action):
        self.count += 1
        push = np.append(np.tanh(action), self.drawn()).astype(np.float32)
        self.x = 0.5 * self.x + push
        over = self.count % 5 == 0
        return self.x.copy(), float(self.x.sum()), over, False, {}

    def drawn(self):
        return float(self.np_random.uniform())


class Rendering(Env):
    \"\"\"Makes its context current on the thread of the first frame, and garbage on others.\"\"\"

    render_mode = "rgb_array"
    owner = None

    def drawn(self):
        self.owner = self.owner or threading.get_ident()
        return 0.25 if self.owner == threading.get_ident() else 1e3


class Rows:
    def __init__(self):
        self.seen = torch.zeros(STEPS, ENVS, 3, dtype=DTYPE)
        self.done = torch.zeros(STEPS, ENVS, 2, dtype=DTYPE)
        self.ref = torch.zeros(STEPS, ENVS, dtype=DTYPE)
        self.paid = torch.zeros(STEPS, ENVS, dtype=DTYPE)


class Fewer:
    \"\"\"Hands out fewer rows from a call on.\"\"\"

    def __init__(self, start):
        self.start, self.calls = start, 0

    def __call__(self, x):
        self.calls += 1
        return x[: len(x) - (self.calls > self.start)]


def evaluate(envs, net):
    obs, _ = envs.reset(seed=7)
    total = 0.0
    for _ in range(3):
        with torch.no_grad():
            action = net.mean(torch.as_tensor(obs, dtype=DTYPE))
        obs, reward, _, _, _ = envs.step(action.numpy())
        total += float(reward.sum())
    return total


def minibatches(rows, s):
    order = torch.randperm(STEPS * ENVS)
    for at in order.split(s.size):
        yield rows.seen.flatten(0, 1)[at], rows.done.flatten(0, 1)[at], rows.ref.flatten()[at]


class World:
    def __init__(self, folder):
        self.out, self.it, self.size = str(folder), 0, 6
        Net.temperature = 1.0
        self.net, self.reference, self.past = Net(0).to(DTYPE), Net(1).to(DTYPE), Net(2).to(DTYPE)
        self.opt = OPTIMIZER(self.net.parameters(), lr=0.05)
        self.envs = SIMULATOR
        self.eval_envs = gym.vector.SyncVectorEnv([EVALUATED] * 2)
        self.obs = torch.as_tensor(self.envs.reset(seed=[3, 4, 5, 6])[0], dtype=DTYPE)
        self.rows, self.fewer = Rows(), Fewer(START)
        self.log, self.league = [], []

    def left(self):
        simulated = [e.unwrapped.x for e in self.eval_envs.envs]
        nets = self.net, self.reference, self.past
        grads = [p.grad for p in self.net.parameters()]
        told = self.obs, self.log, self.league, Net.temperature
        return nets, grads, self.opt.state_dict(), simulated, vars(self.rows), told

    def close(self):
        self.envs.close()
        self.eval_envs.close()


"""
_HALF = 'torch.autocast("cpu", dtype=torch.bfloat16)'
#: How the policy acts, more often by a policy that draws.
ACTS = ("sample", "noisy", "explore", "integrate", "integrate", "mean", "sized", "hot")
#: What happens beside acting and updating, on any level: statements that train nothing.
ASIDE = (
    "s.log.append(evaluate(s.eval_envs, s.net))",
    "s.log.append(evaluate(s.eval_envs, s.net))",
    "s.log.append(evaluate(s.eval_envs, s.past))",
    "if s.it % 2 == 0:\n    s.log.append(evaluate(s.eval_envs, s.net))",
    'torch.save(s.net.state_dict(), f"{s.out}/net{s.it}.pt")',
    'state = {"net": s.net.state_dict(), "opt": s.opt.state_dict(), "it": s.it}\n'
    'torch.save(state, f"{s.out}/all{s.it}.pt")',
    'if s.it % 2 == 0:\n    torch.save([s.net.state_dict(), s.league], f"{s.out}/{s.it}.pt")',
    'kept = copy.deepcopy(s.net.state_dict())\ntorch.save(kept, f"{s.out}/kept{s.it}.pt")',
    'past = copy.deepcopy(s.net)\ntorch.save(past.state_dict(), f"{s.out}/past{s.it}.pt")',
    "s.league.append(copy.deepcopy(s.net.state_dict()))",
    "s.league.append({k: v.clone() for k, v in s.net.state_dict().items()})",
    "s.past.load_state_dict(s.net.state_dict())",
    "if s.league:\n    s.past.load_state_dict(s.league[-1])",
    "s.log.append(float(s.net.log_std.sum()))",
    'print("iteration", s.it, float(s.rows.paid.sum()))',
    "s.log.append(float(s.past.mean(s.obs).sum().detach()))",
)
#: Changes of numbers and weights that others read.
CHANGES = (
    'operator.methodcaller("anneal")(s.net)',
    'operator.methodcaller("rescale")(s.net)',
    'operator.methodcaller("late")(s.net)',
    "s.net.anneal()",
    "s.net.rescale()",
    'setattr(s.net, "gain", s.net.gain * 0.5)',
    "cool()",
    "s.net.log_std.data.mul_(0.5)",
    "for p, q in zip(s.past.parameters(), s.net.parameters()): p.data.lerp_(q.data, 0.25)",
    "s.size = 5",
    "s.rows.ref.mul_(0.5)",
    "s.log.append(float(torch.rand(())))",
)
#: Statements of a trip that collects.
COLLECTED = (
    "s.rows.ref[t] = 0.0",
    "s.log.append(float(action.sum()))",
    "s.log.append(float(s.fewer(obs).sum()))",
    "s.log.append(float(s.past.mean(s.fewer(obs)).sum().detach()))",
    "with torch.no_grad():\n    s.log.append(float(s.net.sized(s.fewer(obs)).sum()))",
    "with torch.no_grad():\n    s.log.append(float(s.reference.value(obs).sum()))",
    "s.rows.seen[t] *= 0.5",
    "",
    "",
)
#: What is looked up of each trip behind the loop that collects.
LOOKED = (
    "s.rows.ref[t] = s.reference.log_prob(s.rows.seen[t], s.rows.done[t])",
    "s.rows.ref[t] = s.reference.log_prob(s.rows.seen[t], s.rows.done[t])",
    "s.rows.ref[t] = s.reference.value(s.rows.seen[t]) + s.past.value(s.rows.seen[t])",
    "s.rows.ref[t] = s.net.log_prob(s.rows.seen[t], s.rows.done[t])",
    "s.rows.ref[t] = s.reference.value(s.rows.seen[STEPS - 1 - t])",
    "s.rows.ref[t] = s.reference.value(s.rows.seen[t]) + s.rows.paid.mean(0)",
    "s.rows.ref[t] = s.reference.value(s.rows.seen[t] + torch.randn(ENVS, 3, dtype=DTYPE))",
    "s.rows.paid[t] = s.rows.paid[t] - s.reference.value(s.rows.seen[t])",
    "s.rows.seen[t] = s.rows.seen[t] - s.reference.value(s.rows.seen[t]).unsqueeze(-1)",
    "s.rows.ref[t] = s.reference.energy(s.rows.seen[t], s.rows.done[t])",
)
#: Terms of losses of ``o`` (observations), ``a`` (actions) and ``q`` (references).
TERMS = (
    "-(s.net.log_prob(o, a) * q).mean()",
    "s.net.energy(o, a).mean()",
    "s.net.energy(o, a).mean()",
    "(s.net.value(o) - q).pow(2).mean()",
    "F.mse_loss(s.net.integrate(o), a)",
    "s.net.sized(o).pow(2).sum()",
    "s.net.hot(o).pow(2).mean()",
    "s.net.log_std.exp().sum()",
)
_BATCHES = (
    ("for k in range(2):", "o, a, q = s.rows.seen[k], s.rows.done[k], s.rows.ref[k]"),
    (
        "for k in range(2):",
        "o, a, q = s.rows.seen.flatten(0, 1), s.rows.done.flatten(0, 1), s.rows.ref.flatten()",
    ),
    ("for o, a, q in minibatches(s.rows, s):", ""),
    (
        "for k in range(2):",
        "o, a, q = [s.fewer(x[k]) for x in (s.rows.seen, s.rows.done, s.rows.ref)]",
    ),
)
_SIMULATORS = (
    "gym.vector.SyncVectorEnv([Env] * ENVS)",
    "gym.vector.SyncVectorEnv([Rendering] * ENVS)",
    'ShardedEnv.split([Env] * ENVS, shards=2, hosts="inline")',
    'ShardedEnv.split([Env] * ENVS, shards=2, hosts="inline")',
)


@st.composite
def functions(draw: Draw) -> str:
    """The text of a module with a function ``main(s)`` and a class ``World``."""

    def pick(options: Any) -> Any:
        return draw(st.sampled_from(options))

    def some(options: Any, most: int) -> list[str]:
        return [line for line in draw(st.lists(st.sampled_from(options), max_size=most)) if line]

    def chance(one_in: int) -> bool:
        return bool(draw(st.integers(0, one_in - 1)) == one_in - 1)

    half = chance(4)

    def cast(lines: list[str]) -> list[str]:
        return [f"with {_HALF}:", *_indented(lines)] if half and chance(2) else lines

    def beside() -> list[str]:
        return some(ASIDE, 2) + (some(CHANGES, 1) if chance(3) else [])

    acted = cast([f"action = s.net.{pick(ACTS)}(obs)"])
    acted = ["with torch.no_grad():", *_indented(acted)]
    trip = some(COLLECTED, 1) if chance(3) else []
    trip = [line for line in trip if "action" not in line]  # there is none yet
    trip += [*acted, "s.rows.seen[t] = obs", "s.rows.done[t] = action", *some(COLLECTED, 1)]
    trip += some(CHANGES, 1) if chance(4) else []
    trip += ["new, reward, _, _, _ = s.envs.step(action.float().numpy())"]
    trip += some(COLLECTED, 1)
    trip += ["obs = torch.as_tensor(new, dtype=DTYPE)"]
    trip += ["s.rows.paid[t] = torch.as_tensor(reward, dtype=DTYPE)"]
    body = [*beside(), "obs = s.obs", "for t in range(STEPS):", *_indented(trip), *beside()]
    if not chance(4):
        looked = cast([pick(LOOKED)])
        looked = ["for t in range(STEPS):", *_indented(looked + some(CHANGES, 1) * chance(6))]
        body += ["with torch.no_grad():", *_indented(cast(looked)), *beside()]
    head, batch = pick(_BATCHES)
    terms = draw(st.lists(st.sampled_from(TERMS), min_size=1, max_size=2))
    loss = cast([f"loss = {' + '.join(terms)}"])
    inner = [*[batch] * bool(batch), *loss, "s.opt.zero_grad()", "loss.backward()", "s.opt.step()"]
    inner += some((*CHANGES, *ASIDE[-3:]), 1) * chance(3)
    body += [head, *_indented(inner), *beside(), "s.obs = obs", "s.it += 1"]
    if draw(st.booleans()):
        body = ["for _ in range(4):", *_indented(body)]
    made = pick(("torch.optim.SGD", "torch.optim.Adam"))
    evaluated = pick(("Env", "Env", "Env", "Rendering"))
    names = (
        f"DTYPE = torch.float{32 if half else 64}\nOPTIMIZER = {made}\nEVALUATED = {evaluated}\n"
        f"START = {pick((4, 9, 100))}\n"
    )
    return module_of("\n".join(body), names, pick(_SIMULATORS))


def module_of(body: str, names: str, simulator: str) -> str:
    """The text of a module whose ``main`` has a body; ``names`` sets those that are left open."""
    text = "\n".join(_indented([body]))
    header = HEADER.replace("SIMULATOR", simulator)
    return f"{header}{names}\n\ndef main(s):\n{text}\n    return s.it\n"


def _indented(lines: list[str]) -> list[str]:
    return ["    " + row for line in lines for row in line.splitlines()]


def calls(text: str) -> int:
    """How many calls of ``main`` make a training: one that holds several iterations needs fewer."""
    return 2 if "for _ in range(4):" in text[text.index("def main") :] else 4


def left(world: Any) -> Any:
    """What a training has left: what its world holds, its files and torch's generator."""
    files = {f.name: f.read_bytes() for f in sorted(Path(world.out).iterdir())}
    return world.left(), files, torch.get_rng_state()


def world(module: types.ModuleType, folder: Path) -> Any:
    """What ``main`` is handed, made from fixed seeds, with a folder for its files."""
    folder.mkdir()
    return module.World(folder)
