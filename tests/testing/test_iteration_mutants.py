"""Planted faults in what surrounds an actor and its update: each is found by a training of the kind
that :mod:`rose_compiler.testing.iterations` draws, written to meet it in a few calls.

Random ones meet them, too, but each takes as long as a hundred loop nests.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.frontend import stores, unroll
from rose_compiler.ir import sizes
from rose_compiler.passes import hoist_draws, overlap, versions
from rose_compiler.runtime import slow, support
from rose_compiler.testing import iterations
from rose_compiler.testing.check_iterations import compiled, differs, left
from rose_compiler.testing.functions import load

Plant = Callable[[pytest.MonkeyPatch], None]
ASIDE = Decision(late="shadow", overlap=True, copies=True)
FORWARD = Decision(late="shadow", accumulate=True)
COMPILED = Decision(compile=True)

COLLECT = """
obs = s.obs
for t in range(STEPS):
    with torch.no_grad():
        action = s.net.{act}(obs)
    s.rows.seen[t] = obs
    s.rows.done[t] = action
    {also}
    new, reward, _, _, _ = s.envs.step(action.float().numpy())
    obs = torch.as_tensor(new, dtype=DTYPE)
    s.rows.paid[t] = torch.as_tensor(reward, dtype=DTYPE)
s.obs = obs
"""
LEARN = """
for k in range(2):
    o, a, q = s.rows.seen[k], s.rows.done[k], s.rows.paid[k]
    loss = {loss}
    s.opt.zero_grad()
    loss.backward()
    s.opt.step()
s.it += 1
"""


def collect(act: str = "noisy", also: str = "pass") -> str:
    return COLLECT.format(act=act, also=also)


def learn(loss: str = "-(s.net.log_prob(o, a) * q).mean()") -> str:
    return LEARN.format(loss=loss)


@dataclass(frozen=True)
class Case:
    """A planted fault, and the training that finds it; ``passes`` have to do something in it, and
    its lanes are ``behind`` by so many seconds."""

    plant: Plant
    lines: tuple[str, ...]
    decision: Decision = field(default_factory=Decision)
    passes: tuple[str, ...] = ()
    evaluated: str = "Env"
    behind: float = 0.0


def a_version_behind_a_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(versions, "_between", lambda *given: None)


def a_checkpoint_of_what_is_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(support.Runtime, "frozen", staticmethod(lambda value: value))


def frames_on_another_thread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(overlap, "why_bound", lambda *given: None)


def no_question_of_sizes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sizes.Sizes, "text", lambda self, refs, bind: "")


def numbers_in_another_order(patch: pytest.MonkeyPatch) -> None:
    draw_before, made = hoist_draws.draw_before, list[Any]()

    def turned(noise: Any, node: Any, rewrite: Any) -> Any:
        if made and made[-1].next is node:
            node = made[-1]
        made.append(draw_before(noise, node, rewrite))
        return made[-1]

    patch.setattr(hoist_draws, "draw_before", turned)


def a_trip_that_is_not_written_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unroll, "range", lambda *bounds: range(*bounds)[:-1], raising=False)


def numbers_that_nobody_reaches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stores.Stores, "reach", lambda self, number, objects: False)


_EVALUATE = "s.log.append(evaluate(s.eval_envs, s.net))"
_SAVE = 'torch.save(s.net.state_dict(), f"{s.out}/net{s.it}.pt")'
_SIZED = "with torch.no_grad(): s.log.append(float(s.net.sized(s.fewer(obs)).sum()))"
_ANNEAL = 'operator.methodcaller("anneal")(s.net)'
CASES = [
    Case(
        a_version_behind_a_write,
        (_EVALUATE, "s.net.body.weight.data.mul_(0.5)", _EVALUATE, collect(), learn()),
        ASIDE,
        ("overlap",),
    ),
    Case(
        a_checkpoint_of_what_is_trained,
        (collect(), _SAVE, learn()),
        ASIDE,
        ("versions",),
        behind=0.15,
    ),
    Case(frames_on_another_thread, (collect(), learn(), _EVALUATE), ASIDE, (), "Rendering"),
    Case(no_question_of_sizes, (collect(also=_SIZED), learn())),
    Case(numbers_in_another_order, (collect("explore"), learn()), COMPILED, ("fuse",)),
    Case(
        a_trip_that_is_not_written_out,
        (collect("mean"), learn("s.net.energy(o, a).mean()")),
        COMPILED,
    ),
    Case(numbers_that_nobody_reaches, (collect(also=_ANNEAL), learn())),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.plant.__name__)
def test_a_planted_fault_is_found(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "DELAYS", (case.behind,))
    body = "\n".join(case.lines)
    repeated = "for _ in range(4):\n" + textwrap.indent(body, "    ")
    text = iterations.module_of(
        repeated,
        "DTYPE = torch.float64\nOPTIMIZER = torch.optim.SGD\n"
        f"EVALUATED = {case.evaluated}\nSTART = 7\n",
        "gym.vector.SyncVectorEnv([Env] * ENVS)",
    )
    module = load(text, tmp_path / "training.py")
    eager = left(module.main, module, tmp_path, 1)
    found, history = compiled(module, tmp_path, 1, case.decision, 1)
    assert differs(eager, found, case.decision) is None
    assert history is not None
    assert all(history.rewrites[name] for name in case.passes), history.rewrites
    with monkeypatch.context() as patch:
        case.plant(patch)
        found, _ = compiled(module, tmp_path, 1, case.decision, 1)
    assert differs(eager, found, case.decision) is not None, "it passes"
