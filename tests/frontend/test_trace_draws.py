"""Random draws taken out of a traced graph: the same numbers, bit for bit, and the same errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.draws import Hoisted, hoist_draws
from rose_compiler.frontend.trace import Traced, trace
from rose_compiler.ir.facts import Context

NO_GRAD = (Context("no_grad"),)


def traced(fn: Any, *args: Any, contexts: tuple[Context, ...] = NO_GRAD) -> Traced:
    found = trace(fn, args, lifted={}, contexts=contexts)
    assert isinstance(found, Traced), found
    return found


def hoisted(fn: Any, *args: Tensor) -> Hoisted:
    """Hoist, and compare on other values and seeds than the probe's."""
    t = traced(fn, *args)
    found = hoist_draws(t, args)
    assert isinstance(found, Hoisted), found
    for seed in range(100, 120):
        others = [a + 0.01 * seed * a for a in args]
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = fn(*others)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        drawn = [n.draw() for n in found.noises]
        assert torch.equal(after, torch.get_rng_state())
        result = found.gm.forward(*others, *drawn)
        assert torch.equal(torch.nan_to_num(expected), torch.nan_to_num(result))
    return found


@pytest.mark.parametrize("shape", [(1, 3), (2, 6), (8, 6), (64, 17), (5,), (3, 4, 5)])
class TestSameNumbers:
    def test_normal(self, shape: tuple[int, ...]) -> None:
        found = hoisted(torch.normal, torch.randn(shape), torch.rand(shape) + 0.1)
        assert found.noises[0].standard
        assert found.noises[0].shape == shape

    def test_normal_with_a_number(self, shape: tuple[int, ...]) -> None:
        found = hoisted(lambda m: torch.normal(m, 0.3), torch.randn(shape))
        assert found.noises[0].parameters == (0.0, 0.3)

    def test_sample(self, shape: tuple[int, ...]) -> None:
        found = hoisted(lambda m, s: Normal(m, s).sample(), torch.randn(shape), torch.rand(shape))
        # the distribution checks its scale already
        assert "check_deviations" not in found.gm.code

    def test_rsample(self, shape: tuple[int, ...]) -> None:
        hoisted(
            lambda m, s: TransformedDistribution(Normal(m, s), [TanhTransform()]).rsample(),
            torch.randn(shape),
            torch.rand(shape) + 0.1,
        )

    def test_categorical(self, shape: tuple[int, ...]) -> None:
        found = hoisted(lambda x: Categorical(logits=x).sample(), torch.randn(shape))
        assert found.noises[0].kind == "exponential"

    def test_bernoulli(self, shape: tuple[int, ...]) -> None:
        hoisted(lambda x: Bernoulli(logits=x).sample(), torch.randn(shape))

    def test_plain(self, shape: tuple[int, ...]) -> None:
        hoisted(lambda x: x + torch.randn_like(x) * torch.rand(shape), torch.randn(shape))

    def test_gumbel(self, shape: tuple[int, ...]) -> None:
        hoisted(lambda x: F.gumbel_softmax(x, hard=True), torch.randn(shape))


def test_two_draws_keep_their_order() -> None:
    found = hoisted(lambda x: torch.rand_like(x) + torch.normal(x, x.abs() + 1), torch.randn(4, 3))
    assert [n.kind for n in found.noises] == ["uniform", "normal"]


def test_nothing_drawn() -> None:
    t = traced(lambda x: x + 1, torch.ones(2))
    found = hoist_draws(t, [torch.ones(2)])
    assert isinstance(found, Hoisted)
    assert found.gm is t.gm


def test_generator_is_left_alone() -> None:
    t = traced(torch.normal, torch.zeros(3), torch.ones(3))
    before = torch.get_rng_state()
    hoist_draws(t, [torch.zeros(3), torch.ones(3)])
    assert torch.equal(before, torch.get_rng_state())


def test_errors_of_the_draw_stay() -> None:
    found = hoist_draws(
        traced(torch.normal, torch.zeros(3), torch.ones(3)), [torch.zeros(3), torch.ones(3)]
    )
    assert isinstance(found, Hoisted)
    bad = torch.tensor([1.0, -1.0, 1.0])
    with pytest.raises(RuntimeError, match="elements of std") as expected:
        torch.normal(torch.zeros(3), bad)
    with pytest.raises(RuntimeError, match="elements of std") as result:
        found.gm.forward(torch.zeros(3), bad, torch.zeros(3))
    assert str(result.value) == str(expected.value)


@pytest.mark.parametrize("bad", [[0.5, float("nan")], [0.5, -0.5], [0.0, 0.0], [float("inf"), 1.0]])
def test_errors_of_multinomial_stay(bad: list[float]) -> None:
    def draw(p: Tensor) -> Tensor:
        return torch.multinomial(p, 1, True)

    good = torch.rand(3, 2) + 0.1
    found = hoist_draws(traced(draw, good), [good])
    assert isinstance(found, Hoisted)
    weights = torch.tensor([[0.5, 0.5], bad, [0.5, 0.5]])
    with pytest.raises(RuntimeError) as expected:
        draw(weights)
    with pytest.raises(RuntimeError) as result:
        found.gm.forward(weights, torch.ones(3, 2))
    assert str(result.value) == str(expected.value)


class TestRefusals:
    def refused(self, code: str, fn: Any, *args: Tensor, **options: Any) -> None:
        found = hoist_draws(traced(fn, *args, **options), args)
        assert isinstance(found, Blocker), found
        assert found.code == code

    def test_dropout(self) -> None:
        self.refused("data-dependent-draw", lambda x: F.dropout(x), torch.randn(4, 3))

    def test_several_samples(self) -> None:
        self.refused("data-dependent-draw", lambda p: torch.multinomial(p, 2), torch.rand(4, 3) + 1)

    def test_gradients(self) -> None:
        x = torch.randn(3, requires_grad=True)
        self.refused("grad-graph", lambda x: torch.normal(x, 0.5), x, contexts=())

    def test_a_form_that_is_not_equal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The probe must catch a rewrite that gives other bits."""
        from rose_compiler.ir import draws

        rule = draws._as_drawn("uniform", 0)
        monkeypatch.setitem(draws._RULES, torch.randn_like, rule)
        self.refused("data-dependent-draw", lambda x: torch.randn_like(x), torch.ones(3))
