"""Faults put into compiled trainings at random points, and what has to be true afterwards.

A training over a sharded simulator in threads or processes runs well for a while, or one over a
simulator in this thread that a component in a host of its own judges meanwhile. Then something
fails: in a shard, in the component, on the coordinator, in two of them, from outside.
:func:`inject` does that once and says what was wrong about how it ended. It has to end in one error
of the expected type within :data:`LIMIT` seconds, leave no thread, process or shared memory behind,
and the next call has to work, or to name the state that is lost.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rose_compiler.api import compile as compile_
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import RuntimeFault
from rose_compiler.runtime.hosts.making import hosted
from rose_compiler.sim import ShardedEnv
from rose_compiler.testing.fault_kinds import (
    CALLS,
    ENVS,
    FAULTS,
    Agent,
    Fault,
    Hosts,
    Scene,
    judged,
    train,
)
from rose_compiler.testing.robots import Judge, Robot

#: Seconds from a fault's detection to the error in the user's hands.
LIMIT = 5.0
#: Seconds that threads and processes get to come to their end.
SETTLE = 5.0
_TICK = 1.0  # seconds


@dataclass(frozen=True)
class Outcome:
    """How one fault ended. ``wrong`` is empty where all was as it has to be. ``stacks`` are those
    of all threads when the time was over, where it ended later. ``paused``: this process was
    stopped from outside meanwhile and went on later, so that the time says nothing."""

    fault: str
    hosts: Hosts
    error: str
    seconds: float
    wrong: str = ""
    hung: bool = False
    stacks: str = ""
    paused: bool = False


def inject(fault: Fault, hosts: Hosts, seed: int) -> Outcome:
    """Run a training until a fault ends it, and look at what is left.

    Where this process was stopped for longer than the fault may take, it is done again.
    """
    for _ in range(3):
        outcome = _inject(fault, hosts, seed)
        if not (outcome.hung and outcome.paused):
            break
    return outcome


def _inject(fault: Fault, hosts: Hosts, seed: int) -> Outcome:
    draw = random.Random(f"{fault.name} {hosts} {seed}")
    torch.manual_seed(seed)
    before = _left()
    env = ShardedEnv.split(
        [partial(Robot, k) for k in range(ENVS)],
        shards=draw.choice([2, 4]),
        hosts="inline" if fault.judged else hosts,
        timeout=fault.timeout,
    )
    decision = Decision(
        groups=draw.choice([0, 2]),
        late=draw.choice(["shadow", "inline"]),
        lanes=draw.choice(["native", "thread", "inline"]),
        hosted=fault.judged,
    )
    judge: AbstractContextManager[Any] = nullcontext()
    if fault.judged:
        judge = hosted(Judge, host=hosts, name="judge", timeout=fault.timeout)
    with TemporaryDirectory() as folder, judge as component:
        chosen = Path(folder) / "decision.json"
        decision.save(chosen)
        scene = Scene(env, Agent(), component)
        given = (component,) if fault.judged else ()
        compiled = compile_(judged if given else train, tune=True if fault.tune else chosen)
        outcome = Outcome(fault.name, hosts, "", 0.0)
        try:
            obs, _ = env.reset(seed=seed)
            # a fault while tuning comes early, others when the schedule is in force
            for _ in range(draw.randint(1, 2) if fault.tune else 2):
                obs, _ = compiled(env, scene.agent, obs, *given)
            if fault.profile:
                compiled.profile_next(CALLS)

            def call() -> None:
                compiled(env, scene.agent, obs, *given)

            outcome = _fail(fault, outcome, call, scene, draw)
            if not outcome.wrong:
                outcome = replace(outcome, wrong=_again(fault, scene, call))
        finally:
            compiled.close()
            env.close()
    left = _settled(before)
    if left and not outcome.wrong:
        outcome = replace(outcome, wrong=f"left behind: {', '.join(left)}")
    return outcome


def _fail(
    fault: Fault,
    outcome: Outcome,
    call: Callable[[], Any],
    scene: Scene,
    draw: random.Random,
) -> Outcome:
    fault.plant(scene, draw)
    anomaly = fault.name.startswith("NaN")
    limit = LIMIT + (fault.timeout or 0.0)
    begin = time.monotonic()
    with _watching(limit) as watch:
        try:
            with torch.autograd.set_detect_anomaly(anomaly):
                for _ in range(CALLS):  # a step planned for later comes in a later iteration
                    begin = watch.begin()
                    call()
        except BaseException as error:  # Ctrl-C among them; whatever comes is looked at
            # what the agent raises is detected when it is raised, whatever was waited for before
            seconds = time.monotonic() - max(begin, scene.agent.failed)
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            wrong = ""
            if not isinstance(error, fault.expected):
                names = " or ".join(e.__name__ for e in fault.expected)
                wrong = f"expected {names}, got {told}"
            late = seconds > limit
            if late:
                wrong = wrong or f"took {seconds:.1f} s"
            return replace(
                outcome,
                error=told,
                seconds=seconds,
                wrong=wrong,
                hung=late,
                stacks=watch.stacks if late else "",
                paused=watch.paused,
            )
    return replace(outcome, wrong="nothing was raised")


class _Watch:
    """Keeps the stacks of all threads when the time of a call is over, and whether this process
    was stopped and went on again meanwhile, as `kill -STOP` and a debugger do."""

    def __init__(self, limit: float) -> None:
        self.stacks = ""
        self.paused = False
        self._limit = limit
        self._timer: threading.Timer | None = None

    def begin(self) -> float:
        """A call begins; the time."""
        self.end()
        self.paused = False
        self._timer = threading.Timer(self._limit, self._look)
        self._timer.daemon = True
        self._timer.start()
        return time.monotonic()

    def end(self) -> None:
        """Look at nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        names = {t.ident: t.name for t in threading.enumerate()}
        self.stacks = "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        )

    def went_on(self, *_: object) -> None:
        """The handler of SIGCONT."""
        self.paused = True


