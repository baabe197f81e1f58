"""Random recurrences as users write them: eager, captured and emitted give the same bits.

Each is a function of its own file, since capture reads source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rose_compiler.codegen.emit import emit
from rose_compiler.codegen.load import load
from rose_compiler.ir import interp
from rose_compiler.kernels import scan, scan_cpu
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.scan import Scan
from rose_compiler.runtime.support import Runtime
from rose_compiler.testing.capturing import first_trip, rebound, values_of
from rose_compiler.testing.functions import load as load_module
from rose_compiler.testing.recurrences import SHAPES, Writer, seen, world


def written(seed: int, folder: Path) -> Any:
    path = folder / f"recurrence_{seed}.py"
    return load_module(Writer(seed).source(), path).recurrence


@pytest.mark.parametrize("seed", range(40))
def test_random_recurrences(seed: int, tmp_path: Path, monkeypatch) -> None:
    fn = written(seed, tmp_path)
    shape = SHAPES[seed % len(SHAPES)]
    if seed % 3 == 0:
        monkeypatch.setattr(scan_cpu, "STRETCH", 1)
    given = world(seed, shape)
    eager = seen(fn(*given), given)

    old = world(seed, shape)
    captured = first_trip(fn, *old).captured
    program = captured.program

    def arguments() -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        new = world(seed, shape)
        return new, values_of(captured, new, {}), rebound(program.objects, old, new)

    new, values, objects = arguments()
    assert seen(interp.run(program, values, objects), new) == eager

    context = PassContext(numerics="bitwise")
    history = PassManager([Scan()], verify=2).run(program, context)
    assert len(history.remarks.applied()) == 1, history.remarks.render()
    new, values, objects = arguments()
    assert seen(interp.run(program, values, objects), new) == eager

    runs: list[bool] = []
    original = scan.run

    def watched(*args: Any) -> Any:
        found = original(*args)
        runs.append(found is not None)
        return found

    monkeypatch.setattr(scan, "run", watched)
    run = load(emit(program))
    new, values, objects = arguments()
    inputs = [values[n] for n in program.value_params] + [objects[n] for n in program.state_params]
    assert seen(run(Runtime(), *inputs), new) == eager
    assert runs == [True]
