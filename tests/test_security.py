"""What is read from disk is data: dumps and decisions are never run, whatever they hold."""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sympy

from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import ConfigError, ParseError, RoseError, VerifyError
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.verify import verify

ROOT = Path(__file__).resolve().parents[1]
DUMPS = [
    (ROOT / "tests" / path).read_text(encoding="utf-8")
    for path in (
        "ir/golden/scheduled.txt",
        "passes/golden/canonicalize/results.in.txt",
        "passes/golden/defer/critic.in.txt",
        "passes/golden/late/rollout.in.txt",
    )
]
#: What somebody might put in place of a piece of a dump, in the hope that it runs or never ends.
NASTY = [
    "__import__('os').system('touch /tmp/pwned')",
    "().__class__.__bases__[0].__subclasses__()",
    "eval('1')",
    "exec('x = 1')",
    "open('/tmp/pwned', 'w')",
    "torch.load('/tmp/x')",
    "torch.ops.load_library('/tmp/x.so')",
    "torch.ops.aten.from_file('/tmp/pwned', True, 10)",
    "torch.hub.load('a', 'b')",
    "torch.serialization.pickle.loads(b'')",
    "operator.methodcaller('system', 'ls')",
    "math.__loader__",
    "lambda: 0",
    "[x for x in range(9)]",
    "9**9**9**9",
    "'x' * 10**12",
    "(" * 300 + ")" * 300,
    "-" * 5000 + "1",
    "1e999",
    "0x" + "f" * 9000,
    "f'{x}'",
    "*x",
    "**x",
    "x := 1",
    "await x",
    "yield from x",
    "\\x00",
    "\x00",
    "\ud800",
    "None.real",
    "torch.device('cuda:99')",
    "constant([1.0] , torch.float32, torch.device('nowhere'))",
    "slice(1, 2, 3, 4)",
    "frozenset([[1]])",
    "{[]: 1}",
    "float('1' * 99)",
    "globals()",
    "UNBOUND.x",
]
STATEMENTS = [
    "import os",
    "from os import system",
    "class X: pass",
    "global x",
    "del x",
    "raise SystemExit",
    "assert False",
    "while True: pass",
    "with open('/tmp/pwned', 'w') as f: pass",
    "@staticmethod\ndef g(): ...",
    "@op(reads=[], writes=[])\ndef g(x=print('pwned')): ...",
    "@__import__('os').system('ls')\ndef g(x): ...",
    "def g(x: __import__('os').system('ls')): ...",
]


def mutated(text: str, draw: random.Random) -> str:
    """The text with one to three changes: letters, words, lines, and what might do harm."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind = draw.randrange(8)
        at = draw.randrange(len(text))
        if kind == 0:
            text = text[:at] + chr(draw.randrange(32, 127)) + text[at + draw.randrange(2) :]
        elif kind == 1:
            text = text[:at] + text[at + draw.randrange(1, 30) :]
        elif kind in (2, 3):
            words = list(re.finditer(r"\w+|\([^()]*\)|\"[^\"]*\"", text))
            word, other = draw.choice(words), draw.choice(words)
            new = other.group() if kind == 2 else draw.choice(NASTY)
            text = text[: word.start()] + new + text[word.end() :]
        else:
            lines = text.split("\n")
            row = draw.randrange(len(lines))
            indent = re.match(r" *", lines[row])[0]  # type: ignore[index]
            if kind == 4:
                lines[row:row] = [lines[draw.randrange(len(lines))]]
            elif kind == 5:
                del lines[row]
            elif kind == 6:
                lines[row] = " " * draw.choice((0, 2, 4, 8)) + lines[row].strip()
            else:
                new = draw.choice(STATEMENTS).replace("\n", "\n" + indent)
                lines[row:row] = [indent + new]
            text = "\n".join(lines)
        if not text:
            return "\n"
    return text


#: Beginnings of audit events that reading a text must not cause.
HARMFUL = (
    *("os.system", "os.exec", "os.posix_spawn", "os.remove", "os.rename", "subprocess."),
    *("pickle.", "socket.", "ctypes.dlopen", "shutil.", "import"),
)


class _Watch:
    """Sees what the interpreter reports of files, processes, imports and executed code."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            harm = isinstance(args[1], str) and bool(set(args[1]) & set("wax+"))
        elif event == "exec":
            harm = not _of_torch(args[0].co_filename)
        else:
            harm = event.startswith(HARMFUL)
        if harm:
            self.seen.append(f"{event} {args}")


def _of_torch(filename: str) -> bool:
    """torch.fx defines the ``forward`` of every graph module by ``exec``; it is not called."""
    return filename.startswith("<eval_with_key>")


