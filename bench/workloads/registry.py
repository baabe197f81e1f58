"""The rows, by name."""

from __future__ import annotations

from bench.workloads import ppo
from bench.workloads.base import Workload
from bench.workloads.dppo import DPPO
from bench.workloads.grpo import GRPO
from bench.workloads.sac import SAC
from bench.workloads.torch_ppo import TorchPPO


def workloads() -> dict[str, Workload]:
    """Every workload, in the order of the table."""
    rows = ppo.workloads()
    random = rows.pop()
    return {w.name: w for w in (*rows, GRPO(), SAC(), TorchPPO(), DPPO(), random)}
