"""What GPUs there are, asked through NVML: no CUDA context is made, so MPS can still start.

The library is loaded by ctypes, since it comes with the driver: nothing else has to be installed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rose_compiler.base.errors import QuotaError, fail, register
from rose_compiler.base.machine import Machine, detect_cpu

register(
    "quota-nvml",
    QuotaError,
    "NVML could not be asked what GPUs there are",
    "look whether `nvidia-smi` works; without a GPU, name a virtual one",
)

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96  # bytes that NVML asks for at most, for a UUID or a name
_MEMORY_CLOCK = 2
#: CUDA cores in a multiprocessor by compute capability, from the CUDA programming guide.
_CORES_PER_SM = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_SM_SINCE_8_6 = 128


@dataclass(frozen=True)
class Device:
    """A GPU. ``cuda`` is the newest CUDA version that the driver serves, 13010 for 13.1."""

    uuid: str
    name: str
    capability: tuple[int, int]
    sms: int
    bandwidth_bytes_per_s: float | None
    cuda: int

    @property
    def chunk(self) -> int:
        """SMs in a chunk: 8 from compute capability 9.0 on, 4 before."""
        return 8 if self.capability >= (9, 0) else 4

    @property
    def max_clients(self) -> int:
        """Client contexts that MPS serves: 48 up to CUDA 13.0, 60 after."""
        return 60 if self.cuda > 13000 else 48

    def machine(self) -> Machine:
        """This GPU and the cores that this process may use."""
        return Machine(
            self.name,
            detect_cpu().cores,
            self.sms,
            self.chunk,
            self.bandwidth_bytes_per_s,
            self.max_clients,
        )


def devices(library: str = LIBRARY) -> list[Device]:
    """The GPUs of this machine that CUDA may use here, as ``CUDA_VISIBLE_DEVICES`` orders them.
    NVML knows of all, and numbers in that variable count in its order.

    Raises ``QuotaError`` (``quota-nvml``) if the library is absent or reports an error.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        raise fail("quota-nvml", f"{library} can't be loaded", found=error) from error
    with _session(nvml):
        count, version = ctypes.c_uint(), ctypes.c_int()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        _call(nvml, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        every = [_device(nvml, index, version.value) for index in range(count.value)]
    return _visible(every, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(every: list[Device], named: str | None) -> list[Device]:
    """Those that the variable names, by number or by the beginning of a UUID; as for CUDA, nothing
    counts behind the first name of none."""
    if named is None:
        return every
    found: list[Device] = []
    for name in (part.strip() for part in named.split(",")):
        if name.isdigit():
            known = every[int(name) : int(name) + 1]
        else:
            known = [device for device in every if name and device.uuid.startswith(name)]
        if len(known) != 1 or known[0] in found:
            break
        found += known
    return found


@contextmanager
def _session(nvml: ctypes.CDLL) -> Iterator[None]:
    _call(nvml, "nvmlInit_v2")
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _device(nvml: ctypes.CDLL, index: int, cuda: int) -> Device:
    handle = ctypes.c_void_p()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    uuid, name = ctypes.create_string_buffer(_TEXT), ctypes.create_string_buffer(_TEXT)
    _call(nvml, "nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_TEXT))
    _call(nvml, "nvmlDeviceGetName", handle, name, ctypes.c_uint(_TEXT))
    major, minor, cores = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
    _call(
        nvml,
        "nvmlDeviceGetCudaComputeCapability",
        handle,
        ctypes.byref(major),
        ctypes.byref(minor),
    )
    _call(nvml, "nvmlDeviceGetNumGpuCores", handle, ctypes.byref(cores))
    capability = (major.value, minor.value)
    per_sm = _CORES_PER_SM.get(capability, _CORES_PER_SM_SINCE_8_6)
    return Device(
        uuid.value.decode(),
        name.value.decode(),
        capability,
        cores.value // per_sm,
        _bandwidth(nvml, handle),
        cuda,
    )


def _bandwidth(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> float | None:
    """Two transfers a clock over the width of the bus; None where the driver does not say."""
    bits, clock = ctypes.c_uint(), ctypes.c_uint()
    try:
        _call(nvml, "nvmlDeviceGetMemoryBusWidth", handle, ctypes.byref(bits))
        _call(
            nvml,
            "nvmlDeviceGetMaxClockInfo",
            handle,
            ctypes.c_uint(_MEMORY_CLOCK),
            ctypes.byref(clock),
        )
    except QuotaError:
        return None
    return 2 * clock.value * 1e6 * bits.value / 8 or None


def _call(nvml: ctypes.CDLL, function: str, *arguments: object) -> None:
    try:
        status = getattr(nvml, function)(*arguments)
    except AttributeError as error:
        raise fail("quota-nvml", f"this NVML has no {function}", found=error) from error
    if status:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        text = nvml.nvmlErrorString(ctypes.c_int(status))
        raise fail("quota-nvml", f"{function} failed", found=text.decode() if text else status)
