"""The Triton kernel in Triton's interpreter, against the loop over rows."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

# The interpreter is chosen when Triton is imported, so each run has a process of its own.
CODE = """
import torch
from rose_compiler.kernels.scan_triton import BLOCK, linear, linear_by_rows

g = torch.Generator().manual_seed(0)
for trips, size in ((1, 1), (9, 5), (6, 2 * BLOCK + 3)):
    a, b = (torch.randn(trips, size, generator=g) for _ in range(2))
    first = torch.randn(size, generator=g)
    some = torch.rand(trips, size, generator=g) < 0.3
    first[0] = float("inf")
    some[:, 0] = True
    for reset in (None, some):
        for reverse in (False, True):
            given = {"reset": reset, "reverse": reverse}
            found = linear(a, b, first, **given)
            torch.testing.assert_close(found, linear_by_rows(a, b, first, **given), equal_nan=True)
    columns = torch.randn(size, trips, generator=g).T
    torch.testing.assert_close(linear(columns, b, first), linear_by_rows(columns, b, first))
    doubles = [x.double() for x in (a, b, first)]
    torch.testing.assert_close(linear(*doubles), linear_by_rows(*doubles))
print("agree")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_computes_what_the_rows_do() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == "agree", done.stderr


@pytest.mark.gpu
def test_the_kernel_on_a_device() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    names = {"g = torch.Generator().manual_seed(0)": "g = torch.Generator('cuda').manual_seed(0)"}
    code = "\n".join(names.get(line, line) for line in CODE.splitlines())
    exec("import torch\ntorch.set_default_device('cuda')\n" + code, {})


def test_triton_is_not_imported_with_the_package() -> None:
    code = "import sys, rose_compiler.kernels.scan; print('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == "False"
