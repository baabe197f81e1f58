"""Separability of blocks of Python: what is proven holds on real rows, the rest is refused."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
import torch

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.record import spec_of
from rose_compiler.frontend.separable import NOT_STATIC, separable_block
from rose_compiler.runtime.probe import compare_outputs

ROWS = 6
TILES = (1, 3, 2)

SPACE: dict[str, Any] = {
    "np": np,
    "torch": torch,
    "low": np.full(3, -0.5),
    "high": np.full(3, 0.5),
    "per_row": np.arange(float(ROWS)),
    "scale": 2.0,
    "device": torch.device("cpu"),
    "matrix": torch.ones(3, 2),
}


def resolve(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return SPACE.get(node.id, NOT_STATIC)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        if owner is not NOT_STATIC:
            return getattr(owner, node.attr, NOT_STATIC)
    return NOT_STATIC


def inputs() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    step: tuple[Any, ...] = (
        generator.normal(size=(ROWS, 3)),
        generator.normal(size=ROWS),
        generator.random(ROWS) > 0.5,
        generator.random(ROWS) > 0.5,
        {"episode": {}},
    )
    return {
        "x": torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)),
        "a": generator.normal(size=(ROWS, 3)),
        "v": torch.arange(float(ROWS)),
        "one": torch.arange(float(ROWS)).unsqueeze(1),
        "r": step,
        "d": {"frame": generator.normal(size=(ROWS, 2, 2)), "joints": torch.ones(ROWS, 3)},
        "q": ({"frame": generator.normal(size=(ROWS, 2))}, *step[1:4], {"frame": np.ones(ROWS)}),
    }


def prove_block(code: str) -> dict[str, int] | Blocker:
    values = inputs()
    return separable_block(
        ast.parse(code).body,
        dict.fromkeys(values, 0),
        resolve,
        {n: spec_of(v) for n, v in values.items()},
    )


def rows_of(value: Any, low: int, high: int) -> Any:
    if isinstance(value, tuple):
        return tuple(rows_of(v, low, high) for v in value)
    if isinstance(value, dict):  # infos have no rows
        return {k: rows_of(v, low, high) if hasattr(v, "shape") else v for k, v in value.items()}
    return value[low:high]


class TestBlocks:
    @pytest.mark.parametrize(
        "code",
        [
            "out = x.cpu().numpy()",
            "out = np.clip(a, low, high)",
            "obs, reward, terminated, truncated, infos = r\n"
            "out = torch.as_tensor(obs, dtype=torch.float32)\n"
            "done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)",
            "out = torch.as_tensor(r[1], dtype=torch.float32).to(device)",
            "out = torch.from_numpy(a).float() * scale + 1",
            "out = torch.tensor(a, dtype=torch.float32)",
            "out = 1.0 - v",
            "out = a[:, 1]",
            "out = a[..., 0]",
            "out = a[:, 1:] ** 2",
            "out = a[:, None]",
            "out = x.detach().clone()",
            "out = x.reshape(x.shape[0], -1)",
            "out = x.view(-1, 3)",
            "out = one.flatten()",
            "out = one.squeeze(-1)",
            "out = x.sum(1) + v",
            "out = np.sum(a, axis=-1)",
            "out = x.sum(dim=1, keepdim=True) * one",
            "out = (x > 0) & (x < scale)",
            "out = ~(v > 1)",
            "out = torch.cat([x, one], dim=1)",
            "out = torch.clamp(x.unsqueeze(-1), min=-1.0, max=1.0)",
            "out = np.where(a > 0, a, 0.0).copy()",
            "out = x @ matrix",
            "out = other = a.astype(np.float32)",
            "y = a * 2\nout = np.maximum(y, low)",
            "out = torch.max(x, -x)",
            "pass\nout: object = x.abs()",
            "out = torch.as_tensor(d['frame'])",
            "out = {k: torch.as_tensor(v) for k, v in d.items()}",
            "out = {'far': d['joints'] + 1, 'near': x}",
            "e = {k: v * 2 for k, v in d.items()}\nout = e['joints']",
            "obs, reward, terminated, truncated, infos = q\nout = obs['frame'] * 2",
        ],
    )
    def test_proven(self, code: str) -> None:
        axes = prove_block(code)
        assert not isinstance(axes, Blocker), axes
        assert "out" in axes
        values = inputs()
        whole: dict[str, Any] = {}
        exec(code, {**SPACE, **values}, whole)
        low = 0
        for rows in TILES:
            part: dict[str, Any] = {}
            tile = {n: rows_of(v, low, low + rows) for n, v in values.items()}
            exec(code, {**SPACE, **tile}, part)
            for name in axes:
                expected = rows_of(whole[name], low, low + rows)
                assert compare_outputs(expected, part[name]) != "differ", name
            low += rows

    @pytest.mark.parametrize(
        "code",
        [
            "out = x.mean()",
            "out = x.mean(0)",
            "out = np.mean(a)",
            "out = x[0]",
            "out = x[1:]",
            "out = x[None]",
            "out = x.flatten()",
            "out = x.reshape(-1)",
            f"out = x.reshape({ROWS}, -1)",
            "out = x.T",
            "out = x * v",
            "out = a + per_row",
            "out = v + per_row",
            "out = one.squeeze()",
            "out = x.tolist()",
            "out = float(v.sum())",
            "out = len(x) * x",
            "out = x / x.shape[0]",
            "out = r[4]['episode']",
            "obs, reward, done, infos = r\nout = obs",
            "out = x if v.sum() > 0 else -x",
            "out = [y for y in x]",
            "x[0] = 1",
            "x += 1\nout = x",
            "out = sorted(v)",
            "out = torch.randn(3)",
            "out = x + torch.randn(3)",
            "out = np.sort(a)",
            "out = np.add.reduce(a)",
            "out = np.add(a, a, out=a)",
            "out = torch.cat([x, x])",
            "out = x.max(1)",
            "out = torch.where(x > 0)",
            "out = np.array(a, ndmin=3)",
            "out = not_known(x)",
            "out = 0 < v < 1",
            "out = matrix.t() @ x",
            "for i in range(3):\n    out = x",
            "out = x.add_(1)",
            "k = 'frame'\nout = d[k]",
            "out = d['frame'].mean(0)",
            "out = d['none']",
            "out = {k: v.mean() for k, v in d.items()}",
            "out = {k: v for k, v in d.items() if k != 'frame'}",
            "out = {v: k for k, v in d.items()}",
            "out = {x: x}",
            "out = {'a': x, 'b': 1}",
            "out = {k: v for k, v in list(d.items())}",
            "out = torch.as_tensor(d)",
            "out = q[4]['frame']",
        ],
    )
    def test_refused(self, code: str) -> None:
        found = prove_block(code)
        assert isinstance(found, Blocker) or "out" not in found

    def test_infos_are_promised_nothing(self) -> None:
        found = prove_block("obs, reward, terminated, truncated, infos = r")
        assert found == dict.fromkeys(("obs", "reward", "terminated", "truncated"), 0)

    def test_a_name_that_hides_a_module(self) -> None:
        tree = ast.parse("torch = x\nout = torch.as_tensor(x)").body
        found = separable_block(tree, {"x": 0}, resolve, {"x": spec_of(torch.ones(ROWS, 3))})
        assert isinstance(found, Blocker)

    def test_without_types_only_what_needs_no_axes(self) -> None:
        assert separable_block(ast.parse("out = x.float()").body, {"x": 0}, resolve) == {"out": 0}
        found = separable_block(ast.parse("out = x * y").body, {"x": 0, "y": 0}, resolve)
        assert isinstance(found, Blocker)

    def test_other_axes(self) -> None:
        found = separable_block(ast.parse("out = x").body, {"x": 1}, resolve)
        assert isinstance(found, Blocker)
