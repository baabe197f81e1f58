"""What published stage times leave open: assumptions with a low, a middle and a high value.

A row says how long simulation, inference and training take, not how many SMs they use. What is not
published is a :class:`Range`, with where it comes from. None is fitted to anybody's results.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Range:
    """An assumption: least, middle and greatest value, and where they come from."""

    low: float
    middle: float
    high: float
    source: str


RANGES: dict[str, Range] = {
    "sim_sms": Range(
        0.25,
        0.54,
        1.0,
        "share of the SMs a simulator on the GPU can use. Middle: simulation and rendering at the "
        "same time reached up to 1.85x of taking turns (VUDA), so that two such phases ask for "
        "little more than one device. Ends: no measurement found",
    ),
    "sim_serial": Range(
        0.2,
        0.4,
        0.7,
        "share of its time without a kernel. GPU utilization of 80%, 60% and 30% is reported for "
        "Isaac Gym and Isaac Lab (IsaacLab issues 738 and 3043)",
    ),
    "sim_fixed": Range(
        0.27,
        0.34,
        0.42,
        "share of a step that half the environments don't save. 10 environments at 44 steps/s and "
        "100 at 21 (ManiSkill issue 355): 20 ms and 0.28 ms an environment",
    ),
    "infer_sms": Range(
        0.5, 0.75, 1.0, "share of the SMs that inference can use: no measurement found"
    ),
    "infer_serial": Range(
        0.0,
        0.25,
        0.5,
        "share of its time without a kernel. CUDA graphs halve the time of a pi0 call (arXiv "
        "2510.26742); 0 is with them",
    ),
    "infer_fixed": Range(
        0.1,
        0.3,
        0.5,
        "share of a call that half the batch does not save: weights are read once whatever the "
        "batch. No measurement found",
    ),
    "memory": Range(
        0.2,
        0.5,
        0.8,
        "share of the bandwidth that inference uses at full rate; a simulator half of that, "
        "training as much. Vision-language backbones are bound by compute, action experts by "
        "memory (arXiv 2604.24447); the values are assumed",
    ),
    "grain": Range(
        1.0,
        3.0,
        8.0,
        "how much longer the kernels of inference and training last than a simulator's: no "
        "measurement found",
    ),
    "render": Range(
        0.0,
        0.25,
        0.5,
        "share of a simulator's time in a graphics context, where it renders: such contexts take "
        "turns with CUDA (VUDA). The share is assumed",
    ),
    "late": Range(
        0.0,
        0.1,
        0.25,
        "share of training that only reads the rollout (log-probabilities, values): one forward "
        "pass against 3 an epoch is 1/(1 + 3 E), 0.25 for one epoch and 0.1 for three; 0 where "
        "the rollout computes them itself",
    ),
    "apart": Range(
        0.0,
        0.0,
        1.0,
        "1 where the simulator has to live in a process of its own: stage one takes turns with it, "
        "stage two shares through MPS. 0 where it is a component like any other",
    ),
    "env_share": Range(
        0.48,
        0.65,
        0.96,
        "simulation's share of a rollout where only their sum is published: the least, a middling "
        "and the greatest of the rows that say both",
    ),
}
#: What makes training use the device well, for all rows: dense kernels, few launches.
TRAIN_SMS, TRAIN_SERIAL = 1.0, 0.05


@dataclass(frozen=True)
class Assumptions:
    """One point in :data:`RANGES`; the middle by default."""

    sim_sms: float = RANGES["sim_sms"].middle
    sim_serial: float = RANGES["sim_serial"].middle
    sim_fixed: float = RANGES["sim_fixed"].middle
    infer_sms: float = RANGES["infer_sms"].middle
    infer_serial: float = RANGES["infer_serial"].middle
    infer_fixed: float = RANGES["infer_fixed"].middle
    memory: float = RANGES["memory"].middle
    grain: float = RANGES["grain"].middle
    render: float = RANGES["render"].middle
    late: float = RANGES["late"].middle
    apart: float = RANGES["apart"].middle
    env_share: float = RANGES["env_share"].middle


NAMES = tuple(f.name for f in fields(Assumptions))
