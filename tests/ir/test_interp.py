"""The reference executor against what Python itself would do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx

from rose_compiler.base.errors import ParseError
from rose_compiler.ir import interp
from rose_compiler.ir.ops import UNBOUND, Op, Signature
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program

OPS = """
@op(reads=[], writes=[])
def add(a, b): ...
@op(reads=[], writes=[])
def odd(a): ...
@op(reads=["log"], writes=["log"], results=0)
def note(log, a): ...
@op(reads=[], writes=[], results=2)
def both(a): ...
@op(reads=[], writes=[])
def mode(): ...
"""


def note(log: list[Any], a: Any) -> None:
    log.append(a)


BIND: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "odd": lambda a: a % 2 == 1,
    "note": note,
    "both": lambda a: (a, -a),
    "mode": torch.is_grad_enabled,
}


def build(body: str, params: str = "", **bind: Callable[..., Any]) -> Program:
    lines = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    return parse(f"{OPS}def p({params}):\n{lines}", BIND | bind)


def run(body: str, params: str = "", *args: Any, **objects: Any) -> Any:
    return interp.run(build(body, params), args, objects)


def test_carried_values_go_from_trip_to_trip() -> None:
    body = """
for t, a, b, c in loop(0, 7, 1, a=1, b=2, c=x):
    n = add(a, c)
    yield b, c, n
return loop.a, loop.b, loop.c
"""
    a, b, c = 1, 2, 3
    for _ in range(7):
        a, b, c = b, c, a + c
    assert run(body, "x", 3) == (a, b, c)


@pytest.mark.parametrize("bounds", [(0, 5, 2), (5, 0, -1), (3, 3, 1), (4, 1, 1), (-2, 3, 3)])
def test_a_range_counts_like_python(bounds: tuple[int, int, int]) -> None:
    log: list[int] = []
    run(f"for t in loop{bounds}:\n    note(log, t)\nreturn None", "*, log", log=log)
    assert log == list(range(*bounds))


def test_a_loop_without_trips_hands_out_what_it_was_given() -> None:
    assert run("for t, a in loop(0, 0, 1, a=x):\n    yield 5\nreturn loop.a", "x", 3) == 3


def test_a_loop_over_an_iterator_takes_one_item_a_trip() -> None:
    """The user's generator runs between the trips, not ahead of them."""
    log: list[Any] = []

    def items() -> Iterator[int]:
        for i in range(3):
            log.append(f"made {i}")
            yield i

    run("for x in loop(it):\n    note(log, x)\nreturn None", "it, *, log", items(), log=log)
    assert log == ["made 0", 0, "made 1", 1, "made 2", 2]


def test_breaks_and_continues_hand_out_their_values() -> None:
    body = """
for i, n, total in loop(n=0, total=0):
    more = add(n, 1)
    done = n >= 10
    break_if(done, (n, total))
    skip = odd(n)
    continue_if(skip, (more, total))
    sum = add(total, n)
    yield more, sum
return loop.n, loop.total
"""
    assert run(body) == (10, 0 + 2 + 4 + 6 + 8)


def test_an_exit_in_an_arm_leaves_the_loop_around_it_only() -> None:
    body = """
for t, a in outer(0, 3, 1, a=0):
    for s, b in inner(0, 5, 1, b=a):
        more = add(b, 1)
        o = odd(s)
        if o:
            far = s >= 3
            if far:
                break_if(True, (b,))
                note(log, "unreachable")
            note(log, s)
            continue_if(True, (b,))
        note(log, -1)
        yield more
    yield inner.b
return outer.a
"""
    log: list[Any] = []
    total = run(body, "*, log", log=log)
    want, a = [], 0
    for _ in range(3):
        for s in range(5):
            if s % 2 == 1:
                if s >= 3:
                    break
                want.append(s)
                continue
            want.append(-1)
            a += 1
    assert log == want
    assert total == a


def test_a_branch_runs_one_arm_and_takes_its_results() -> None:
    body = """
o = odd(x)
if o:
    p, q = both(x)
    note(log, "odd")
    r, s = p, q
else:
    note(log, "even")
    r, s = 0, x
return r, s
"""
    for x, want in ((3, (3, -3)), (4, (0, 4))):
        log: list[Any] = []
        assert run(body, "x, *, log", x, log=log) == want
        assert log == ["odd" if x == 3 else "even"]


