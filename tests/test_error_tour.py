"""Every error a user can meet, met: one shape, in the user's words, with a way out."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.base import errors
from rose_compiler.base.errors import CATALOGUE, RoseError
from tests import failures, refused
from tests.api.loops import Training
from tests.refused import CAPTURED

ROOT = Path(__file__).resolve().parents[1]
#: What runs into an error, by its code: ``failures`` adds to those of ``refused``.
TRIGGERS = failures.TRIGGERS


def test_every_code_has_a_test_that_meets_it() -> None:
    """Here, or in the tests of the part that raises it, by its code."""
    for module in pkgutil.walk_packages(rose_compiler.__path__, "rose_compiler."):
        try:
            importlib.import_module(module.name)
        except ImportError:
            continue
    apart = {Path(__file__).name, "test_errors.py", "test_cli.py"}
    texts = [p.read_text() for p in (ROOT / "tests").rglob("test_*.py") if p.name not in apart]
    named = {code for code in CATALOGUE if any(code in text for text in texts)}
    sources = (ROOT / "rose_compiler").rglob("*.py")
    source = "".join(p.read_text() for p in sources if p.name != "catalogue.py")
    raised = {code for code in CATALOGUE if f'"{code}"' in source}
    assert raised - set(TRIGGERS) - named == set()
    assert set(TRIGGERS) <= set(CATALOGUE), "a code that does not exist is tested"


@functools.cache
def internal_classes() -> frozenset[str]:
    """Names of the package's classes that no user has heard of."""
    public = {name for name in dir(errors) if isinstance(getattr(errors, name), type)}
    public |= {*rose_compiler.__all__, "ShardedEnv", "Compiled", "QuotaPlan"}
    found = set()
    for path in (ROOT / "rose_compiler").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
    words = {"Shape", "Line", "Part", "Loop", "Branch", "Machine", "Activity", "Window"}
    return frozenset(found - public - words - set(dir(torch.nn)))


@pytest.mark.parametrize("code", sorted(TRIGGERS))
def test_the_message(code: str) -> None:
    with pytest.raises(RoseError) as caught:
        TRIGGERS[code]()
    error = caught.value
    assert error.code == code, error
    text = str(error)
    assert text.startswith(f"[{code}] ")
    assert len(error.what) > 8, error
    assert isinstance(error, CATALOGUE[code].error)
    assert error.help, "no way out is named"
    assert len(text) < 1500, "a message, not a dump"
    assert " at 0x" not in text
    own = f"{error.what} {error.expected} {error.found} {error.help}"  # not the user's line
    found = set(re.findall(r"\b_?[A-Z]\w+", own)) & internal_classes()
    assert not found, f"{found} in: {text}"


def texts_of_errors() -> dict[str, str]:
    """What is written of every message in the package, by where: the catalogue's, and the literal
    parts of what is handed to ``fail`` and ``register``."""
    found = {f"catalogue {c}": f"{e.description} {e.help}" for c, e in CATALOGUE.items()}
    for path in sorted((ROOT / "rose_compiler").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in ("fail", "register"):
                continue
            given = [*node.args[1:], *(k.value for k in node.keywords)]
            inner = [i for g in given for i in ast.walk(g) if isinstance(i, ast.Constant)]
            text = " ".join(i.value for i in inner if isinstance(i.value, str))
            found[f"{path.relative_to(ROOT)}:{node.lineno}"] = text
    return found


def test_no_message_names_an_internal_class() -> None:
    found = texts_of_errors()
    assert len(found) > 2 * len(CATALOGUE), "calls of `fail` are seen"
    named = {
        where: words
        for where, text in found.items()
        if (words := set(re.findall(r"\b_?[A-Z]\w+", text)) & internal_classes())
    }
    assert named == {}


@pytest.mark.parametrize("code", sorted(CAPTURED))
def test_a_refusal_points_at_the_line(code: str) -> None:
    fn = CAPTURED[code]
    with pytest.raises(RoseError) as caught:
        TRIGGERS[code]()
    lines, first = inspect.getsourcelines(fn)
    line = first + next(k for k, text in enumerate(lines) if "# here" in text)
    assert caught.value.where is not None
    assert (caught.value.where.file, caught.value.where.line) == (refused.__file__, line)


@pytest.mark.parametrize("code", ["parse-syntax", "parse-unknown-op", "parse-unknown-name"])
def test_an_error_in_a_dump_has_its_line(code: str) -> None:
    with pytest.raises(RoseError, match=r"at fn\.py:4: ") as caught:
        TRIGGERS[code]()
    assert caught.value.code == code


def divides(agent: Any, optimizer: Any, envs: Any, buffer: Any, obs: Any) -> Any:
    for t in range(4):
        with torch.no_grad():
            action = agent.actor(obs)
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
        buffer.rewards[t] = torch.as_tensor(1 // buffer.left, dtype=torch.float32)
        buffer.left -= 1
    return obs


def test_a_traceback_through_emitted_code_shows_the_users_line() -> None:
    training = Training()
    fast = rose_compiler.compile(divides, tune=False)
    training.buffer.left = 6  # type: ignore[attr-defined]
    training.run(fast)
    with pytest.raises(ZeroDivisionError) as caught:
        training.run(fast)
    shown = "".join(traceback.format_exception(caught.value))
    line = 1 + next(
        k for k, t in enumerate(Path(__file__).read_text().splitlines()) if "1 // buffer.left," in t
    )
    assert f'File "{__file__}", line {line}' in shown
    assert "buffer.rewards[t] = torch.as_tensor(1 // buffer.left" in shown
    assert f"test_error_tour.py:{line}" in shown, "the note says which operation it was"
    fast.close()
    training.close()
