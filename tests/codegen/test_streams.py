"""Emitted code on device streams: ordered by events, found out where a wait is lost."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from rose_compiler.codegen import emit, load
from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.ir.sizes import SIZES, Shape, Sizes
from rose_compiler.ir.verify import verify
from rose_compiler.runtime import graphs
from rose_compiler.runtime.recording import RaceFound, RecordingStreams
from rose_compiler.runtime.support import Runtime

TEXT = """
@op(kind="graph", reads=[], writes=[], may_raise=False)
def policy(x):
    y = torch.tanh(x)
    return y

@op(kind="graph", reads=[], writes=[], may_raise=False)
def value(x):
    y = torch.square(x)
    z = torch.sum(y)
    return z

@op(kind="graph", reads=[], writes=[], may_raise=False)
def step(x, a):
    y = torch.add(x, a)
    return y

@op(reads=[], writes=["total"])
def keep(total, v): ...

@program(stage="scheduled")
def roll(x, n, *, total):
    for t, obs in loop0(0, n, 1, obs=x):
        a = policy(obs) @ lane("stream:policy", order=0)
        v = value(obs) @ lane("stream:critic", order=1)
        nxt = step(obs, a) @ lane(order=2)
        keep(total, v) @ lane(stage=1, order=3)
        yield nxt
    last = loop0.obs
    return last
"""


def program() -> Program:
    made = parse(TEXT, {"keep": lambda total, v: total.add_(v)})
    verify(made)
    return made


def source() -> str:
    return emit(program()).source


def run(text: str, streams: RecordingStreams | None) -> tuple[torch.Tensor, torch.Tensor]:
    emitted = emit(program())
    namespace = dict(emitted.namespace)
    exec(compile(text, emitted.filename, "exec"), namespace)
    runtime = Runtime(streams=streams)
    x, total = torch.ones(3), torch.zeros(())
    if streams is None:
        return namespace["run"](runtime, x, 4, total), total
    with streams:
        return namespace["run"](runtime, x, 4, total), total


def test_results_are_those_of_the_reference() -> None:
    x, total = torch.ones(3), torch.zeros(())
    want = interp.run(program(), (x, 4), {"total": total})
    for streams in (None, RecordingStreams()):
        got, sum_ = run(source(), streams)
        assert torch.equal(got, want)
        assert torch.equal(sum_, total)
    total = torch.zeros(())
    load(emit(program()))(Runtime(serial=True), x, 4, total)
    assert torch.equal(sum_, total)


def test_everything_is_ordered_and_two_streams_are_used() -> None:
    streams = RecordingStreams()
    run(source(), streams)
    streams.check()
    assert {s for s, _ in streams.issued} == {0, 1, 2}


@pytest.mark.parametrize("task", ["policy_task", "value_task"])
def test_a_lost_wait_is_found(task: str) -> None:
    streams = RecordingStreams()
    lost = re.sub(rf"{task}\.wait\(\)", f"{task}.value", source())
    assert lost != source()
    run(lost, streams)
    with pytest.raises(RaceFound):
        streams.check()


def test_what_inductor_compiles_is_compiled_on_a_stream_too() -> None:
    graph = "may_raise=False)\ndef value"
    text = TEXT.replace(graph, 'may_raise=False, attributes={"inductor": True})\ndef value')
    assert text != TEXT
    emitted = emit(parse(text, {"keep": lambda total, v: total.add_(v)})).source
    assert "critic.submit(2, rt.graph, value, obs)" in emitted
    assert "policy.submit(1, policy, obs)" in emitted


def test_on_a_stream_bits_stay_and_other_sizes_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What TorchScript is to run, Inductor would round otherwise; what takes the place of a graph
    for other sizes may draw, and would be traced."""
    made = program()
    node = next(n for n in made.nodes() if is_call(n) and op_of(n).name == "value")
    monkeypatch.setattr(graphs, "PAYS", float("inf"))
    monkeypatch.setattr(graphs, "_known_graphs", {})
    for known, kinds in (({}, ["script"]), ({"x": Shape((7,))}, [])):
        instead = partial(op_of(node).impl)
        op_of(node).attributes = {"script": True, SIZES: Sizes(known, instead, instead)}
        runtime, total = Runtime(), torch.zeros(())
        load(emit(made))(runtime, torch.ones(3), 4, total)
        assert torch.equal(total, run(source(), None)[1])
        assert [note.kind for note in runtime.notes] == kinds
