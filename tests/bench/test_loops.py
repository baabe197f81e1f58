"""The benchmark's loop trains, and the baselines train as it does."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from bench.handwritten import Overlap, overlapped, sequential
from bench.loops import SHAPES, Config, Setup, iteration, make

TINY = Config(
    num_envs=4, num_steps=8, hidden=16, layers=2, epochs=2, minibatches=2, shards=2, hosts="inline"
)
POOL = Config(
    num_envs=4, num_steps=8, hidden=16, layers=2, epochs=1, minibatches=2, shards=2,
    hosts="inline", simulator="envpool",
)  # fmt: skip


@pytest.fixture
def threads() -> Iterator[None]:
    """Put the thread count back that a test may leave changed."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(cfg: Config, fn: object = iteration, iterations: int = 2, **options: object) -> Setup:
    """A set-up that has trained a few iterations."""
    setup = make(cfg, **options)  # type: ignore[arg-type]
    try:
        torch.manual_seed(7)
        for _ in range(iterations):
            setup.run(fn)  # type: ignore[arg-type]
    finally:
        setup.close()
    return setup


def parameters(setup: Setup) -> list[torch.Tensor]:
    return [p.detach() for p in setup.agent.parameters()]


def test_an_iteration_collects_and_trains() -> None:
    start = make(TINY)
    before = [p.clone() for p in parameters(start)]
    start.close()
    setup = trained(TINY)
    assert all(not torch.equal(a, b) for a, b in zip(before, parameters(setup), strict=True))
    assert set(setup.stats) == {"kl", "pg_loss", "v_loss"}
    assert all(math.isfinite(x) for x in setup.stats.values())
    assert setup.buf.obs.std() > 0
    assert setup.buf.rewards.abs().sum() > 0


def test_without_epochs_it_collects_only() -> None:
    cfg = Config(
        num_envs=2, num_steps=4, hidden=8, layers=1, epochs=0, minibatches=1, shards=1,
        hosts="inline",
    )  # fmt: skip
    setup = make(cfg)
    before = [p.clone() for p in parameters(setup)]
    setup.run(iteration)
    setup.close()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(setup), strict=True))
    assert setup.stats == {}
    assert setup.buf.values.abs().sum() > 0


def test_early_stop_skips_the_epochs_that_are_left() -> None:
    steps = []
    for limit in (-1.0, math.inf):
        setup = make(Config(**{**vars(TINY), "target_kl": limit}))
        setup.run(iteration)
        setup.close()
        state = next(iter(setup.optimizer.state.values()))
        steps.append(int(state["step"]))
    assert steps == [2, 4]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("cfg", [TINY, POOL], ids=["gymnasium", "envpool"])
@pytest.mark.parametrize("values", ["deferred", "shadow"])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_overlap_trains_as_the_loop(cfg: Config, values: str, groups: int) -> None:
    loop = trained(cfg, sequential(1, 1), iterations=1)
    after = torch.get_rng_state()
    h = trained(cfg, overlapped(Overlap(groups, values)), iterations=1)  # type: ignore[arg-type]
    assert torch.equal(after, torch.get_rng_state())
    for name, mine in vars(loop.buf).items():
        torch.testing.assert_close(mine, getattr(h.buf, name), rtol=1e-4, atol=1e-5, msg=name)
    for a, b in zip(parameters(loop), parameters(h), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loop.next_obs, h.next_obs, rtol=1e-4, atol=1e-5)
    assert loop.stats.keys() == h.stats.keys()


@pytest.mark.usefixtures("threads")
def test_a_vector_environment_without_shards_gives_what_its_shards_give() -> None:
    shards, whole = trained(TINY), trained(TINY, shards=1)
    assert not hasattr(whole.envs, "shards")
    for name, mine in vars(shards.buf).items():
        assert torch.equal(mine, getattr(whole.buf, name)), name
    h = trained(TINY, overlapped(Overlap(groups=1)), iterations=1, shards=1)
    loop = trained(TINY, sequential(1, 1), iterations=1)
    torch.testing.assert_close(h.buf.obs, loop.buf.obs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h.buf.rewards, loop.buf.rewards, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("threads")
def test_thread_counts_by_phase_leave_the_loop_and_its_agent_as_they_were() -> None:
    plain = trained(TINY, sequential(1, 1))
    seen = []

    def observed(*args: object) -> object:
        result = sequential(1, 2)(*args)  # type: ignore[arg-type]
        seen.append(torch.get_num_threads())
        return result

    phased = trained(TINY, observed)
    assert seen == [2, 2]
    assert "get_value" not in vars(phased.agent)
    for a, b in zip(parameters(plain), parameters(phased), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_one_pool_gives_what_its_shards_give() -> None:
    shards, pool = trained(POOL), trained(POOL, shards=1, threads=2)
    for name, mine in vars(shards.buf).items():
        assert torch.equal(mine, getattr(pool.buf, name)), name


def test_shapes_split_evenly() -> None:
    for name, cfg in SHAPES.items():
        assert cfg.num_envs % cfg.shards == 0, name
        assert cfg.batch % cfg.minibatches == 0, name
