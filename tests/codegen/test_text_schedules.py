"""The text of emitted code: schedules of stages and lanes."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from rose_compiler.base.errors import VerifyError
from rose_compiler.codegen import emit, load, schedule
from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.runtime.support import Runtime
from tests.codegen.texts import check, emitted_run, program

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
