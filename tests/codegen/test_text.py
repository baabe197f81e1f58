"""The text of emitted code: readable, with modes, states and guards where they belong."""

from __future__ import annotations

import enum
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_compiler.base.errors import VerifyError
from rose_compiler.codegen import emit, load, schedule
from rose_compiler.ir import facts, interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.ir.sizes import SIZES, Items, Shape, Sizes, refused
from rose_compiler.runtime.support import Runtime

OPS = """
@op(reads=[], writes=[])
def f(x): ...

@op(reads=[], writes=[])
def g(x, y): ...

@op(reads=[], writes=[])
def odd(x): ...

@op(reads=[], writes=["buf"])
def put(buf, v): ...

@op(reads=["buf"], writes=[])
def total(buf): ...
"""

BIND = {
    "f": lambda x: x + 1,
    "g": lambda x, y: 2 * x + y,
    "odd": lambda x: x % 2 == 1,
    "put": lambda buf, v: buf.append(v),
    "total": sum,
}


def program(text: str, **more: Any) -> Program:
    return parse(OPS + textwrap.dedent(text), {**BIND, **more})


def emitted_run(p: Program) -> str:
    """The text of the function, without its head."""
    source = emit(p).source
    return source[source.index("def run(") :].rstrip()


def check(p: Program, values: tuple[Any, ...], **states: Any) -> Any:
    """Run emitted code and the reference executor on equal states; both agree."""
    copies = {name: list(s) if isinstance(s, list) else s for name, s in states.items()}
    want = interp.run(p, values, copies)
    got = load(emit(p))(Runtime(), *values, *states.values())
    assert got == want
    assert states == copies
    return got


def test_a_loop_reads_as_it_was_written() -> None:
    p = program("""
    def fn(x, n, *, buf):
        for t, acc in loop0(0, n, 1, acc=x):
            put(buf, acc)
            big = odd(acc)
            if big:
                y = f(acc)
                nxt = y
            else:
                nxt = acc
            break_if(big, (nxt,))
            after = g(nxt, t)
            yield after
        last = loop0.acc
        return last, x
    """)
    assert emitted_run(p) == textwrap.dedent("""\
        def run(rt, x, n, buf):
            acc = x
            for t in range(n):
                put(buf, acc)
                big = odd(acc)
                if big:
                    y = f(acc)
                    nxt = y
                else:
                    nxt = acc
                if big:
                    acc = nxt
                    break
                acc = g(nxt, t)
            return acc, x""")
    check(p, (2, 4), buf=[])
    check(p, (3, 4), buf=[])
    check(p, (3, 0), buf=[])


def test_values_that_change_places() -> None:
    p = program("""
    def fn(x, y, n):
        for t, a, b, c in loop0(3, n, -2, a=x, b=y, c=0):
            yield b, a, t
        a1 = loop0.a
        b1 = loop0.b
        c1 = loop0.c
        return a1, b1, c1
    """)
    assert "x, y, c = y, x, t" in emitted_run(p)
    assert check(p, (1, 2, -4)) == (1, 2, -3)


def test_an_initial_value_that_is_read_later_keeps_its_variable() -> None:
    p = program("""
    def fn(x, n):
        y = f(x)
        for t, a in loop0(0, n, 1, a=y):
            b = g(a, y)
            yield b
        r = loop0.a
        return r, y
    """)
    check(p, (1, 3))


def test_results_of_an_inner_loop_are_not_overwritten() -> None:
    p = program("""
    def fn(x, n):
        for t, a, b in loop0(0, n, 1, a=x, b=x):
            for k, c in inner(0, 2, 1, c=b):
                d = f(c)
                yield d
            e = inner.c
            h = g(t, t)
            yield e, h
        r = loop0.a
        s = loop0.b
        return r, s
    """)
    check(p, (1, 3))
    q = program("""
    def fn(x, n):
        for t, b in loop0(0, n, 1, b=x):
            for k, c in inner(0, 2, 1, c=b):
                d = f(c)
                yield d
            e = inner.c
            h = g(e, t)
            yield h
        s = loop0.b
        return s
    """)
    check(q, (1, 3))
    assert "b = g(b, t)" in emitted_run(q).replace("x", "b")


def test_loops_of_all_kinds() -> None:
    p = program("""
    def fn(items, x):
        for v, a in each(items, a=x):
            for trip, k in count(k=0):
                done = odd(k)
                break_if(done, (k,))
                k1 = f(k)
                yield k1
            k2 = count.k
            b = g(a, v)
            skip = odd(b)
            continue_if(skip, (b,))
            c = g(b, k2)
            yield c
        r = each.a
        return r
    """)
    text = emitted_run(p)
    assert "for v in items:" in text
    assert "while True:" in text
    assert "continue" in text
    check(p, ([1, 2, 3, 4], 5))


