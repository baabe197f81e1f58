"""Bodies write Python code for their graphs when they are asked for it, not before."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.fx as fx

from rose_compiler.ir.body import Body


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The modules that code was written for."""
    found: list[fx.GraphModule] = []
    recompile = fx.GraphModule.recompile

    def noted(module: fx.GraphModule) -> object:
        found.append(module)
        return recompile(module)

    monkeypatch.setattr(fx.GraphModule, "recompile", noted)
    return found


def doubled() -> Body:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, x)))
    return Body(torch.nn.Module(), graph)


def test_code_is_written_when_it_is_asked_for(written: list[fx.GraphModule]) -> None:
    body = doubled()
    assert body.graph.owning_module is body
    assert written == []
    assert "torch.add" in body.code
    assert "torch.add" in body.code
    assert written == [body]
    assert "torch.add" in str(body)


def test_a_body_runs_as_any_graph_module(written: list[fx.GraphModule]) -> None:
    body, kept = doubled(), doubled().forward
    assert torch.equal(body(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(body(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(kept(torch.ones(1)), torch.full((1,), 2.0))
    assert torch.equal(kept(torch.ones(1)), torch.full((1,), 2.0))
    assert len(written) == 2


def test_each_body_has_code_of_its_own() -> None:
    one, other = doubled(), doubled()
    assert torch.equal(one(torch.ones(1)), torch.full((1,), 2.0))
    node = next(n for n in other.graph.nodes if n.op == "call_function")
    node.target = torch.mul
    assert torch.equal(other(torch.full((1,), 3.0)), torch.full((1,), 9.0))
    other.graph = doubled().graph
    assert torch.equal(other(torch.full((1,), 3.0)), torch.full((1,), 6.0))


def test_copies_and_pickles_run() -> None:
    for made in (copy.deepcopy(doubled()), pickle.loads(pickle.dumps(doubled()))):
        assert torch.equal(made(torch.ones(1)), torch.full((1,), 2.0))
