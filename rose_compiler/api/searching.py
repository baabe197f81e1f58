"""Asks the profile of program order which schedules to try, and arranges the search by that."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rose_compiler.api.building import Building
from rose_compiler.api.local import budget, measured
from rose_compiler.api.profiling import Instrumented
from rose_compiler.api.tuning import Tuning
from rose_compiler.api.verdicts import PASS
from rose_compiler.base.decision import Decision
from rose_compiler.base.profile import Profile
from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.ir.keys import loops_by_key, nodes_by_key
from rose_compiler.ir.program import Program
from rose_compiler.passes.place import purposes
from rose_compiler.passes.recurrence import is_step
from rose_compiler.tune.figures import figures
from rose_compiler.tune.fits import Fits
from rose_compiler.tune.local import Local
from rose_compiler.tune.search import Evidence, Purpose, Region, propose, rooms
from rose_compiler.tune.transfer import uses
from rose_compiler.tune.windows import find_windows

#: Share of the budget for tuning after which no further schedule is built to look at it.
SHARE = 0.1


def arrange(unit: Building, base: Instrumented | None, tuning: Tuning) -> None:
    """Have schedules tried in the order, and only those, that the profile in ``base`` speaks for.
    Before any is tried; nothing happens without a profile of program order."""
    space = tuning.untried if tuning.by_windows else []
    if base is None or not base.iteration_s or not space:
        return
    try:
        tuning.arrange(*propose(space, evidence(unit, base, tuning, space)))
    except Exception as error:
        # the space as it stands is no reason to stop training
        why = f"schedules are tried as they come: {type(error).__name__}: {error}"
        unit.log.add(Remark.from_blocker(PASS, Blocker("candidate-failed", why)))


def evidence(unit: Building, base: Instrumented, tuning: Tuning, space: list[Decision]) -> Evidence:
    """What the profile of program order says of the schedules in ``space``, and what operations
    take that these call otherwise, each timed by itself a few times."""
    profile, program = base.profile, base.program
    programs: dict[Decision, Program] = {}
    seconds: dict[Decision, float] = {}
    same: dict[Decision, Decision] = {}
    texts: dict[tuple[str, str], Decision] = {}
    deadline = time.perf_counter() + SHARE * tuning.options.tune_budget
    for decision in space:
        if time.perf_counter() > deadline:
            break
        try:
            built = unit.build(decision)
        except Exception:  # it fails again when its turn comes, and is dropped by name then
            continue
        programs[decision] = built.program
        text = built.source, built.history[-1][1] if len(built.history) else ""
        if (first := texts.setdefault(text, decision)) != decision:
            same[decision] = first
    unit.local = found = _local(unit, base, tuning, list(programs.values()))
    base_s = tuning.forecast(Decision()) or profile.iteration_s[-1]
    told: dict[Decision, str] = {}
    for decision, made in programs.items():
        with suppress(Exception):  # as above
            if (ahead := tuning.forecast(decision)) is not None:
                seconds[decision] = ahead
            if said := figures(uses(profile, program, made), found):
                told[decision] = said
    windows = find_windows(profile, fits=Fits(program, profile))
    found_regions = tuple(regions(program, profile))
    return Evidence(windows.iteration_s, base_s, rooms(windows), found_regions, seconds, same, told)


def _local(
    unit: Building, base: Instrumented, tuning: Tuning, programs: Sequence[Program]
) -> Local:
    """What operations take by themselves that ``programs`` call otherwise than program order."""
    started = time.perf_counter()
    profile = base.profile
    most = budget(tuning.options.tune_budget, profile.iteration_s[-1])
    found = measured(profile, base.program, programs, unit.watch.examples, most)
    tuning.spend(time.perf_counter() - started, 0)
    return found


def regions(program: Program, profile: Profile) -> Iterator[Region]:
    """Loops that step a simulator, and those that have a thread count, with their operations."""
    nodes = nodes_by_key(program)
    keys = {loop.node: tuple(key.split("/")) for key, loop in loops_by_key(program).items()}
    own = [o for o in profile.ops if o.op in nodes and not is_step(nodes[o.op])]

    def region(path: tuple[str, ...], purpose: Purpose) -> Region:
        inside = [o for o in own if o.path[: len(path)] == path]
        count = sum(o.count for o in inside)
        busy = sum(o.count * o.cpu_s for o in inside)
        work = sum(o.count * o.work_s for o in inside)
        each = sum(o.count * o.mean_s for o in inside) / max(1, count)
        return Region(path, purpose, work / busy if busy > 0 else 1.0, each)

    for key, loop in loops_by_key(program).items():
        if any(is_step(node) for node in loop.graph.nodes):
            yield region(tuple(key.split("/")), "steps")
    for loop, purpose in purposes(program):
        if loop.node in keys:  # one in an arm of a branch may have the key of another
            yield region(keys[loop.node], purpose)