WATCH = _Watch()
sys.addaudithook(WATCH)  # can't be taken away again, only switched off


@contextmanager
def watched() -> Iterator[list[str]]:
    """What happens inside the block."""
    WATCH.seen, WATCH.on = [], True
    try:
        yield WATCH.seen
    finally:
        WATCH.on = False


def test_the_watch_sees_what_it_should(tmp_path: Path) -> None:
    with watched() as seen:
        eval("1 + 1")
        (tmp_path / "x").write_text("")
    assert [s.split()[0] for s in seen] == ["exec", "open"]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_a_thousand_mutated_dumps_give_an_error_or_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = sympy.sympify

    def sympify(expr: Any, *args: Any, **kwargs: Any) -> Any:
        assert not isinstance(expr, str), "sympy would evaluate the text"
        return real(expr, *args, **kwargs)

    monkeypatch.setattr(sympy, "sympify", sympify)
    for text in DUMPS:
        with suppress(RoseError):  # one of them tells of slots that no pass would give
            verify(parse(text))  # what is loaded on first use is loaded
    draw, programs = random.Random(0), 0
    with watched() as seen:
        for number in range(1000):
            text = mutated(DUMPS[number % len(DUMPS)], draw)
            try:
                program = parse(text)
                again = dump(program)
                programs += 1
                assert dump(parse(again)) == again, text
                verify(program)
            except ParseError:
                continue
            except VerifyError:
                continue
            except Exception as error:
                pytest.fail(f"{type(error).__name__}: {error}\nfrom the text\n{text}")
    assert not seen, seen
    assert 50 < programs < 700, "mutations should break many dumps, and not all"


def test_a_thousand_mutated_decisions_give_an_error_or_a_decision(tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    Decision(groups=4, late="shadow", defer=True, rollout_threads=1).save(path)
    good, draw, decisions = path.read_bytes(), random.Random(1), 0
    nasty = [
        b"[" * 100000,
        b"1e999",
        b"NaN",
        b"-1",
        b"null",
        b"{}",
        b"\xff\xfe",
        b"9" * 9999,
        b'"x"',
    ]
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data))
            if draw.random() < 0.3:
                data[at : at + draw.randrange(20)] = draw.choice(nasty)
            else:
                data[at] = draw.randrange(256)
        path.write_bytes(bytes(data))
        try:
            found = Decision.load(path)
        except ConfigError:
            continue
        assert Decision.from_dict(json.loads(json.dumps(found.to_dict()))) == found
        decisions += 1
    assert decisions < 500


#: Who may turn text into code, or bytes into objects, and of what.
ALLOWED = {
    ("exec", "codegen/load.py"): "code that the compiler emitted, or a file named by ROSE_EDIT",
    ("exec", "runtime/recovery.py"): "lines that the compiler emitted",
    ("exec", "testing/functions.py"): "functions that the test generator wrote",
    ("exec", "kernels/scan_scalar.py"): "a recurrence, written from its operations",
    ("compile", "kernels/scan_scalar.py"): "see above",
    ("compile", "codegen/load.py"): "see above",
    ("compile", "runtime/recovery.py"): "see above",
    ("compile", "testing/functions.py"): "see above",
    ("compile", "ir/block.py"): "syntax trees of the user's own statements",
    ("eval", "ir/sizes.py"): "what emitted code asks of sizes, written from those that were seen",
    ("load", "testing/check_iterations.py"): "tensors that the training at hand has just saved",
    ("loads", "runtime/hosts/transport.py"): "from a worker that this process started",
    ("loads", "runtime/hosts/process.py"): "from a worker that this process started",
    ("loads", "runtime/hosts/worker.py"): "from the process that started the worker",
    ("loads", "runtime/hosts/hosted.py"): "from a worker that this process started",
    ("loads", "runtime/hosts/served.py"): "from the process that started the worker",
    ("loads", "sim/shared_body.py"): "from the process that started the worker",
    ("loads", "sim/codec.py"): "from a worker that this process started",
}


def test_nothing_else_turns_text_into_code_or_bytes_into_objects() -> None:
    found = set()
    for path in (ROOT / "rose_compiler").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            short = name.rpartition(".")[2]
            bare = name in ("exec", "eval", "compile", "__import__")
            loads = short in ("loads", "load") and name.split(".")[0] in (
                *("pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "torch", "yaml"),
            )
            if bare or loads or name in ("numpy.load", "np.load"):
                found.add((short, str(path.relative_to(ROOT / "rose_compiler"))))
    assert found - set(ALLOWED) == set()