def test_the_trips_of_an_endless_loop_can_be_counted() -> None:
    p = program("""
    def fn(x):
        for trip, a in loop0(a=x):
            done = odd(trip)
            break_if(done, (a,))
            b = g(a, trip)
            yield b
        r = loop0.a
        return r
    """)
    check(p, (4,))


def test_neighbours_share_a_mode_and_a_loop_takes_it_along() -> None:
    bind = {"modes": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled())}
    ops = "@op(reads=[], writes=[])\ndef modes(): ...\n"
    p = parse(
        ops
        + textwrap.dedent("""
    def fn(n):
        a = modes()
        with no_grad():
            b = modes()
            c = modes()
            for t in loop0(0, n, 1):
                d = modes()
                with enable_grad():
                    e = modes()
            for t in loop1(0, n, 1):
                h = modes()
        for t in loop2(0, n, 1):
            with inference_mode():
                i = modes()
                j = modes()
        k = modes()
        return a, b, c, k
    """),
        bind,
    )
    assert emitted_run(p) == textwrap.dedent("""\
        def run(rt, n):
            a = modes()
            with torch.no_grad():
                b = modes()
                c = modes()
                for t in range(n):
                    modes()
                    with torch.enable_grad():
                        modes()
                for t_2 in range(n):
                    modes()
            with torch.inference_mode():
                for t_3 in range(n):
                    modes()
                    modes()
            k = modes()
            return a, b, c, k""")
    check(p, (2,))


def test_autocast_stays_inside_the_loop() -> None:
    # it keeps casts of weights until it ends, and a trip may have changed the weights
    p = program("""
    def fn(x, n):
        for t, a in loop0(0, n, 1, a=x):
            with autocast("cpu", torch.bfloat16):
                b = f(a)
            yield b
        r = loop0.a
        return r
    """)
    text = emitted_run(p)
    assert text.index("for t in") < text.index('with torch.autocast("cpu", torch.bfloat16):')
    check(p, (1, 3))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Sequential(torch.nn.Linear(3, 3))
        self.register_buffer("mean", torch.ones(3))


GRAPH = """
@op(kind="graph", reads=["w", "b", "m"], writes=[], may_raise=False, results=2)
def layer(x, w, b, m):
    # y = net(x)
    h = torch.nn.functional.linear(x, w, b)
    h1 = torch.tanh(h)
    k = constant([1.0, 2.0, 3.0], torch.float32, torch.device("cpu"))
    h2 = h1 - m
    h3 = torch.Tensor.clamp(h2, min=-1.0, max=float("inf"))
    s = h3 * k
    top = torch.max(s, 1)
    idx = top[1]
    part = s[:, 0:2]
    return part, idx

@op(reads=[], writes=["net"])
def train(net): ...

def fn(x, *, net):
    for t in loop0(0, 2, 1):
        w = state(net, "lin.0.weight")
        b = state(net, "lin.0.bias")
        m = state(net, "mean")
        p, i = layer(x, w, b, m)
        train(net)
    w2 = state(net, "lin.0.weight")
    b2 = state(net, "lin.0.bias")
    m2 = state(net, "mean")
    q, j = layer(x, w2, b2, m2)
    return q, j
"""


class Key(enum.Enum):
    """A key of a dict that has no text."""

    A = 1


def test_no_variable_hides_what_the_question_of_sizes_calls() -> None:
    p = program("""
    @op(kind="graph", reads=[], writes=[], may_raise=False)
    def add(list, len_1, key):
        hasattr_2 = list + len_1
        return hasattr_2

    def fn(x, y, z):
        list = add(x, y, z)
        len_1 = add(list, y, z)
        return len_1
    """)
    op = next(op_of(n) for n in p.nodes() if is_call(n))
    plain, dicts = Shape((2,)), Items(((Key.A, Shape((2,))),), dict)
    known = {"list": plain, "len_1": plain, "key": dicts}
    op.attributes[SIZES] = Sizes(known, lambda *args: "others", refused)
    x = torch.ones(2)
    assert torch.equal(load(emit(p))(Runtime(), x, x, {Key.A: x}), torch.full((2,), 3.0))
    op.attributes[SIZES] = Sizes({"list": Items(((0, plain),), list)}, lambda *args: "o", refused)
    assert load(emit(p))(Runtime(), x, x, None) == "o"


