"""Puts quota plans into force: MPS percentages and partitions, green contexts, CPU cores.

All have one interface. A back end that the machine lacks is passed over with a remark:

>>> found, remarks = usable([Cores()])
>>> [backend.name for backend in found]
['cores']
"""

from __future__ import annotations

from rose_compiler.runtime.quotas.base import Applied, Probe, QuotaBackend, usable
from rose_compiler.runtime.quotas.control import Control
from rose_compiler.runtime.quotas.cores import Cores
from rose_compiler.runtime.quotas.green import GreenContexts
from rose_compiler.runtime.quotas.managed import ManagedHosts
from rose_compiler.runtime.quotas.mps import MpsDaemon, MpsPartition, MpsPercentage
from rose_compiler.runtime.quotas.nvml import Device, devices

__all__ = [
    "Applied",
    "Control",
    "Cores",
    "Device",
    "GreenContexts",
    "ManagedHosts",
    "MpsDaemon",
    "MpsPartition",
    "MpsPercentage",
    "Probe",
    "QuotaBackend",
    "all_backends",
    "devices",
    "usable",
]


def all_backends() -> list[QuotaBackend]:
    """Every back end, the one that says most about who runs where first."""
    return [MpsPartition(), GreenContexts(), MpsPercentage(), Cores()]
