"""``compiled.quota_plan``: quotas for the lanes of the schedule that was profiled last."""

from __future__ import annotations

from rose_compiler.base.errors import QuotaError
from rose_compiler.base.machine import Machine, detect_cpu, load_machine
from rose_compiler.base.profile import Profile
from rose_compiler.base.quota import ANY_DEVICE, Backend, QuotaPlan
from rose_compiler.runtime.quotas import all_backends, devices, usable
from rose_compiler.tune.branches import Alone, HandOffs, branches, divide

VIRTUAL = "virtual:"
#: Lanes of components that live in processes of their own begin with one of these.
_PROCESSES = ("shard:", "host:")
_STREAMS: tuple[Backend, ...] = ("green-context",)


def plan_quotas(
    profile: Profile | None,
    backend: str,
    alone: Alone | None = None,
    outside_s: float = 0.0,
    than: QuotaPlan | None = None,
    hand_offs: HandOffs | None = None,
) -> QuotaPlan:
    """The plan for one profile; without shares where there is nothing to divide, and a note why.

    ``backend`` is the argument of ``compile``. A virtual machine is planned for as if lanes in
    processes of their own shared it through MPS, and its times and activity are those measured
    here. ``alone`` has responses of operations, in cores if nothing ran beside them, or in chunks
    of SMs; ``outside_s`` are seconds of an iteration that no operation takes, ``hand_offs`` those
    from handing a call over to its start, and from its end to its result. What is predicted without
    the plan is equal shares, or the plan ``than``.

    Raises ``ConfigError`` (``config-machine``) for a virtual machine that nothing describes.
    """
    kind, machine, device, notes = _target(profile, backend)
    timeline = None if profile is None else profile.timeline
    if profile is None or timeline is None or not timeline.spans:
        notes.append("no iteration was profiled yet, so nothing is known of the lanes")
        return QuotaPlan(kind, machine, device=device, notes=tuple(notes))
    chunks = machine.cores if kind == "cores" else machine.chunks
    graph = branches(timeline, chunks, alone, hand_offs)
    if len(graph.lanes) < 2:
        notes.append("one lane does everything, so it has the whole device")
    elif chunks < len(graph.lanes):
        lanes = ", ".join(graph.lanes)
        notes.append(f"{len(graph.lanes)} lanes ({lanes}) share {chunks} {_unit(kind)}: too few")
    else:
        found = divide(graph, chunks)
        notes.append(f"from one profiled iteration on {profile.machine}")
        before_s = found.equal_s
        if than is not None and {s.lane for s in than.shares} == set(graph.lanes):
            before_s = found.predict({s.lane: s.units // than.chunk for s in than.shares})
        return QuotaPlan.divide(
            kind,
            machine,
            dict(found.chunks),
            why=found.why,
            device=device,
            before_s=before_s + outside_s,
            predicted_s=found.predicted_s + outside_s,
            notes=tuple(notes),
        )
    return QuotaPlan(kind, machine, device=device, notes=tuple(notes))


def _unit(kind: Backend) -> str:
    return "cores" if kind == "cores" else "chunks of SMs"


def _target(profile: Profile | None, backend: str) -> tuple[Backend, Machine, str, list[str]]:
    """Back end, machine and device, and notes on what was passed over."""
    timeline = None if profile is None else profile.timeline
    lanes = () if timeline is None else timeline.lanes()
    # a share of a process, or of a stream in this one
    apart = any(lane.startswith(_PROCESSES) for lane in lanes)
    kinds: tuple[Backend, ...] = ("mps-partition", "mps-percentage") if apart else _STREAMS
    if backend.startswith(VIRTUAL):
        machine = load_machine(backend.removeprefix(VIRTUAL))
        return (kinds[-1] if machine.sms else "cores"), machine, ANY_DEVICE, []
    found, remarks = usable(all_backends())
    notes = [remark.why for remark in remarks]
    names = [one.name for one in found]
    kind = next((name for name in kinds if name in names), None)
    if backend == "cpu" or kind is None:
        return "cores", detect_cpu(), ANY_DEVICE, notes
    try:
        gpu = devices()[0]
    except (QuotaError, IndexError) as error:  # it has gone since the back ends looked
        return "cores", detect_cpu(), ANY_DEVICE, [*notes, f"the GPU can't be described: {error}"]
    return kind, gpu.machine(), gpu.uuid, notes