def test_a_traced_operation_is_written_out() -> None:
    def train(net: Net) -> None:
        with torch.no_grad():
            net.lin[0].weight.mul_(2)
        net.mean = net.mean + 1  # another tensor under the same name

    net = Net()
    p = parse(GRAPH, {"train": train})
    p.objects["net"] = net
    text = emit(p).source
    assert textwrap.dedent("""\
        # y = net(x)
        def layer(x, w, b, m):
            h = F.linear(x, w, b)
            h = torch.tanh(h)
            h = h - m
            h = torch.clamp(h, min=-1.0, max=float("inf"))
            h = h * layer_constant
            h_2 = torch.max(h, 1)
            h_2 = h_2[1]
            h = h[:, 0:2]
            return h, h_2
        """) in text.replace("h.clamp(", "torch.clamp(h, ")
    # parameters stay where they are; a buffer may be replaced by whoever writes the module
    assert 'net_lin_0_weight = rt.state(net, "lin.0.weight")' in text
    assert text.count('rt.state(net, "lin.0.weight")') == 1
    assert text.count('rt.state(net, "mean")') == 2
    x, twin = torch.randn(4, 3), Net()
    twin.load_state_dict(net.state_dict())
    want = interp.run(p, (x,), {"net": twin})
    got = load(emit(p))(Runtime(), x, net)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_the_user_assigns_is_looked_up_where_it_is_used() -> None:
    p = parse(GRAPH, {"train": lambda net: None})
    p.objects["net"] = Net()
    text = emit(p).source
    assert 'net_lin_0_bias = rt.state(net, "lin.0.bias")' in text
    import ast

    p.ops.by_name["train"].attributes["stmts"] = tuple(ast.parse("net.lin[0].bias = q").body)
    text = emit(p).source
    assert "net_lin_0_bias" not in text
    assert 'rt.state(net, "lin.0.bias")' in text


def one_thread(p: Program) -> None:
    loop = p.loops()[0]
    facts.put(loop.node, loop=replace(loop.facts, threads=1))


