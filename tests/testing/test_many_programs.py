"""Thousands of generated programs: what can be seen after them is what eager order leaves.

Each kind also has to contain what it is meant to contain, and passes have to do something to it:
programs in which nothing can go wrong would test nothing. `python -m rose_compiler.testing fuzz`
runs more of them, from other seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rose_compiler.testing.features import PROGRAM_FEATURES, TEXT_FEATURES
from rose_compiler.testing.fuzz import KINDS, Result, fuzz
from tests.testing.test_mutants import PLAIN

# half a minute of work on an idle core, some on a busy machine
pytestmark = pytest.mark.timeout(900)

#: How many programs of each kind, and what passes or schedules must do to them at the least.
SUITE: dict[str, tuple[int, dict[str, int]]] = {
    "nests": (
        395,
        {"canonicalize": 4, "hoist": 4, "late": 2, "moves": 1},
    ),
    "lanes": (260, {"lanes": 1, "stages": 1}),
    "rollouts": (
        140,
        {
            "hoist": 1,
            "split": 1,
            "tile_batch": 10,
            "defer": 3,
            "late": 20,
            "place": 1,
            "lanes": 1,
        },
    ),
    "pipelines": (
        40,
        {"pipeline_loops": 1, "on threads": 1, "lanes": 1, "two stages": 1, "more stages": 1},
    ),
    "updates": (80, {"unswitch": 20, "late": 20, "lanes": 1}),
    "streams": (60, {"streams": 20, "lanes": 20}),
    "groups": (20, {"accumulate": 4, "lanes": 1}),
    "functions": (80, {"moves": 1}),
    "references": (40, {"interleave": 10, "late": 10, "lanes": 10}),
    "aliasing": (60, {"moves": 1}),
    "recurrences": (40, {"scan": 1}),
    "trainings": (8, {"hoist": 1, "late": 1}),
    "streamed": (6, {"streams": 6}),
    "losses": (9, {"fuse": 3}),
    "critics": (20, {"drop_gradients": 5}),
    "hosted": (8, {"hosts": 2}),
    "iterations": (4, {"interleave": 1, "late": 1}),
}
#: In how many programs out of a hundred the passes that a kind is about do something.
SHARES: dict[str, dict[str, int]] = {
    "updates": {"unswitch": 30},
    "references": {"interleave": 30},
    "recurrences": {"scan": 80},
    "losses": {"fuse": 40},
    "critics": {"drop_gradients": 20},
    "hosted": {"hosts": 50},
}
FEATURES: dict[str, tuple[str, ...]] = {
    "nests": PROGRAM_FEATURES,
    "lanes": PROGRAM_FEATURES,
    "rollouts": ("loop", "carried over 1 trip", "indexed store", "borrowed buffer", "early exit"),
    "pipelines": ("loop", "carried over 1 trip", "indexed store", "borrowed buffer", "alias"),
    "updates": ("loop", "branch", "mutable local", "borrowed buffer", "optimizer step"),
    "streams": ("loop", "carried over 1 trip", "indexed store", "alias", "branch"),
    "references": ("loop", "carried over 1 trip", "indexed store", "alias", "early exit"),
    "groups": ("loop", "loop in a loop", "indexed store", "alias", "optimizer step"),
    "functions": TEXT_FEATURES,
    "aliasing": ("for", "attribute store", "indexed store", "in-place operator", "call"),
    "recurrences": ("for", "indexed store"),
    "trainings": ("for", "if", "loop in a loop", "attribute store", "in-place operator"),
    "streamed": ("for", "indexed store"),
    "critics": ("for", "if", "call"),
    "losses": ("for", "in-place operator", "call", "fused", "fused alone", "blocked"),
    "hosted": ("for", "if", "call"),
    "iterations": ("for", "with", "attribute store", "indexed store", "call"),
}


def test_the_suite_runs_two_thousand_programs_of_every_kind() -> None:
    """Those that planted faults are to be found by run without a fault, too."""
    assert sum(count for count, _ in SUITE.values()) + sum(PLAIN.values()) >= 2000
    assert SUITE.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", SUITE)
def test_generated_programs(kind: str, tally: Callable[[Result], None]) -> None:
    count, least = SUITE[kind]
    found = fuzz(kind, count, 20261130)
    tally(found)
    assert found.failure is None, found.failure
    assert found.programs == count
    done = {name: found.rewrites[name] for name in least}
    assert all(done[name] >= n for name, n in least.items()), done
    shares = SHARES.get(kind, {})
    applied = {name: 100 * found.applied[name] // count for name in shares}
    assert all(applied[name] >= least for name, least in shares.items()), applied
    assert not [f for f in FEATURES[kind] if found.features[f] == 0], found.features
    # what raises is compared in program order alone
    assert found.features["raises"] <= count // 2