def test_contexts_hold_for_the_operations_inside_and_for_no_others() -> None:
    body = """
a = mode()
with no_grad():
    b = mode()
    for t, v in loop(0, 1, 1, v=0):
        c = mode()
        with enable_grad():
            d = mode()
        yield (c, d)
e = mode()
return a, b, loop.v, e
"""
    assert run(body) == (True, False, (False, True), True)


def test_autocast_takes_keywords() -> None:
    text = """
@op(kind="graph", reads=[], writes=[])
def mm(x):
    y = torch.mm(x, x)
    return y
def p(x):
    with autocast("cpu", dtype=torch.bfloat16):
        y = mm(x)
    z = mm(x)
    return y, z
"""
    y, z = interp.run(parse(text), (torch.ones(2, 2),))
    assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float32)


def test_a_region_keeps_casts_of_weights_until_it_is_left() -> None:
    text = """
@op(reads=["w"], writes=[], results=0)
def look(w): ...
@op(reads=["w"], writes=["w"], results=0)
def change(w): ...
def p(n, *, w):
    for t in trips(0, n, 1):
        with autocast("cpu", dtype=torch.bfloat16, region=1):
            look(w)
            change(w)
            look(w)
        yield ()
    with autocast("cpu", dtype=torch.bfloat16, region=2):
        look(w)
    return n
"""
    seen: list[float] = []

    def look(w: torch.Tensor) -> None:
        seen.append(torch.mm(w, torch.ones(1, 1)).item())

    def change(w: torch.Tensor) -> None:
        with torch.no_grad():
            w.add_(1)

    weight = torch.nn.Parameter(torch.ones(1, 1))
    interp.run(parse(text, {"look": look, "change": change}), (2,), {"w": weight})
    assert seen == [1, 1, 2, 2, 3]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # and nothing is kept behind it
        look(weight)
    change(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        look(weight)
    assert seen[-2:] == [3, 4]


def test_the_iterator_runs_under_the_context_of_its_loop() -> None:
    seen: list[bool] = []

    def items() -> Iterator[int]:
        seen.append(torch.is_grad_enabled())
        yield 1

    run("with no_grad():\n    for x in loop(it):\n        pass\nreturn None", "it", items())
    assert seen == [False]


def test_an_unassigned_variable_raises_as_in_python_where_it_is_used() -> None:
    body = """
for t, last in loop(0, n, 1, last=UNBOUND):
    yield t
value = loop.last
if False:
    note(log, value)
note(log, "reached")
more = add(value, 1)
return more
"""
    log: list[Any] = []
    assert run(body, "n, *, log", 2, log=log) == 2
    with pytest.raises(UnboundLocalError, match="'value'"):
        run(body, "n, *, log", 0, log=log)
    assert log == ["reached", "reached"]


@pytest.mark.parametrize("use", ["return x", "y = x + 1\n    return y", "y = x[0]\n    return y"])
def test_every_use_of_an_unassigned_variable_raises(use: str) -> None:
    text = f"def p():\n    for t, x in loop(0, 0, 1, x=UNBOUND):\n        yield t\n    {use}\n"
    program = parse(text.replace("return x", "return loop.x").replace("= x", "= loop.x"))
    with pytest.raises(UnboundLocalError, match="not associated with a value"):
        interp.run(program)


def test_exceptions_come_out_unchanged_and_name_their_node_once() -> None:
    class Trouble(ValueError):
        pass

    trouble = Trouble("third step")

    def fail(a: int, b: int) -> int:
        if a == 2:
            raise trouble
        return a

    errors: list[tuple[str, BaseException]] = []

    class Hooks(interp.Hooks):
        def error(self, node: fx.Node, error: BaseException) -> None:
            errors.append((node.name, error))

    program = build("for t in loop(0, 5, 1):\n    y = add(t, 0)\nreturn None", add=fail)
    with pytest.raises(Trouble) as caught:
        interp.run(program, hooks=Hooks())
    assert caught.value is trouble
    assert caught.value.__cause__ is None
    assert not hasattr(trouble, "__notes__")
    assert errors == [("y", trouble)]


def test_hooks_see_operations_values_and_trips_in_order() -> None:
    events: list[Any] = []

    class Hooks(interp.Hooks):
        def before(self, node: fx.Node, args: tuple[Any, ...]) -> None:
            events.append(("before", node.name, args, torch.is_grad_enabled()))

        def after(self, node: fx.Node, args: tuple[Any, ...], result: Any) -> None:
            events.append(("after", node.name, result, torch.is_grad_enabled()))

        def value(self, node: fx.Node, value: Any) -> None:
            events.append(("value", node.name, value))

        def trip(self, loop: fx.Node, number: int) -> None:
            events.append(("trip", loop.name, number))

    program = build(
        "for t, a in loop(4, 5, 1, a=x):\n    with no_grad():\n        y = add(a, t)\n    yield y\n"
        "return loop.a",
        "x",
    )
    assert interp.run(program, (3,), hooks=Hooks()) == 7
    assert events == [
        ("value", "x", 3),
        ("trip", "loop", 0),
        ("value", "t", 4),
        ("value", "a", 3),
        ("before", "y", (3, 4), False),
        ("after", "y", 7, False),
        ("value", "y", 7),
        ("value", "loop", (7,)),
        ("value", "getitem", 7),
    ]


def test_values_are_let_go_after_their_last_use() -> None:
    class Big:
        pass

    seen: list[weakref.ref[Big]] = []
    alive: list[bool] = []

    def make() -> Big:
        big = Big()
        seen.append(weakref.ref(big))
        return big

    def look(log: Any, a: Any) -> None:
        gc.collect()
        alive.append(seen[-1]() is not None)

    program = build(
        "b = mode()\nnote(log, b)\nnote(log, 1)\nreturn None", "*, log", mode=make, note=look
    )
    interp.run(program, objects={"log": None})
    assert alive == [True, False]


def test_states_below_a_root_are_found_by_path() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ModuleDict({"7": torch.nn.Tanh()}))
    root = {"net": net, "groups": [{"lr": 0.1}], 3: "three"}
    assert interp.resolve(root, "net.0.weight") is net[0].weight
    assert interp.resolve(root, "net.1.7") is net[1]["7"]
    assert interp.resolve(root, "groups.0.lr") == 0.1
    assert interp.resolve(root, "3") == "three"
    with pytest.raises(AttributeError):
        interp.resolve(root, "net.0.wrong")
    body = 'w = state(root, "net.0.bias")\nb = add(w, 0)\nreturn b'
    assert torch.equal(run(body, "*, root", root=root), net[0].bias)


