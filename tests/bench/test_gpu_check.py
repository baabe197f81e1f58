"""The device checks say ``absent`` where there is no device, and their own loop is right."""

from __future__ import annotations

import json

import pytest
import torch

from bench import gpu_check


def test_lines_without_a_device(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "lines.json"
    assert gpu_check.main(["--json", str(path)]) == 0
    lines = json.loads(path.read_text())["lines"]
    assert [line["status"] for line in lines] == ["pass", *["absent"] * len(gpu_check.CHECKS)]


def test_a_check_that_breaks_is_a_failed_line(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def broken() -> gpu_check.Line:
        raise RuntimeError("no luck")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "CHECKS", {"broken": broken})
    assert gpu_check.check()[1] == gpu_check.Line("broken", "fail", "RuntimeError: no luck")


@pytest.mark.gpu
def test_on_a_device() -> None:
    assert [line for line in gpu_check.check() if line.status == "fail"] == []
