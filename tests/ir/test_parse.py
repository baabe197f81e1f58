"""Reading dumps: refusals with their lines, no way out of the language, no crash on any text."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rose_compiler.ir
from rose_compiler.base.errors import ParseError
from rose_compiler.ir import facts, functions
from rose_compiler.ir.dump import dump
from rose_compiler.ir.facts import Context, LoopFacts, Slot
from rose_compiler.ir.ops import LOOP, Op
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, Program
from rose_compiler.ir.verify import verify

HERE = Path(__file__).resolve()
DOCS = HERE.parents[2] / "docs" / "ir.md"
GOLDEN = [p.read_text(encoding="utf-8") for p in sorted((HERE.parent / "golden").glob("*.txt"))]


def example() -> str:
    found = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_of_the_docs_is_a_dump_of_a_valid_program() -> None:
    program = parse(example())
    verify(program)
    assert dump(program) == example()


def test_facts_are_read() -> None:
    program = parse(
        "@op()\ndef f(a): ...\n"
        "def p(x: facts(alias=['s.out'], borrowed=True), *, s: facts(state='other')):\n"
        "    with no_grad(), autocast('cpu', enabled=False):\n"
        "        y: state = f(x) @ lane('thread:a', order=2) @ facts(note='n')\n"
        "    z: state('%w') = f(y)\n"
        "    for t in loop(0, 3, 1) @ loop(label='rollout', index='step') @ index(alias=['%w']):\n"
        "        pass\n"
        "    return None\n"
    )
    x, s, y, z = (facts.get(program.find(n)) for n in "xsyz")
    assert (x.role, x.alias, x.borrowed) == ("value", ("s.out",), True)
    assert (s.role, s.state) == ("state", "other")
    assert (y.state, y.slot, y.note) == ("%y", Slot("thread:a", 0, 2), "n")
    assert y.context == (Context("no_grad"), Context("autocast", ("cpu", ("enabled", False))))
    assert (z.state, z.context) == ("%w", ())
    (loop,) = program.loops()
    assert loop.facts == LoopFacts("range", "rollout", "step")
    assert facts.get(loop.index).alias == ("%w",)


def test_nested_calls_become_nodes_in_order_of_evaluation() -> None:
    program = parse(
        "@op()\ndef f(a): ...\n@op()\ndef g(a, b): ...\n"
        "def p(x):\n    y = g(f(x) + 1, [f(2)])\n    return y\n"
    )
    text = dump(program)
    assert text.endswith(
        "    f = f(x)\n    add = f + 1\n    f_1 = f(2)\n    y = g(add, [f_1])\n    return y\n"
    )
    assert dump(parse(text)) == text


def test_bodies_capture_what_they_use_through_all_levels() -> None:
    program = parse(
        "@op()\ndef f(a): ...\ndef p(x, *, s):\n"
        "    for t in outer(0, 2, 1):\n        if True:\n"
        "            for u in inner(x):\n                f(s)\n                f(t)\n"
        "    return None\n"
    )
    inner, outer = program.loops()
    assert [n.name for n in outer.captured] == ["x", "s"]
    assert [n.name for n in inner.captured] == ["s", "t"]
    assert facts.get(inner.captured_params[0]).state == "s"


def test_bind_gives_implementations_by_name() -> None:
    text = (
        "@op(name='agent.act')\ndef act(x): ...\n@op()\ndef f(): ...\ndef p():\n    return None\n"
    )
    ops = parse(text, {"agent.act": abs, "unused": print}).ops.by_name
    assert ops["agent.act"].impl is abs
    assert not ops["f"].bound


HEAD = """@op(results=2)
def two(a): ...
@op()
def f(a): ...
@op(kind="graph", reads=[], writes=[])
def net(x):
    y = torch.tanh(x)
    return y
