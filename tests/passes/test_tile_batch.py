"""tile_batch: groups of shards advance apart, whole batches are joined, coupling is refused."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.tile_batch import TileBatch
from rose_compiler.passes.tiling import Tiling

CONTEXT = PassContext(options=Decision(groups=2), shards={"envs": (3, 3, 3, 3)})
TEXT = (Path(__file__).parent / "golden/tile_batch/rollout.in.txt").read_text()


def test_two_groups_of_two_shards(golden) -> None:
    golden("rollout", [TileBatch()], CONTEXT)


def test_a_group_a_shard(golden) -> None:
    golden(
        "group_a_shard",
        [TileBatch()],
        replace(CONTEXT, options=Decision(groups=9), shards={"envs": (4, 8)}),
        program=parse(TEXT),
    )


@pytest.mark.parametrize(
    ("rows", "groups", "expected"),
    [
        ((4, 4, 4, 4), 2, (8, 8)),
        ((4, 4, 4, 4), 3, (4, 8, 4)),
        ((4, 4, 4, 4), 4, (4, 4, 4, 4)),
        ((4, 4), 5, (4, 4)),
        ((1, 1, 1, 9), 2, (3, 9)),
        ((9, 1, 1, 1), 2, (9, 3)),
        ((9, 1, 1, 1), 3, (9, 1, 2)),
        ((5,), 2, (5,)),
    ],
)
def test_neighbouring_shards_form_groups_of_nearly_equal_size(rows, groups, expected) -> None:
    tiling = Tiling.of(rows, groups)
    assert tiling.group_rows == expected
    assert tiling.size == sum(rows)
    spans = [span for group in tiling.groups for span in group]
    assert [hi - lo for lo, hi in spans] == list(rows)
    assert [lo for lo, _ in spans] == [0, *(hi for _, hi in spans[:-1])]


REFUSED = {
    "switched-off": ((), replace(CONTEXT, options=Decision())),
    "single-shard": ((), replace(CONTEXT, shards={"envs": (12,)})),
    "not-proven-separable": ((('batch={"action": 0, "return.0": 0}, ', ""),), CONTEXT),
    "batch-coupling": (
        (('"obs": 0, "noise": 0, "return.0": 0', '"noise": 0, "return.0": 0'),),
        CONTEXT,
    ),
    "probe-bits-differ": (
        (("exact=True)\ndef act", "exact=False)\ndef act"),),
        replace(CONTEXT, numerics="bitwise"),
    ),
    "not-probed": ((("exact=True)\ndef act", ")\ndef act"),), CONTEXT),
    "unknown-effects": ((('reads=[], writes=[], batch={"x"', 'batch={"x"'),), CONTEXT),
    "not-pure": ((('reads=["agent"], writes=[]', 'reads=["agent"], writes=["agent"]'),), CONTEXT),
    "draw-order": (
        (('reads=["agent"], writes=[]', 'reads=["agent", "rng:torch"], writes=["rng:torch"]'),),
        CONTEXT,
    ),
    "may-alias": (
        (
            ("def note(log, reward, infos)", "def note(log, action)"),
            ('reads=["log"], writes=["log"]', 'reads=["log"], writes=["log", "action"]'),
            ("note(log, reward, infos)\n", "note(log, action)\n"),
        ),
        CONTEXT,
    ),
    "early-exit": ((("        a_np = ", "        break_if(T, (obs,))\n        a_np = "),), CONTEXT),
    "unsupported-shape": (
        (
            (
                "        r = step(a_np, envs)\n",
                "        r = step(a_np, envs)\n        q = step(a_np, envs)\n",
            ),
        ),
        CONTEXT,
    ),
    "no-window": ((("= act(obs, noise, agent)", "= act(obs0, noise, agent)"),), CONTEXT),
    "opaque-call": (((', attributes={"step": {"env": "envs", "action": "action"}}', ""),), CONTEXT),
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused(blocked, code: str) -> None:
    changes, context = REFUSED[code]
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    assert blocked(text, TileBatch(), context) == [code]


def test_what_the_cycle_reads_may_be_written_beside_it() -> None:
    """A normalizer that is updated on every trip: each group reads what the whole batch read."""
    text = TEXT
    for old, new in (
        (
            'reads=["log"], writes=["log"], results=0)',
            'reads=["log"], writes=["agent"], results=0)',
        ),
        ("def note(log, reward, infos)", "def note(log, reward, infos, agent)"),
        ("note(log, reward, infos)\n", "note(log, reward, infos, agent)\n"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    program = parse(text)
    history = PassManager([TileBatch()], verify=2).run(program, CONTEXT)
    assert len(history.remarks.applied()) == 1
    order = [op_of(n).name for n in program.loops()[0].graph.nodes if is_call(n)]
    assert order.count("act") == 2
    assert order.index("note") > max(k for k, name in enumerate(order) if name == "act")


def test_what_is_handed_on_may_be_used_whole_on_the_same_trip() -> None:
    text = TEXT.replace(
        "        yield next_obs",
        "        store(buf, t, next_obs, next_obs)\n        yield next_obs",
    )
    program = parse(text)
    history = PassManager([TileBatch()], verify=2).run(program, CONTEXT)
    assert len(history.remarks.applied()) == 1


def test_values_that_differ_are_refused_in_both_modes(blocked) -> None:
    for numerics in ("close", "bitwise"):
        context = replace(CONTEXT, numerics=numerics, probe=lambda node, rows: "differ")
        assert blocked(TEXT, TileBatch(), context) == ["probe-values-differ"]


def test_close_numerics_allow_other_bits() -> None:
    program = parse(TEXT.replace("exact=True)\ndef act", "exact=False)\ndef act"))
    history = PassManager([TileBatch()], verify=2).run(program, CONTEXT)
    assert len(history.remarks.applied()) == 1


def test_the_probe_is_asked_for_the_rows_of_groups_and_of_shards() -> None:
    asked = {}

    def probe(node, rows):
        asked[node.target.name] = rows
        return "bits"

    context = replace(CONTEXT, probe=probe, shards={"envs": (2, 4, 6)})
    PassManager([TileBatch()]).run(parse(TEXT), context)
    assert asked == {
        "act": (6, 6),
        "to_numpy": (6, 6),
        "unpack": (2, 4, 6),
        "to_obs": (2, 4, 6),
    }


def test_buffers_that_are_read_again_after_the_next_step(blocked) -> None:
    text = TEXT.replace(
        "step(a_np, envs)", 'step(a_np, envs) @ facts(alias=["envs.outputs"], borrowed=True)'
    )
    text = text.replace(
        "to_obs(x)\n",
        'to_obs(x) @ facts(alias=["envs.outputs"], borrowed=True)\n        store(buf, t, obs, logprob)\n',
    )
    assert blocked(text, TileBatch(), CONTEXT) == ["borrowed-buffer"]


def test_values_of_other_lengths_than_the_batch() -> None:
    program = parse(TEXT)
    for node in program.nodes():
        if node.name == "next_obs":
            facts.put(node, spec=facts.Spec("tensor", "Tensor", (24, 5), "float32", "cpu"))
    history = PassManager([TileBatch()]).run(program, CONTEXT)
    assert [r.code for r in history.remarks.missed()] == ["unsupported-shape"]
    assert not history.remarks.applied()


def test_what_stores_beside_its_result_is_told_to_store_apart() -> None:
    text = TEXT.replace('reads=["agent"], writes=[]', 'reads=["agent"], writes=["agent[0]"]')
    (missed,) = PassManager([TileBatch()]).run(parse(text), CONTEXT).remarks.missed()
    assert (missed.code, missed.allow) == (
        "not-pure",
        "store what goes into agent in a statement of its own",
    )
