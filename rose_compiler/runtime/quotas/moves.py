"""Components moved to processes with other variables in their environment, all together.

For :class:`~rose_compiler.runtime.hosts.hosted.Hosted` components, between iterations: what a
process gets when it starts (MPS percentages, partitions, thread counts of numeric libraries) needs
another process. Only who has no state, or can hand it over, is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from rose_compiler.base.errors import RoseError
from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.runtime.hosts import moving
from rose_compiler.runtime.hosts.hosted import Hosted


def move(
    components: Mapping[str, Hosted],
    environments: Mapping[str, Mapping[str, str]],
    by: str,
    started: Callable[[str, int], None] = lambda lane, pid: None,
) -> list[Remark]:
    """Move components, by lane, to processes that have these variables too; what was not done.
    What others than ``by`` gave them stays.

    The new processes start side by side, and ``started(lane, pid)`` is told of each. Who can't be
    moved, or whose new process fails, stays as it was: nothing that a component has done is lost.
    """
    missed: list[Remark] = []
    made: dict[str, Hosted] = {}
    for lane, environment in environments.items():
        component = components[lane]
        try:
            if not moving.movable(component):
                missed.append(Remark.from_blocker("quota", waits(lane)))
                continue
            made[lane] = moving.successor(component, environment, by)
            started(lane, made[lane].pid)
        except (RoseError, OSError) as error:
            missed.append(_stays(lane, error))
            _end(made.pop(lane, None))
    for lane, other in made.items():
        try:
            moving.take_over(components[lane], other)
        except Exception as error:  # what `get_state` or `set_state` raises among them
            missed.append(_stays(lane, error))
            _end(other)
    return missed


def waits(lane: str) -> Blocker:
    """The quota of a lane can't be given to the process that its component lives in."""
    return Blocker(
        "hosted-elsewhere",
        f"the quota of {lane} needs a new process, and its component can't hand over its state: it "
        "waits for the next start",
        "`get_state` and `set_state` on the component, or `stateless=True`; or keep the plan with "
        "`compiled.quota_plan.save(file)`, and start with `hosted(..., environment=file)`",
    )


def _end(other: Hosted | None) -> None:
    if other is not None:
        with suppress(Exception):  # why it can't take over has been told; nobody calls it
            other.close()


def _stays(lane: str, error: Exception) -> Remark:
    what = error.what if isinstance(error, RoseError) else str(error)
    return _missed("not-available", f"{lane} stays in its old process: {what}", None)


def _missed(code: str, why: str, allow: str | None) -> Remark:
    return Remark.from_blocker("quota", Blocker(code, why, allow))
