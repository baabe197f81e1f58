"""The rows of ``data/stage_times.csv``: published stage times of one workload each."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.replay_assumptions import NAMES

DATA = Path(__file__).with_name("data") / "stage_times.csv"
#: A stage with this share of an iteration leaves nothing to gain from overlapping the others.
DOMINANT = 0.98


@dataclass(frozen=True)
class Row:
    """One published workload; times in the row's own unit, None where they are not published."""

    id: str
    workload: str
    hardware: str
    machine: str
    unit: str
    rollout: float | None
    env: float | None
    infer: float | None
    train: float | None
    invariant: float | None  # of the simulation: the same on every step, and done again
    sim: str
    renders: bool
    note: str
    source: str

    @property
    def why_not(self) -> str | None:
        """Why there is nothing to schedule in this row, None if there is."""
        if self.rollout is None and self.env is None:
            return "only inference is published"
        return None

    @property
    def published(self) -> dict[str, float]:
        """Stages as published: a rollout that is not split counts as one."""
        if self.env is not None and self.infer is not None:
            found = {"simulation": self.env, "inference": self.infer}
        elif self.rollout is not None and self.infer is not None:
            found = {"simulation": self.rollout - self.infer, "inference": self.infer}
        elif self.rollout is not None and self.env is not None:
            found = {"simulation": self.env, "inference": self.rollout - self.env}
        else:
            found = {"rollout": self.rollout or self.env or 0.0}
        return found | ({"training": self.train} if self.train is not None else {})

    @property
    def no_gain(self) -> bool:
        """Whether one stage takes so much that no gain is predicted, before anything is run."""
        if self.why_not:
            return False
        return max(self.published.values()) / sum(self.published.values()) >= DOMINANT

    @property
    def split(self) -> bool:
        """Whether simulation and inference are published apart."""
        return "simulation" in self.published

    def assumed(self) -> tuple[str, ...]:
        """The assumptions that matter to this row."""
        left_out = {
            "sim_sms": self.sim == "cpu",
            "sim_serial": self.sim == "cpu",
            "sim_fixed": self.sim == "cpu",
            "apart": self.sim == "cpu",
            "render": not self.renders,
            "late": self.train is None,
            "env_share": self.split,
        }
        return tuple(name for name in NAMES if not left_out.get(name, False))


def rows(path: Path = DATA) -> list[Row]:
    """The table's rows."""
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            times: dict[str, Any] = {
                name: float(line[name]) if line[name] else None
                for name in ("rollout", "env", "infer", "train", "invariant")
            }
            texts: dict[str, Any] = {
                name: line[name] for name in ("id", "workload", "hardware", "machine", "unit")
            }
            found.append(
                Row(
                    **texts,
                    **times,
                    sim=line["sim"],
                    renders=line["renders"] == "yes",
                    note=line["note"],
                    source=line["source"],
                )
            )
    return found