"""
MAIN = "def p(x, *, s):\n"  # line 9

#: statements at the top of a program (from line 10 on), the line at fault, what the message says
BODY_FAULTS = [
    ("return y", 10, "'y' is not defined"),
    ("y = f(x)", 10, "must end in `return`"),
    ("y = g(x)\nreturn y", 10, "no operation 'g'"),
    ("y = f(x)\ny = f(x)\nreturn y", 11, "means another value"),
    ("y = f(x, x)\nreturn y", 10, "another number of arguments"),
    ("y = f(a=x)\nreturn y", 10, "called with keywords"),
    ("y = x\nreturn y", 10, "must call something"),
    ("x.y = f(x)\nreturn x", 10, "can't stand here"),
    ("a = b = f(x)\nreturn x", 10, "can't stand here"),
    ("a, b, c = two(x)\nreturn x", 10, "other results"),
    ("a, b = f(x)\nreturn x", 10, "other results"),
    ("a, b = x + 1\nreturn x", 10, "other results"),
    ("y = x.mean()\nreturn y", 10, "called outside an operation"),
    ("y = torch.tanh(x)\nreturn y", 10, "called outside an operation"),
    ("y = x.shape\nreturn y", 10, "only be picked from a loop"),
    ("y = x @ f(x)\nreturn y", 10, "stands a mark"),
    ("y = f(x) @ lane('a') @ lane('b')\nreturn y", 10, "each once"),
    ("y = f(x) @ lane('a', stage='b')\nreturn y", 10, "wrong value"),
    ("y = f(x) @ lane('a', step=1)\nreturn y", 10, "unknown argument 'step'"),
    ("y = f(x) @ lane(x)\nreturn y", 10, "only constants"),
    ("y = f(x) @ loop(label='a')\nreturn y", 10, "can't stand here"),
    ("y: int = f(x)\nreturn y", 10, "annotation"),
    ("y = state(x, 'a')\nreturn y", 10, "no state"),
    ("y = state(s, 1)\nreturn y", 10, "must be a string"),
    ("y = f(b'x')\nreturn y", 10, "type bytes"),
    ("y = f(1j)\nreturn y", 10, "type complex"),
    ("y = f({x: 1})\nreturn y", 10, "key of a dict"),
    ("y = f(*x)\nreturn y", 10, "kind Starred"),
    ("y = f(lambda: 1)\nreturn y", 10, "kind Lambda"),
    ("y = f([i for i in x])\nreturn y", 10, "kind ListComp"),
    ("y = f(x if x else x)\nreturn y", 10, "kind IfExp"),
    ("y = f(x and x)\nreturn y", 10, "kind BoolOp"),
    ("y = f(f'{x}')\nreturn y", 10, "kind JoinedStr"),
    ("y = f(z := 1)\nreturn y", 10, "kind NamedExpr"),
    ("y = 0 < x < 1\nreturn y", 10, "kind Compare"),
    ("y = x is x\nreturn y", 10, "kind Compare"),
    ("y = +x\nreturn y", 10, "unary operator"),
    ("y = -'a'\nreturn y", 10, "no number"),
    ("y = f('a'[0])\nreturn y", 10, "constant is indexed"),
    ("y = f(torch)\nreturn y", 10, "'torch' is no value"),
    ("y = f(torch.float33)\nreturn y", 10, "is no constant"),
    ("y = f(torch.device('gpu'))\nreturn y", 10, "torch.device"),
    ("y = f(float('1'))\nreturn y", 10, "float"),
    ("y = loop(1, 2, 3, 4)\nreturn y", 10, "no operation 'loop'"),
    ("with open('f'):\n    y = f(x)\nreturn x", 10, "unknown context 'open'"),
    ("with no_grad() as n:\n    y = f(x)\nreturn x", 10, "`as`"),
    ("for t in loop(1, 2):\n    pass\nreturn x", 10, "0, 1 or 3 bounds"),
    ("for t in x:\n    pass\nreturn x", 10, "a loop must read"),
    ("for t in l(x):\n    pass\nelse:\n    pass\nreturn x", 10, "`else`"),
    ("for t, a in l(x, b=1):\n    yield a\nreturn x", 10, "differ between"),
    ("for t, a in l(x, a=1):\n    pass\nreturn x", 11, "end in `yield`"),
    ("for t, a in l(x, a=1):\n    yield a, a\nreturn x", None, None),  # one value: a tuple
    ("for t, a, b in l(x, a=1, b=2):\n    yield a\nreturn x", 11, "another number of values"),
    ("for t, t in l(x, t=1):\n    yield t\nreturn x", 10, "means another value"),
    ("for t in l(x):\n    y = f(x)\n    x = f(t)\nreturn x", 12, "means another value"),
    ("for t in l(x):\n    y = f(t)\nreturn y", 12, "'y' is not defined"),
    ("for t in l(x):\n    return x\nreturn x", 11, "can't stand here"),
    ("for t, a in l(x, a=1):\n    yield a\nz = l.b\nreturn z", 12, "carries no 'b'"),
    ("break_if(x, ())\nreturn x", 10, "outside a loop"),
    ("for t, a in l(x, a=1):\n    break_if(t, ())\n    yield a\nreturn x", 11, "hands out"),
    ("for t, a in l(x, a=1):\n    break_if(t, a)\n    yield a\nreturn x", 11, "hands out"),
    ("if x:\n    y = 1\nreturn x", 11, "both arms"),
    ("if x:\n    y = 1\nelse:\n    z = 1\nreturn x", 13, "both arms"),
    ("if x:\n    y = (1, 2)\nelse:\n    y = (1,)\nreturn x", 13, "numbers of results"),
    ("if x:\n    y, z = 1, 2\nelse:\n    y, z = 1,\nreturn x", 13, "than of names"),
    ("if x:\n    y, z = x\nelse:\n    y, z = x\nreturn x", 11, "can't end an arm"),
    ("while x:\n    pass\nreturn x", 10, "can't stand here"),
    ("import os\nreturn x", 10, "can't stand here"),
    ("del x\nreturn 1", 10, "can't stand here"),
    ("yield x\nreturn x", 10, "can't stand here"),
]


@pytest.mark.parametrize(("body", "line", "says"), BODY_FAULTS)
def test_a_faulty_body_is_refused_with_its_line(
    body: str, line: int | None, says: str | None
) -> None:
    text = HEAD + MAIN + "".join(f"    {part}\n" for part in body.split("\n"))
    if says is None:
        parse(text)
        return
    with pytest.raises(ParseError, match=re.escape(says)) as caught:
        parse(text, file="golden.txt")
    where = caught.value.where
    assert where is not None
    assert (where.file, where.line) == ("golden.txt", line)
    assert where.source == text.split("\n")[where.line - 1].strip()


#: whole texts, the line at fault, what the message says
TEXT_FAULTS = [
    ("", 1, "program is missing"),
    ("x = 1\n", 1, "functions only"),
    ("def p(:\n", 1, "not even Python"),
    ("def p():\n    return None\n\0", 1, "not even Python"),
    ("def p():\n    return " + "(" * 500 + "1" + ")" * 500 + "\n", 2, "not even Python"),
    ("def p():\n    return " + "-" * 5000 + "x\n", 1, "nested too deeply"),
    ("def p():\n    return -0x" + "f" * 9000 + "\n", 2, "a number of 36000 bits"),
    ("def p():\n    return None\ndef q():\n    return None\n", 3, "must be the last"),
    ("def p(a=1):\n    return a\n", 1, "plain parameters"),
    ("def p(*a):\n    return None\n", 1, "plain parameters"),
    ("def p(a, *, a):\n    return None\n", 1, "means another value"),
    ("def p(a: int):\n    return None\n", 1, "must read `facts(...)`"),
    ("def p(a: facts(state='b')):\n    return None\n", 1, "unknown argument 'state'"),
    ("@program(stage='later')\ndef p():\n    return None\n", 1, "`@program(...)`"),
    ("@wraps(f)\ndef p():\n    return None\n", 1, "must read `@op(...)`"),
    ("@wraps()\ndef p():\n    return None\n", 2, "unknown decorator"),
    ("@op\ndef f(): ...\n", 1, "must read `@op(...)`"),
    ("@op()\n@op()\ndef f(): ...\n", 3, "several decorators"),
    ("@op()\ndef f(a, a): ...\n", 2, "parameter twice"),
    ("@op()\ndef f(a=1): ...\n", 2, "plain parameters"),
    ("@op()\ndef f(): ...\n@op()\ndef f(): ...\n", 4, "is taken"),
    ("@op()\ndef f(): ...\n@op(name='f')\ndef g(): ...\n", 4, "two operations are named"),
    ("@op()\ndef rows(a): ...\n", 2, "is taken"),
    ("@op(kind='builtin')\ndef f(): ...\n", 1, "wrong value"),
    ("@op(kind='jit')\ndef f(): ...\n", 1, "wrong value"),
    ("@op(reads='a')\ndef f(a): ...\n", 1, "wrong value"),
    ("@op(reads=['a[['])\ndef f(a): ...\n", 2, "no effect entry"),
    ("@op(reads=['b'])\ndef f(a): ...\n", 2, "rooted at no parameter"),
    ("@op(results=-1)\ndef f(a): ...\n", 1, "wrong value"),
    ("@op(results=True)\ndef f(a): ...\n", 1, "wrong value"),
    ("@op(batch={'a': 'b'})\ndef f(a): ...\n", 1, "wrong value"),
    ("@op(exact=1)\ndef f(a): ...\n", 1, "wrong value"),
    ("@op(writs=[])\ndef f(a): ...\n", 1, "did you mean 'writes'"),
    ("@op(**{})\ndef f(a): ...\n", 1, "given twice"),
    ("@op()\ndef f(a):\n    return a\n", 3, "only an operation of kind 'graph'"),
    ("@op(kind='graph')\ndef f(a):\n    b = torch.tanh(a)\n", 3, "must end in `return`"),
    ("@op(kind='graph')\ndef f(a):\n    a = torch.tanh(a)\n    return a\n", 3, "assigned twice"),
    ("@op(kind='graph')\ndef f(a):\n    b = a\n    return b\n", 3, "without a call"),
    ("@op(kind='graph')\ndef f(a):\n    if a:\n        pass\n    return a\n", 3, "can't stand"),
    ("@op(kind='graph')\ndef f(a):\n    return b\n", 3, "'b' is not defined"),
    ("@op(kind='graph')\ndef f(a):\n    return g(a)\n", 3, "no function of torch"),
    ("@op(kind='graph')\ndef f(a):\n    return constant('a')\n", 3, "constant(...)"),
    ("@op(kind='graph')\ndef f(a):\n    return a.payload\n", 3, "can't be read here"),
]


@pytest.mark.parametrize(("text", "line", "says"), TEXT_FAULTS)
def test_a_faulty_text_is_refused_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(ParseError, match=re.escape(says)) as caught:
        parse(text)
    assert caught.value.where is not None
    assert caught.value.where.line == line


#: what a traced body might try to reach
ESCAPES = [
    "torch.load('f')",
    "torch.save(x, 'f')",
    "torch.hub.load('a', 'b')",
    "torch.jit.load('f')",
    "torch.package.PackageImporter('f')",
    "torch.serialization.load('f')",
    "torch.from_file('f')",
    "torch.ops.load_library('f')",
    "torch.ops.aten.from_file.default('f')",
    "torch.ops.aten.save.default(x, 'f')",
    "torch.ops.aten._print.default(x)",
    "torch.ops.aten.add.__class__(x)",
    "torch.ops.aten.__class__.add(x)",
    "torch.ops.prim.Print(x)",
    "torch.classes.load_library('f')",
    "torch.compile(x)",
    "torch.fork(x)",
    "torch.vmap(x)",
    "torch.os.system('true')",
    "torch.sys.exit()",
    "torch.nn.functional.torch.load('f')",
    "torch.nn.functional.__builtins__.eval('1')",
    "torch.nn.Linear(1, 1)",
    "torch.autograd.Function()",
    "torch.utils.cpp_extension.load('f')",
    "torch.multiprocessing.spawn(x)",
    "torch.__init__('f')",
    "torch.tensor.__call__(x)",
    "torch.Tensor.apply_(x, x)",
    "torch.Tensor.__class__(x)",
    "operator.attrgetter('a')",
    "operator.methodcaller('a')",
    "operator.call(x)",
    "operator.__builtins__",
    "math.__loader__.load_module('os')",
    "rose_compiler.api.compile(x)",
    "x.__class__",
    "x.__reduce__()",
    "x.apply_(x)",
    "x.share_memory_()",
    "x.register_hook(x)",
    "x.system('true')",
    "eval('1')",
    "exec('1')",
    "open('f')",
    "getattr(x, 'a')",
    "__import__('os')",
    "(lambda: 1)()",
    "[torch.load][0]('f')",
]


@pytest.mark.parametrize("call", ESCAPES)
def test_text_reaches_no_function_that_is_not_listed(call: str) -> None:
    text = (
        f"@op(kind='graph')\ndef f(x):\n    y = {call}\n    return y\ndef p():\n    return None\n"
    )
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert caught.value.where is not None
    assert caught.value.where.line == 3
    body = f"@op()\ndef f(x): ...\ndef p(x):\n    y = {call}\n    return y\n"
    with pytest.raises(ParseError):
        parse(body)


def test_nothing_on_the_list_takes_a_file_or_a_function() -> None:
    assert functions.resolve("torch.nn.functional.linear") is torch.nn.functional.linear
    assert functions.resolve("torch.ops.aten._softmax.default") is torch.ops.aten._softmax.default
    for name in ("torch.ops.aten.save.default", "torch.ops.aten.from_file.default", "torch.load"):
        assert functions.resolve(name) is None
    for name in functions.methods():
        assert not name.startswith("_")


def test_registered_functions_can_be_called_and_only_below_the_package() -> None:
    def check(x: object) -> object:
        return x

    functions.register("rose_compiler.tests.check", check)
    functions.register("rose_compiler.tests.check", check)
    assert functions.resolve("rose_compiler.tests.check") is check
    assert functions.name_of(check) == "rose_compiler.tests.check"
    with pytest.raises(ValueError, match="another function"):
        functions.register("rose_compiler.tests.check", print)
    with pytest.raises(ValueError, match="below rose_compiler"):
        functions.register("os.system", print)


def test_checks_of_traced_graphs_are_known_to_the_parser_alone() -> None:
    """In a process that imports nothing else."""
    body = "rose_compiler.checks.check_deviations(x)"
    text = f"@op(kind='graph')\ndef f(x):\n    c = {body}\n    return x\ndef p():\n    return 1\n"
    code = f"from rose_compiler.ir.parse import parse\nparse({text!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_parser_never_runs_text() -> None:
    """Its modules name nothing that evaluates, imports or unpickles."""
    folder = Path(rose_compiler.ir.__path__[0])
    forbidden = {"eval", "exec", "compile", "sympify", "pickle", "__import__", "literal_eval"}
    paths = [*sorted(folder.glob("parse*.py")), folder / "functions.py"]
    assert len(paths) > 4
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", None)))
            assert name not in forbidden, f"{path.name}:{getattr(node, 'lineno', 0)}"


def test_a_graph_of_any_size_is_read() -> None:
    lines = "".join(f"    y{i} = f(y{i - 1})\n" for i in range(1, 3000))
    program = parse(f"@op()\ndef f(a): ...\ndef p(y0):\n{lines}    return y2999\n")
    assert isinstance(program, Program)
    calls = [n for n in program.nodes() if isinstance(n.target, Op)]
    assert len(calls) == 2999


def test_loops_are_views_of_what_the_text_says() -> None:
    program = parse(GOLDEN[0])
    loop = LoopView(program.find("rollout"))
    assert loop.node.target is LOOP
    assert [n.name for n in loop.carried] == ["obs", "best"]
    assert loop.facts.wrapper == "tqdm"
    result = loop.result(0)
    assert result is not None
    assert result.name == "last"
