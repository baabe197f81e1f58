"""The replay: programs of published rows, and the page that the command prints."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import replay
from bench.replay import BAND, Outcome, Point, study
from bench.replay_assumptions import RANGES, Assumptions
from bench.replay_model import Replay
from bench.replay_rows import Row, rows

KNOWN = {row.id: row for row in rows()}
PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")


def test_stages_are_what_is_published_or_derived_from_it() -> None:
    assert KNOWN["openvla_ppo_maniskill_a"].published == {
        "simulation": pytest.approx(424.7),
        "inference": 451.5,
        "training": 573.2,
    }
    assert KNOWN["gr00t_ppo_isaaclab"].published["inference"] == 339
    assert not KNOWN["rsl_rl_rgb"].split
    assert KNOWN["openvla_oft_chunk8"].why_not
    assert all(row.source and row.workload for row in KNOWN.values())


def test_what_one_stage_fills_is_predicted_as_no_gain() -> None:
    assert [row.id for row in KNOWN.values() if not row.why_not and row.no_gain] == [
        "ppo_rollout_bound"
    ]


@pytest.mark.parametrize("name", ["openvla_ppo_maniskill_a", "rlinf_cpu_render", "simplerenv"])
def test_the_sequential_schedule_takes_the_published_time(name: str) -> None:
    row = KNOWN[name]
    done = Replay(row, Assumptions()).sequential()
    rollout = row.rollout or (row.env or 0.0) + (row.infer or 0.0)
    assert done.time == pytest.approx(rollout + (row.train or 0.0))


def test_parts_of_a_batch_do_the_work_of_the_whole() -> None:
    one = Replay(KNOWN["isaaclab_g1_rough"], Assumptions())
    work = [
        sum(k.work_s * k.demand * (1 - k.serial) for k in one.rollout(shards))
        for shards in (1, 2, 4)
    ]
    assert work == pytest.approx([work[0]] * 3)
    assert [sum(k.work_s for k in one.rollout(s)) for s in (1, 2)] != pytest.approx([work[0]] * 2)


def test_work_from_training_is_not_done_twice() -> None:
    row = KNOWN["pi05_libero_colocated"]
    one = Replay(row, Assumptions())
    late = one.rollout(2, late=5.0)
    assert sum(k.work_s for k in late if k.lane == "late") == pytest.approx(5.0)


def test_stages_build_on_each_other() -> None:
    """Stage two is never slower than stage one, which is never slower than sequential."""
    for name in ("simplerenv", "pi05_libero_disaggregated"):
        for apart in (0.0, 1.0):
            one = replay.point(KNOWN[name], Assumptions(apart=apart))
            assert one.throughput[0] == 1.0
            assert one.throughput[2] >= 1.0
            assert one.throughput[3] >= one.throughput[2]


def test_a_simulator_of_its_own_process_needs_stage_two() -> None:
    row = replace(KNOWN["simplerenv"], renders=False)
    one = replay.point(row, Assumptions(apart=1.0, sim_sms=0.4, infer_sms=0.5))
    assert one.by_quotas > 1.05
    assert "MPS" in one.what or "mps" in one.what or "green" in one.what


def made_up(gains: list[float], row: Row | None = None) -> Outcome:
    points = [Point((1.0, 0.9, gain, gain), (0.4, 0.3, 0.5, 0.5), "x") for gain in gains]
    ends = {"sim_sms": (points[0], points[-1]), "late": (points[0], points[0])}
    return Outcome(row or KNOWN["simplerenv"], points[0], ends, tuple(points))


def test_verdicts_name_what_decides() -> None:
    assert made_up([1.0, 1.1]).verdict() == (
        "below the band; sim_sms decides: 1.00x at 0.25, 1.10x at 1"
    )
    assert made_up([1.1, 1.5]).verdict().startswith("reaches into the band; sim_sms decides")
    assert made_up([1.3, 1.5]).verdict().startswith("inside the band")
    assert made_up([2.0, 2.5]).verdict().startswith("above the band")
    row = KNOWN["ppo_rollout_bound"]
    assert made_up([1.0, 1.0], row).verdict() == "no gain, predicted in advance: held"
    assert "not held: up to 1.30x" in made_up([1.0, 1.3], row).verdict()
    assert made_up([1.2]).middle.points == pytest.approx(10)
    assert BAND == (1.20, 1.92)


def test_the_command_prints_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    names = "ppo_rollout_bound,openvla_oft_chunk8"
    assert replay.main(["--rows", names, "--samples", "1", "--write", str(page)]) == 0
    out = capsys.readouterr().out
    assert "predicted in advance: no gain for ppo_rollout_bound" in out
    assert "left out, only inference is published" in " ".join(out.split())
    assert "predicted in advance: held" in page.read_text()
    with pytest.raises(SystemExit):
        replay.main(["--rows", "nothing"])


def test_a_study_has_every_assumption_at_its_ends() -> None:
    row = KNOWN["rlinf_cpu_render"]
    found = study(row, 1)
    assert set(found.ends) == set(row.assumed())
    assert "sim_sms" not in found.ends  # it simulates on the CPU
    assert len(found.all) == 2 + 2 * len(found.ends)


def test_the_page_has_every_row_and_assumption() -> None:
    named = set(re.findall(r"^\| (\w+) \|", PAGE, re.MULTILINE))
    assert set(KNOWN) <= named
    assert set(RANGES) <= named
