"""NVML through a stub of the library, compiled here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rose_compiler.base.errors import QuotaError
from rose_compiler.runtime.quotas import MpsPercentage, devices, usable

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

STUB = r"""
#include <string.h>
typedef int ret;
static int sessions = 0;
ret nvmlInit_v2(void) { sessions++; return INIT; }
ret nvmlShutdown(void) { sessions--; return 0; }
int open_sessions(void) { return sessions; }
const char *nvmlErrorString(ret r) { return r == 9 ? "Driver Not Loaded" : "Unknown Error"; }
ret nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = CUDA; return 0; }
ret nvmlDeviceGetCount_v2(unsigned *n) { *n = COUNT; return 0; }
ret nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(long)(i + 1); return 0; }
ret nvmlDeviceGetUUID(void *h, char *s, unsigned n) {
    if (n < 40) return 7;
    strcpy(s, "GPU-0"); s[4] = '0' + (char)(long)h; return 0;
}
ret nvmlDeviceGetName(void *h, char *s, unsigned n) { strcpy(s, "NVIDIA H200"); return 0; }
ret nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) {
    *a = MAJOR; *b = 0; return 0;
}
#ifndef OLD
ret nvmlDeviceGetNumGpuCores(void *h, unsigned *n) { *n = CORES; return 0; }
#endif
ret nvmlDeviceGetMemoryBusWidth(void *h, unsigned *n) { *n = 6144; return WIDTH; }
ret nvmlDeviceGetMaxClockInfo(void *h, int kind, unsigned *n) {
    *n = kind == 2 ? 3125 : 0; return 0;
}
"""


def stub(folder: Path, **given: object) -> str:
    values = {"INIT": 0, "CUDA": 13000, "COUNT": 2, "MAJOR": 9, "CORES": 16896, "WIDTH": 0} | given
    source = folder / "stub.c"
    source.write_text(STUB)
    library = folder / f"stub{len(list(folder.iterdir()))}.so"
    flags = [f"-D{name}={value}" for name, value in values.items()]
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-w", *flags, str(source), "-o", str(library)],
        check=True,
        timeout=60,
    )
    return str(library)


@needs_compiler
def test_devices_are_described(tmp_path: Path) -> None:
    found = devices(stub(tmp_path))
    assert [device.uuid for device in found] == ["GPU-1", "GPU-2"]
    h200 = found[0]
    assert (h200.name, h200.capability, h200.sms, h200.cuda) == ("NVIDIA H200", (9, 0), 132, 13000)
    assert h200.bandwidth_bytes_per_s == pytest.approx(4.8e12)
    machine = h200.machine()
    assert (machine.sms, machine.chunk, machine.max_clients) == (132, 8, 48)


@needs_compiler
@pytest.mark.parametrize(
    ("named", "seen"),
    [
        ("1", "2"),
        ("1, 0", "21"),
        ("GPU-2", "2"),
        ("0,-1,1", "1"),
        ("1,7", "2"),
        ("GPU-", ""),  # the beginning of two
        ("1,1", "2"),
        ("", ""),
    ],
)
def test_devices_are_those_that_cuda_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert "".join(d.uuid[-1] for d in devices(stub(tmp_path))) == seen


@needs_compiler
def test_versions_and_generations_differ(tmp_path: Path) -> None:
    (a100,) = devices(stub(tmp_path, COUNT=1, MAJOR=8, CORES=6912, CUDA=13010, WIDTH=3))
    assert (a100.sms, a100.chunk, a100.max_clients) == (108, 4, 60)
    assert a100.bandwidth_bytes_per_s is None


@needs_compiler
def test_errors_of_the_library_are_named(tmp_path: Path) -> None:
    with pytest.raises(QuotaError, match="Driver Not Loaded"):
        devices(stub(tmp_path, INIT=9))
    with pytest.raises(QuotaError, match="has no nvmlDeviceGetNumGpuCores"):
        devices(stub(tmp_path, OLD=1))
    assert devices(stub(tmp_path, COUNT=0)) == []


def test_an_absent_library_is_an_error_and_a_remark() -> None:
    with pytest.raises(QuotaError, match="can't be loaded"):
        devices("libno-such-nvml.so.1")
    backend = MpsPercentage(find=lambda: devices("libno-such-nvml.so.1"))
    found, remarks = usable([backend])
    assert found == []
    assert [(r.code, r.verdict) for r in remarks] == [("not-available", "does-not-fit")]
    assert "libno-such-nvml.so.1 can't be loaded" in remarks[0].why
