"""How much of real loops capture understands: ``python -m bench.capture``.

Six loops in the styles of public training code are captured, run once by the reference executor and
refined, before any pass. Printed for each: its operations, those that ended as "reads and writes
everything" with the call that made them so, and which of the overlaps that its author could use the
dependences allow. An overlap is allowed when no operation of the one side has to wait for any
operation of the other.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from bench import capture_grpo, capture_onpolicy, capture_replay, capture_runner
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences, why
from rose_compiler.ir.program import Program, is_call, is_exit, op_of
from rose_compiler.testing.capturing import FirstTrip, first_trip


@dataclass(frozen=True)
class Overlap:
    """Two pieces of work that may overlap: texts that their lines hold, or the lines that they were
    inlined from; ``trips`` is how many trips of their loop later the second one is."""

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    trips: int = 0


@dataclass(frozen=True)
class Loop:
    """One loop, what makes its arguments, and its overlaps."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    overlaps: tuple[Overlap, ...]


_ACT = ("agent.get_action_and_value(next_obs)",)
_STEP = ("envs.step(",)
_ALG_ACT = ("self.alg.act(obs)",)
_SAC_ACT = ("if global_step < args.learning_starts",)
_SAC_TARGET = ("if global_step % args.target_network_frequency",)
_EVALUATE, _FORWARD = ("evaluate(evaluator",), ("policy.forward(",)
_OPTIMIZE = ("optimizer.step()",)
_NEXT_TASKS = ("next_goals = prompts.draw()",)

PPO_SCRIPT = Loop(
    "PPO, a script",
    capture_onpolicy.ppo_script,
    capture_onpolicy.make_ppo_script,
    (
        Overlap("value head, env step", (*_ACT, "self.critic(x)"), _STEP),
        Overlap("log-prob, env step", (*_ACT, "probs.log_prob(action)"), _STEP),
        Overlap("store value(t), env step(t)", ("values[step] =",), _STEP),
        Overlap("store reward(t), act(t+1)", ("rewards[step] =",), _ACT, 1),
        Overlap("store action(t), act(t+1)", ("actions[step] =",), _ACT, 1),
        Overlap("episode info(t), act(t+1)", ('if "episode" in infos',), _ACT, 1),
        Overlap("logging(i), rollout(i+1)", ("losses/value_loss",), _STEP, 1),
    ),
)
CURIOSITY = Loop(
    "PPO with curiosity",
    capture_onpolicy.rnd_iteration,
    capture_onpolicy.make_rnd,
    (
        Overlap("value head, env step", (*_ACT, "self.critic(x)"), _STEP),
        Overlap("log-prob, env step", (*_ACT, "probs.log_prob(action)"), _STEP),
        Overlap("curiosity(t), act(t+1)", ("predicted, wanted = rnd(rnd_obs",), _ACT, 1),
        Overlap("curiosity(t), env step(t+1)", ("predicted, wanted = rnd(rnd_obs",), _STEP, 1),
        Overlap("store curiosity(t), act(t+1)", ("buf.curiosity[step] =",), _ACT, 1),
        Overlap("store reward(t), act(t+1)", ("buf.rewards[step] =",), _ACT, 1),
    ),
)
RUNNER = Loop(
    "PPO, a runner of classes",
    capture_runner.learn,
    capture_runner.make_runner,
    (
        Overlap("value head, env step", (*_ALG_ACT, "self.critic("), ("self.env.step(",)),
        Overlap("log-prob, env step", (*_ALG_ACT, "distribution.log_prob"), ("self.env.step(",)),
        Overlap("store(t), act(t+1)", ("storage.add_transitions",), _ALG_ACT, 1),
        Overlap("episode info(t), act(t+1)", ('if "episode" in infos',), _ALG_ACT, 1),
        Overlap("episode returns(t), act(t+1)", ("rewbuffer.extend",), _ALG_ACT, 1),
        Overlap("logging(i), rollout(i+1)", ("Perf/collection_time",), _ALG_ACT, 1),
    ),
)
SAC = Loop(
    "SAC, a script",
    capture_replay.sac,
    capture_replay.make_sac,
    (
        Overlap("target update(t), act(t+1)", _SAC_TARGET, _SAC_ACT, 1),
        Overlap("target update(t), env step(t+1)", _SAC_TARGET, _STEP, 1),
        Overlap("episode info(t), update(t)", ('if "episode" in infos',), ("qf_loss.backward",)),
        Overlap("logging(t), act(t+1)", ("global_step % 4 ==",), _SAC_ACT, 1),
        Overlap("logging(t), env step(t+1)", ("global_step % 4 ==",), _STEP, 1),
        Overlap("critic update(t), act(t+1)", ("q_optimizer.step()",), _SAC_ACT, 1),
    ),
)
IMITATION = Loop(
    "imitation with evaluation",
    capture_replay.imitate,
    capture_replay.make_imitation,
    (
        Overlap("evaluation(t), forward(t+1)", _EVALUATE, _FORWARD, 1),
        Overlap("evaluation(t), optimizer(t+1)", _EVALUATE, _OPTIMIZE, 1),
        Overlap("checkpoint(t), forward(t+1)", ("torch.save",), _FORWARD, 1),
        Overlap("checkpoint(t), optimizer(t+1)", ("torch.save",), _OPTIMIZE, 1),
        Overlap("logging(t), optimizer(t+1)", ("step % cfg.log_freq",), _OPTIMIZE, 1),
        Overlap("optimizer(t), batch(t+1)", _OPTIMIZE, ("batch = next(batches)",), 1),
    ),
)
GROUPS = Loop(
    "denoising policy by groups",
    capture_grpo.grpo,
    capture_grpo.make_grpo,
    (
        Overlap("reference log-prob, reward", ("reference.log_prob(",), ("reward_of(",)),
        Overlap("log-prob of chunk, physics", ("= policy.log_prob(obs, path)",), ("chunk_step(",)),
        Overlap("store(c), sample(c+1)", ("paths[c] = path",), ("policy.sample(obs)",), 1),
        Overlap("next tasks, backward", _NEXT_TASKS, ("loss.backward()",)),
        Overlap("next tasks, optimizer", _NEXT_TASKS, _OPTIMIZE),
        Overlap("logging(i), rollout(i+1)", ('"reward", rewards',), ("policy.sample(obs)",), 1),
    ),
)
LOOPS = (PPO_SCRIPT, CURIOSITY, RUNNER, SAC, IMITATION, GROUPS)