def test_shards_of_a_simulator_are_taken_by_index() -> None:
    class Env:
        def shards(self) -> list[str]:
            return ["first", "second"]

    assert run("s = shard(env, 1)\nreturn s", "*, env", env=Env()) == "second"


def test_values_and_objects_must_be_complete() -> None:
    program = build("note(log, x)\nreturn x", "x, *, log")
    assert interp.run(program, {"x": 1}, {"log": [], "more": 0}) == 1
    for args, objects, match in (
        ((), {"log": []}, "takes 1 values, got 0"),
        ({"y": 1}, {"log": []}, r"takes \['x'\], got \['y'\]"),
        ((1,), {}, "needs objects for: log"),
    ):
        with pytest.raises(TypeError, match=match):
            interp.run(program, args, objects)


def test_objects_of_the_program_are_the_default() -> None:
    log: list[Any] = []
    program = build("note(log, x)\nreturn x", "x, *, log")
    program.objects["log"] = log
    interp.run(program, (4,))
    assert log == [4]


def test_traced_operations_run_from_text() -> None:
    text = """
@op(kind="graph", reads=["w"], writes=[], results=2)
def net(x, w):
    h = torch.nn.functional.linear(x, w)
    h2 = h.tanh()[:, 0]
    c = constant([2.0, 3.0], torch.float32, torch.device("cpu"))
    torch.Tensor.add_(h2, 1)
    return h2 * c, {"h": [h]}
def p(x, *, w):
    y, rest = net(x, w)
    return y, rest
"""
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    y, rest = interp.run(parse(text), (x,), {"w": w})
    h = torch.nn.functional.linear(x, w)
    assert torch.equal(y, (h.tanh()[:, 0] + 1) * torch.tensor([2.0, 3.0]))
    assert torch.equal(rest["h"][0], h)


def test_an_operation_without_implementation_says_so() -> None:
    program = parse("@op()\ndef act(x): ...\ndef p():\n    y = act(1)\n    return y\n")
    with pytest.raises(ParseError, match="'act'") as caught:
        interp.run(program)
    assert caught.value.code == "parse-unbound"


def test_a_maybe_unbound_parameter_may_be_handed_to_a_block_that_knows() -> None:
    op = Op(
        Signature("f", ("a",), (), ()), lambda a: a is UNBOUND, attributes={"maybe_unbound": ("a",)}
    )
    graph = fx.Graph()
    graph.output(graph.create_node("call_function", op, (UNBOUND,)))
    program = Program("p", fx.GraphModule(torch.nn.Module(), graph), None)  # type: ignore[arg-type]
    assert interp.run(program) is True
