"""Merged statements do what the user's function does: generated functions, captured and emitted."""

from __future__ import annotations

import importlib.util
import random
import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest

from rose_compiler.codegen import emit, load
from rose_compiler.frontend.capture import capture
from rose_compiler.ir import interp
from rose_compiler.runtime.support import Runtime

HEAD = """\
import torch

GLOBAL = 3


class Env:
    def __init__(self):
        self.v = 0
        self.log = []

    def shards(self):
        return [self]

    def step(self, a):
        self.v = (self.v * 7 + a) % 1009
        self.log.append(self.v)
        return self.v, self.v % 3, self.v % 2 == 0, False, {"k": self.v}


def helper(env, x, y=2):
    x = x + y
    z = env.step(x)[0]
    for i in range(2):
        y = y + env.step(z)[0] % 5
        if y > 6:
            x = y
    return x, y


def pure(x):
    return x * 3 % 101


"""
NAMES = ("x", "y", "z", "w")


class Source:
    """A random function of the constructs that are structured: every body holds a step."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.lines = ["def fn(env, log, x, y):", "    z = 1", "    w = 2", "    i = 0"]
        self.left = 34
        self.count = 0

    def text(self) -> str:
        self.body(1, False)
        self.body(1, False)
        return HEAD + "\n".join([*self.lines, "    return x, y, z, w"]) + "\n"

    def name(self) -> str:
        return self.draw.choice(NAMES)

    def expression(self) -> str:
        a, b = self.draw.choice((*NAMES, "i")), self.name()
        return self.draw.choice(
            (
                f"{a} + {b}",
                f"({a} * {self.draw.randrange(1, 5)} + GLOBAL) % 97",
                f"pure({a})",
                a,
                str(self.draw.randrange(9)),
                f"({a} if {b} % 2 else 4)",
                f"sum(q for q in range({a} % 4))",
                f"int(torch.is_grad_enabled()) + {b}",
                f"[{a} for q in range(3)][0]",
            )
        )

    def body(self, indent: int, loop: bool) -> None:
        for _ in range(self.draw.randrange(1, 5)):
            self.left -= 1
            if self.left > 0:
                self.statement("    " * indent, indent, loop)
        self.lines.append("    " * indent + f"{self.name()} = env.step({self.name()})[0]")

    def statement(self, pad: str, indent: int, loop: bool) -> None:
        kinds = ["assign"] * 5 + ["both", "add", "log", "step", "parts", "helper", "maybe"]
        kinds += ["for", "for", "while", "if", "if", "with", "exit", "exit"]
        getattr(self, "_" + self.draw.choice(kinds))(pad, indent, loop)

    def write(self, *lines: str) -> None:
        self.lines += lines

    def _assign(self, pad: str, indent: int, loop: bool) -> None:
        self.write(f"{pad}{self.name()} = {self.expression()}")

    def _both(self, pad: str, indent: int, loop: bool) -> None:
        a, b = self.draw.sample(NAMES, 2)
        self.write(f"{pad}{a}, {b} = {self.expression()}, {self.expression()}")

    def _add(self, pad: str, indent: int, loop: bool) -> None:
        self.write(f"{pad}{self.name()} += {self.expression()}")

    def _log(self, pad: str, indent: int, loop: bool) -> None:
        self.write(f"{pad}log.append(({self.expression()}, {self.expression()}))")

    def _step(self, pad: str, indent: int, loop: bool) -> None:
        self.write(f"{pad}{self.name()} = env.step({self.name()})[0]")

    def _parts(self, pad: str, indent: int, loop: bool) -> None:
        a, b = self.draw.sample(NAMES, 2)
        self.write(f"{pad}{a}, {b}, done, _, info = env.step({self.name()})")
        self.write(f"{pad}if done:", f"{pad}    {a} = {b}")

    def _helper(self, pad: str, indent: int, loop: bool) -> None:
        a, b = self.draw.sample(NAMES, 2)
        self.write(f"{pad}{a}, {b} = helper(env, {self.expression()})")

    def _maybe(self, pad: str, indent: int, loop: bool) -> None:
        self.write(f"{pad}if {self.expression()} % 2:", f"{pad}    u = {self.expression()}")
        self.write(f"{pad}    env.step(u)")
        if self.draw.random() < 0.5:
            self.write(f"{pad}log.append(u)")

    def _for(self, pad: str, indent: int, loop: bool) -> None:
        bounds = ("range(3)", "range(1, 5, 2)", "reversed(range(3))", f"range({self.name()} % 3)")
        over = self.draw.choice((*bounds, f"[{self.name()}, 2]"))
        self.write(f"{pad}for {self.draw.choice(('i', 'j', 't', 'x'))} in {over}:")
        self.body(indent + 1, True)

    def _while(self, pad: str, indent: int, loop: bool) -> None:
        self.count += 1
        self.write(f"{pad}c{self.count} = 0", f"{pad}while c{self.count} < 3:")
        self.write(f"{pad}    c{self.count} += 1")
        self.body(indent + 1, True)

    def _if(self, pad: str, indent: int, loop: bool) -> None:
        self.write(f"{pad}if {self.expression()} % 2:")
        self.body(indent + 1, loop)
        if self.draw.random() < 0.5:
            self.write(f"{pad}else:")
            self.body(indent + 1, loop)

    def _with(self, pad: str, indent: int, loop: bool) -> None:
        self.write(f"{pad}with torch.no_grad():")
        self.body(indent + 1, False)

    def _exit(self, pad: str, indent: int, loop: bool) -> None:
        if loop:
            self.write(f"{pad}if {self.expression()} % 5 == {self.draw.randrange(5)}:")
            self.write(f"{pad}    {self.name()} = {self.expression()}")
            self.write(f"{pad}    {self.draw.choice(('break', 'continue'))}")


def module_of(text: str, folder: Path, name: str) -> Any:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ending(call: Any) -> tuple[Any, Any]:
    """The result, or the exception with the line that raised it."""
    try:
        return call(), None
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return None, (type(error), last.filename, last.lineno)


def both(module: Any) -> tuple[str, Any, Any]:
    """The emitted text, and all that shows of a run as written and of a run as emitted."""
    env, log = module.Env(), []
    eager = (ending(lambda: module.fn(env, log, 5, 8)), log, env.log)
    env, log = module.Env(), []
    captured = capture(module.fn, (env, log, 5, 8), {})
    program = captured.program
    given = {"env": env, "log": log, "x": 5, "y": 8}
    made = emit(program)
    run = load(made)
    values = [given[n] for n in program.value_params]
    states = [program.objects[n] for n in program.state_params]
    emitted = (ending(lambda: run(Runtime(), *values, *states)), log, env.log)
    return made.source, eager, emitted


@pytest.mark.parametrize("seed", range(40))
def test_generated_functions(seed: int, tmp_path: Path) -> None:
    text = Source(seed).text()
    source, eager, emitted = both(module_of(text, tmp_path, f"generated{seed}"))
    assert emitted == eager, f"{text}\n{source}"
    assert "fn_line" in source


def written(body: str, folder: Path, name: str = "written") -> tuple[str, Any, Any]:
    text = HEAD + "def fn(env, log, x, y):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    return both(module_of(text, folder, name))


def run_text(source: str) -> str:
    return source[source.index("def run(") :]


def test_a_whole_nest_becomes_one_function(tmp_path: Path) -> None:
    source, eager, emitted = written(
        """
        total = 0
        for t in range(x):
            for k in range(2):
                with torch.no_grad():
                    v = env.step(k)[0]
                if v % 3 == 0:
                    continue
                total += v
                if total > 50:
                    break
            log.append(total)
            env.step(t)
        return total
        """,
        tmp_path,
    )
    assert emitted == eager
    body = run_text(source).rstrip().splitlines()
    assert len(body) == 3, source
    assert "for" not in run_text(source)


def test_what_is_not_a_block_stays_apart(tmp_path: Path) -> None:
    """An operation whose implementation is not its statements is called, not written out."""
    text = (
        HEAD
        + "def fn(env, log, x, y):\n    a = x + 1\n    b = a * 2\n    env.step(b)\n    return b\n"
    )
    module = module_of(text, tmp_path, "apart")
    env = module.Env()
    program = capture(module.fn, (env, [], 5, 8), {}).program
    op = next(o for o in program.ops.by_name.values() if "b" in o.attributes["outputs"])
    op.impl = lambda a: a * 3
    run = load(emit(program))
    states = [program.objects[n] for n in program.state_params]
    assert run(Runtime(), *[5] * len(program.value_params), *states) == 18
    assert env.log == [18]


def test_a_variable_that_is_unbound_on_one_way_raises_where_it_is_read(tmp_path: Path) -> None:
    for start, name in ((5, "late"), (0, "never")):
        body = f"""
        k = 0
        for t in range({start}):
            late = env.step(t)[0]
            k = k + late
        log.append(k)
        return late
        """
        _, eager, emitted = written(body, tmp_path, name)
        assert emitted == eager
        assert (eager[0][1] is None) is (start > 0)


def test_the_interpreter_agrees(tmp_path: Path) -> None:
    module = module_of(Source(3).text(), tmp_path, "third")
    env, log = module.Env(), []
    captured = capture(module.fn, (env, log, 5, 8), {})
    values = {n: {"x": 5, "y": 8}[n] for n in captured.program.value_params}
    result = interp.run(captured.program, values)
    _, eager, _ = both(module)
    assert (result, log, env.log) == (eager[0][0], *eager[1:])
