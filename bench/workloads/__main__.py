"""Trainings as written, by hand and compiled: `python -m bench.workloads`.

Columns, all real trainings that alternate:

E0       the loop as written, over `ShardedEnv` where there are shards
E1       the best sequential variant: thread counts of either phase, other ways to run the simulator
C        act and update through `torch.compile`, fused optimizer, vectorized advantages
H        the best overlap written by hand
close    `rose_compiler.compile(iteration)`, once it has settled
bitwise  the same with `numerics="bitwise"`
bound    max(critical path, work / capacity), what nothing can beat

`--ablate` leaves each pass out in turn, `--adversarial` measures trainings whose obvious
transformation loses. Tables are Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

SETUP = "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri libgles2"
#: What `--ablate` looks at unless it is told.
ABLATED = "ppo-c,grpo"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(
        prog="bench.workloads", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", help="workloads, with commas between them")
    parser.add_argument("--pairs", type=int, help="trials of each variant (15)")
    parser.add_argument("--budget", type=float, help="seconds of tuning for each training (120)")
    parser.add_argument("--quick", action="store_true", help="few short trials: a smoke test")
    parser.add_argument("--json", type=Path, help="save everything measured")
    parser.add_argument("--ablate", action="store_true", help=f"what each pass brings ({ABLATED})")
    parser.add_argument("--adversarial", action="store_true", help="where transformations lose")
    parser.add_argument("--list", action="store_true", help="name the workloads")
    parser.add_argument("--setup", action="store_true", help="print how to install software GL")
    args = parser.parse_args(argv)
    if args.setup:
        print(SETUP)
        return 0

    # before anything imports MuJoCo: it reads them once
    from bench.workloads.scene import environment, source

    os.environ.update(environment())
    from bench import measure
    from bench.workloads import ablation, report
    from bench.workloads.adversarial import adversarial
    from bench.workloads.measuring import QUICK, Effort, measure_row
    from bench.workloads.registry import workloads
    from bench.workloads.verdict import verdict

    known = adversarial() if args.adversarial else workloads()
    if args.list:
        for workload in known.values():
            print(f"{workload.name}: {workload.about}")
        return 0
    wished = args.only or (ABLATED if args.ablate else ",".join(known))
    names = [n.strip() for n in wished.split(",")]
    if unknown := [n for n in names if n not in known]:
        parser.error(f"no workload {unknown[0]!r}; there are {', '.join(known)}")
    effort = QUICK if args.quick else Effort()
    if args.pairs is not None:
        effort = replace(effort, pairs=args.pairs)
    if args.budget is not None:
        effort = replace(effort, budget=args.budget)

    status = Console(stderr=True)
    found: list[Any] = []
    new: list[Any] = []
    texts: list[str] = []
    missed = False
    start = perf_counter()
    for name in names:
        with status.status(name) as line:

            def say(what: str, name: str = name, line: Any = line) -> None:
                line.update(f"{name}: {what}")
                if not status.is_terminal:
                    status.print(
                        f"{perf_counter() - start:5.0f} s  {name}: {what}", highlight=False
                    )

            if args.ablate:
                new = ablation.ablate(known[name], effort, say)
                text = ablation.table(new)
            elif args.adversarial:
                new = [verdict(known[name], effort, say)]
                text = new[0].text()
            else:
                new = [measure_row(known[name], effort, say)]
                text = f"{report.ratios(new)}\n\n{report.details(new[0])}"
        found += new
        if len(names) > 1:  # a long run shows what it has
            print(text, flush=True, end="\n\n")
        if args.json is not None:  # after each: a long run that is cut short keeps the rest
            data = {"machine": measure.machine(), "rows": [asdict(r) for r in found]}
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if args.ablate:
        texts.append(ablation.table(found))
    elif args.adversarial:
        texts += [v.text() for v in found] if len(found) == 1 else []
        missed = any(not v.held for v in found)
    else:
        lines = report.goals(found)
        missed = any(line.startswith("- missed") for line in lines)
        texts += [report.times(found), report.ratios(found)]
        texts.append(f"geometric mean of E0 / close: {report.geometric_mean(found)}")
        texts += ["\n".join(lines), "\n".join(f"- {report.details(r)}" for r in found)]
        if "grpo" in names:
            texts.append(f"frames: {_frames(source())}")
    print("\n\n".join([*texts, measure.machine()]))
    return int(missed)


def _frames(source: str) -> str:
    if source == "raster":
        return f"numpy rasterizer of our own, no GL found (`{SETUP}` installs one)"
    return f"MuJoCo's renderer in software, {source}"


if __name__ == "__main__":
    raise SystemExit(main())