def test_threads_are_set_around_the_loops_that_ask_for_it() -> None:
    p = program("""
    def fn(x, n):
        for t, a in loop0(0, n, 1, a=x):
            b = f(a)
            yield b
        r = loop0.a
        return r
    """)
    one_thread(p)
    assert emitted_run(p) == textwrap.dedent("""\
        def run(rt, x, n):
            threads = rt.set_threads(1)
            try:
                for t in range(n):
                    x = f(x)
            finally:
                rt.set_threads(threads)
            return x""")
    seen: list[int] = []
    p = program(
        """
    def fn(x, n):
        for t, a in loop0(0, n, 1, a=x):
            b = f(a)
            yield b
        r = loop0.a
        return r
    """,
        f=lambda x: (seen.append(torch.get_num_threads()), 1 // x)[1],
    )
    one_thread(p)
    before = torch.get_num_threads()
    run = load(emit(p))
    run(Runtime(), 1, 2)
    assert seen == [1, 1]
    with pytest.raises(ZeroDivisionError):
        run(Runtime(), 0, 2)
    assert torch.get_num_threads() == before


UNBOUND = """
def fn(x, n):
    for t, a in loop0(0, n, 1, a=UNBOUND):
        b = f(t)
        yield b
    r = loop0.a
    s = g(r, x)
    return s
"""


def test_reading_an_unbound_variable_raises() -> None:
    p = program(UNBOUND)
    assert "if a is UNBOUND:" in emitted_run(p)
    check(p, (1, 3))
    with pytest.raises(UnboundLocalError, match=r"local variable '(a|r)'"):
        load(emit(p))(Runtime(), 1, 0)


def test_only_what_may_be_unbound_is_checked() -> None:
    p = program("""
    def fn(x, n):
        for t, a in loop0(0, n, 1, a=x):
            b = f(a)
            yield b
        r = loop0.a
        return r
    """)
    assert "UNBOUND" not in emitted_run(p)


def test_a_branch_with_one_empty_arm() -> None:
    p = program("""
    def fn(x, *, buf):
        c = odd(x)
        if c:
            put(buf, x)
        return x
    """)
    assert "else" not in emitted_run(p)
    check(p, (3,), buf=[])
    check(p, (4,), buf=[])


def test_users_lines_stand_behind_the_code() -> None:
    from rose_compiler.base.errors import SourceLocation

    p = program("""
    def fn(x):
        y = f(x)
        return y
    """)
    node = p.find("y")
    facts.put(node, origin=facts.Origin(SourceLocation("/home/me/ppo.py", 41)))
    p.ops.by_name["f"].source = ("y = x + 1",)
    emitted = emit(p)
    assert "y = f(x)  # ppo.py:41  y = x + 1" in emitted.source
    (line,) = emitted.places
    assert emitted.source.splitlines()[line - 1].strip().startswith("y = f(x)")


def test_values_without_text_are_bound_by_name() -> None:
    thing = object()
    p = program("""
    def fn(x):
        y = g(x, 3)
        return y
    """)
    node = p.find("y")
    node.args = (node.args[0], thing)
    emitted = emit(p)
    assert "g(x, object_2)" in emitted.source or "g(x, object)" in emitted.source
    assert thing in emitted.namespace.values()


PIPE = """
@op(kind="step", reads=["env"], writes=["env"],
    attributes={"step": {"env": "env", "action": "a"}})
def step(a, env): ...

@program(stage="scheduled")
def fn(x, n, *, env, buf):
    for t, obs in loop0(0, n, 1, obs=x):
        a = f(obs) @ lane(order=0)
        r = step(a, env) @ lane("shard:env", order=1)
        put(buf, a) @ lane(stage=LATE, order=2)
        put(buf, t) @ lane(stage=LATE, order=3)
        yield r
    last = loop0.obs
    return last
"""


class Env:
    native_async = True

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.pending: list[int] = []

    def step(self, a: int) -> int:
        self.calls.append(a)
        return a * 2 % 17

    def step_async(self, a: int) -> None:
        assert not self.pending
        self.pending.append(a)

    def step_wait(self) -> int:
        return self.step(self.pending.pop())


def pipe(late: int) -> Program:
    return program(PIPE.replace("LATE", str(late)), step=lambda a, env: env.step(a))


def test_a_pipelined_loop() -> None:
    p = pipe(1)
    assert emitted_run(p) == textwrap.dedent("""\
        def run(rt, x, n, env, buf):
            shard_env = rt.lane("shard:env")
            try:
                obs = x
                started = 0
                for t in range(n):
                    if started:
                        obs = step_task.wait()
                    a = f(obs)
                    step_task = shard_env.step(1, env, a)
                    if started:
                        put(buf, a_prev)
                        put(buf, t_prev)
                    a_prev = a
                    t_prev = t
                    started += 1
                if started:
                    obs = step_task.wait()
                    put(buf, a_prev)
                    put(buf, t_prev)
                return obs
            except BaseException as error:
                rt.fault(error, FAULTS)
                raise
            finally:
                rt.drain()""")


@pytest.mark.parametrize("trips", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_stages_of_any_depth_over_any_number_of_trips(late: int, trips: int) -> None:
    p = pipe(late)
    want_env, want_buf = Env(), []
    want = interp.run(p, (1, trips), {"env": want_env, "buf": want_buf})
    for serial in (False, True):
        env, buf = Env(), []
        assert load(emit(p))(Runtime(serial=serial), 1, trips, env, buf) == want
        assert (env.calls, buf) == (want_env.calls, want_buf)


def test_a_lane_passes_results_on_without_a_wait() -> None:
    p = program("""
    @program(stage="scheduled")
    def fn(x, n):
        for t, a in loop0(0, n, 1, a=x):
            b = f(a) @ lane("thread:w", order=0)
            c = g(b, t) @ lane("thread:w", order=1)
            yield c
        r = loop0.a
        return r
    """)
    text = emitted_run(p)
    assert "g, f_task, t)" in text
    check(p, (1, 4))


@pytest.mark.parametrize(
    ("slots", "complaint"),
    [
        (('lane("thread:w", order=1)', "lane(order=0)"), "depends on b is issued before"),
        (("lane(order=1)", "lane(order=0)"), "which it uses"),
        (("lane(order=0)", "lane(stage=1, order=1)"), "can be left early"),
    ],
)
def test_a_schedule_that_breaks_a_dependence_is_refused(
    slots: tuple[str, str], complaint: str
) -> None:
    early = "break_if(c, (x2,)) @ lane(order=5)" if "early" in complaint else ""
    p = program(f"""
    @program(stage="scheduled")
    def fn(x, n):
        for t, x2 in loop0(0, n, 1, x2=x):
            b = f(x2) @ {slots[0]}
            c = odd(b) @ {slots[1]}
            {early}
            yield b
        r = loop0.x2
        return r
    """)
    with pytest.raises(VerifyError, match=complaint):
        emit(p)


def test_the_plan_can_be_read_as_text() -> None:
    assert schedule(pipe(1)).describe() == textwrap.dedent("""\
        fn:
            run loop0
        loop0:
            await r shard:env stage 1
            run a
            submit r shard:env
            run put stage 1
            run put_1 stage 1""")


STEPS = """
@op(kind="step", reads=["envs"], writes=["envs"], results=5, attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

@op(reads=[], writes=[])
def f(x): ...

def fn(a, *, envs):
    envs_0: state("envs.shards.0") = shard(envs, 0)
    s = step(a, envs_0) @ lane("shard:0", order=1)
    x = s[0]
    b = f(a) @ lane(order=2)
    whole = merge(envs, s) @ lane(order=3)
    last = whole[4]
    return x, b, last
"""  # noqa: E501


def test_a_shard_keeps_its_infos_packed_unless_somebody_reads_them() -> None:
    p = parse(STEPS)
    p.stage = "scheduled"
    assert "envs_0, a, packed=True)" in emit(p).source
    p = parse(STEPS.replace("x = s[0]", "x = s[4]"))
    p.stage = "scheduled"
    assert "envs_0, a)" in emit(p).source