@contextmanager
def _watching(limit: float) -> Iterator[_Watch]:
    watch = _Watch(limit)
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCONT, watch.went_on) if main else None
    try:
        yield watch
    finally:
        watch.end()
        if main:
            signal.signal(signal.SIGCONT, before)


@contextmanager
def ending(seconds: float) -> Iterator[None]:
    """Show all stacks and end this process where what is inside takes longer. Time in which the
    process was stopped from outside does not count."""
    over = threading.Event()

    def watch() -> None:
        awake, last = 0.0, time.monotonic()
        while awake < seconds:
            if over.wait(_TICK):
                return
            now = time.monotonic()
            awake, last = awake + min(now - last, 2 * _TICK), now
        faulthandler.dump_traceback(2)  # all threads
        os._exit(1)

    thread = threading.Thread(target=watch, name="hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _again(fault: Fault, scene: Scene, call: Callable[[], Any]) -> str:
    """What is wrong about the next call."""
    try:
        scene.calm()
        call()
    except RuntimeFault as error:
        # a step has failed, or nobody will wait for it any more; or the component is gone
        named = ("lost", "closed", "'judge'") if fault.judged else ("lost", "closed")
        if not any(word in str(error) for word in named):
            return f"then: {error}"
        return _anew(scene, call) if fault.judged else ""
    except BaseException as error:
        return f"the next call raised {type(error).__name__}: {error}"
    return "the next call worked on what is lost" if fault.lost else ""


def _anew(scene: Scene, call: Callable[[], Any]) -> str:
    """What is wrong about a call with the component built anew."""
    scene.judge.restart()
    try:
        call()
    except BaseException as error:
        return f"built anew, the component raised {type(error).__name__}: {error}"
    return ""


def _left() -> set[str]:
    """Threads and processes of ours, and shared memory."""
    found = {f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("rose")}
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for pid in children.read_text().split() if children.exists() else ():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"rose_compiler" in command:
            found.add(f"process {pid}")
    shared = Path("/dev/shm")
    if shared.exists():
        found |= {f"shared memory {p.name}" for p in shared.iterdir() if "rose" in p.name}
    return found


def _settled(before: set[str]) -> list[str]:
    """What is left behind after a while that was not there before."""
    deadline = time.monotonic() + SETTLE
    while (left := _left() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(left)


def cases(count: int, seed: int) -> list[tuple[Fault, Hosts, int]]:
    """So many faults, each kind in each of its hosts in turn."""
    kinds = [(f, h) for f in FAULTS.values() for h in f.hosts]
    return [(*kinds[k % len(kinds)], seed + k) for k in range(count)]