def marked(program: Program, texts: tuple[str, ...]) -> list[fx.Node]:
    """The operations that come from lines which hold the texts: each text in the operation's own
    line or in one that it was inlined from."""
    found = []
    for node in program.nodes():
        if not is_call(node) or op_of(node).kind == "builtin" or is_exit(node):
            continue
        origin = facts.get(node).origin
        places = [p for p in (origin.where, *origin.inlined_from) if p is not None]
        lines = [p.source for p in places]
        if all(any(text in line for line in lines) for text in texts):
            found.append(node)
    return found


def blocker(deps: Dependences, overlap: Overlap) -> Blocker | None:
    """What forbids an overlap, ``None`` if nothing does.

    Raises:
        LookupError: when the program has no operations of one side.
    """
    first, second = marked(deps.program, overlap.first), marked(deps.program, overlap.second)
    if not first or not second:
        raise LookupError(f"{overlap.name}: no operations for one side")
    for a in first:
        for b in second:
            found = why(deps, a, b, distance=overlap.trips)
            if found is not None:
                return found
    return None


def captured(loop: Loop) -> FirstTrip:
    """The loop after its first trip; what it prints is swallowed."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return first_trip(loop.fn, *loop.make())


def operations(program: Program) -> int:
    """How many operations of the user's a program has."""
    return sum(is_call(n) and op_of(n).kind != "builtin" for n in program.nodes())


def main() -> None:
    """Print the table."""
    allowed = asked = 0
    for loop in LOOPS:
        started = time.perf_counter()
        trip = captured(loop)
        seconds = time.perf_counter() - started
        unknown = trip.log.missed()
        print(f"{loop.name}: {operations(trip.captured.program)} operations, {seconds:.1f} s")
        print(f"  reads and writes everything: {len(unknown)}")
        for remark in unknown:
            print(f"    {', '.join(map(str, remark.where))}: {remark.why}")
        deps = Dependences(trip.captured.program)
        for overlap in loop.overlaps:
            found = blocker(deps, overlap)
            asked += 1
            allowed += found is None
            print(f"  {'allowed ' if found is None else 'BLOCKED '} {overlap.name}")
            if found is not None:
                print(f"           {found.why}")
    print(f"allowed: {allowed} of {asked} ({allowed / asked:.0%})")


if __name__ == "__main__":
    main()
