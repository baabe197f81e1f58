from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_compiler.base import errors
from rose_compiler.base.catalogue import BASE_CODES
from rose_compiler.base.errors import (
    CATALOGUE,
    CaptureError,
    HostDied,
    RoseError,
    RuntimeFault,
    SourceLocation,
    fail,
    register,
)

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "errors.md"


def test_message_has_one_shape() -> None:
    error = fail(
        "capture-eval",
        "`eval` in the compiled function",
        where=SourceLocation("ppo.py", 41, 8, "        yield loss\n"),
        expected="a plain function",
        found="a generator\nof losses",
        help="collect the losses in a list",
    )
    assert str(error).splitlines() == [
        "[capture-eval] `eval` in the compiled function",
        "  at ppo.py:41: yield loss",
        "  expected: a plain function",
        "  found: a generator",
        "         of losses",
        "  help: collect the losses in a list",
    ]


def test_parts_left_out_leave_no_line() -> None:
    assert str(RoseError(code="x", what="y")) == "[x] y"
    bare = RoseError(code="x", what="y", where=SourceLocation("<string>", 3))
    assert str(bare) == "[x] y\n  at <string>:3"


def test_source_line_is_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "loop.py"
    file.write_text("def f():\n    return 1\n", encoding="utf-8")
    where = SourceLocation(str(file), 2)
    assert str(where) == f"{file}:2"
    assert where.source == "return 1"
    error = fail("capture-eval", "no", where=where)
    file.unlink()
    assert f"at {file}:2: return 1" in str(error)


def test_class_and_help_come_from_the_catalogue() -> None:
    error = fail("host-died", "worker 3 ended", found="signal 9")
    assert type(error) is HostDied
    assert isinstance(error, RuntimeFault)
    assert error.help == CATALOGUE["host-died"].help
    assert error.help is not None
    assert error.help in str(error)


def test_unregistered_code_names_the_nearest() -> None:
    with pytest.raises(LookupError, match="did you mean 'capture-eval'"):
        fail("capture-evla", "")


def test_error_survives_pickling_with_notes_and_extra_attributes() -> None:
    error = fail("capture-lambda", "no", where=SourceLocation("a.py", 1, text="x"), found=object())
    error.add_note("states ahead of eager: env")
    error.tries = 3  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CaptureError
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
    assert copy.__notes__ == ["states ahead of eager: env"]
    assert pickle.loads(pickle.dumps(copy)).where == error.where


class OwnError(RoseError):
    """A subclass with a constructor of its own, as other layers may have."""

    def __init__(self, worker: int) -> None:
        super().__init__(code="own", what=f"worker {worker}")
        self.worker = worker


def test_subclass_with_its_own_constructor_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(OwnError(7)))
    assert type(copy) is OwnError
    assert (copy.worker, str(copy)) == (7, "[own] worker 7")


def test_registration_is_open_and_refuses_a_second_meaning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "CATALOGUE", dict(CATALOGUE))
    register("test-new", RuntimeFault, "a new one")
    register("test-new", RuntimeFault, "a new one")
    assert type(fail("test-new", "x")) is RuntimeFault
    with pytest.raises(ValueError, match="registered already"):
        register("test-new", CaptureError, "a new one")
    with pytest.raises(ValueError, match="lower-case words"):
        register("Test New", RuntimeFault, "malformed")


def sections() -> dict[str, str]:
    parts = re.split(r"^### ", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].strip(): part for part in parts}


@pytest.mark.parametrize("code", BASE_CODES)
def test_every_code_has_a_help_line_and_a_section(code: str) -> None:
    entry = CATALOGUE[code]
    assert entry.help
    assert fail(code, "what").code == code
    section = sections().get(code)
    assert section is not None, f"docs/errors.md has no section `### {code}`"
    assert f"`{entry.error.__name__}`" in section
    assert len(section.split()) > 12, f"the section on {code} says next to nothing"


def literals(*functions: str) -> Iterator[tuple[str, str]]:
    """Place and first argument of every call of these functions with a literal code."""
    for path in sorted((ROOT / "rose_compiler").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                if ast.unparse(node.func) == "functions.register":
                    continue  # names functions of the program's, not errors
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if called in functions and node.args and isinstance(node.args[0], ast.Constant):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", str(node.args[0].value)


def test_every_code_raised_anywhere_is_registered_and_documented() -> None:
    registered = {*BASE_CODES, *(code for _, code in literals("register"))}
    unknown = [f"{place}: {code}" for place, code in literals("fail") if code not in registered]
    assert not unknown, "\n".join(unknown)
    missing = sorted(registered - set(sections()))
    assert not missing, f"docs/errors.md has no sections on {missing}"
