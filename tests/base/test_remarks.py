from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.remarks import (
    BLOCKER_CODES,
    NOTE_CODES,
    Blocker,
    Remark,
    RemarkLog,
    Verdict,
)

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "remarks.md"
ACT = SourceLocation("ppo.py", 41, 4, "action = agent.act(obs)")
STEP = SourceLocation("ppo.py", 43)


def hoisted(gain: float | None = None) -> Remark:
    return Remark("applied", "hoist", (ACT,), "hoisted", "the same on every trip", gain=gain)


def test_codes_are_a_closed_set() -> None:
    with pytest.raises(ValueError, match="did you mean 'batch-coupling'"):
        Blocker("batch-couplin", "")
    with pytest.raises(ValueError, match="'hoisted' is no blocker code"):
        Remark("missed", "hoist", (), "hoisted", "")
    assert {entry.verdict for entry in BLOCKER_CODES.values()} == set(get_args(Verdict))


def test_missed_remark_takes_the_verdict_of_its_code() -> None:
    assert Blocker("no-window", "").verdict == "does-not-fit"
    assert Remark("missed", "overlap", (), "no-window", "").verdict == "does-not-fit"
    assert hoisted().verdict is None


def test_remark_from_a_blocker_names_both_ends_once() -> None:
    blocker = Blocker("effects-conflict", "both write env", "declare it", True, where=(STEP, ACT))
    remark = Remark.from_blocker("overlap", blocker, (ACT,))
    assert remark == Remark(
        "missed", "overlap", (ACT, STEP), "effects-conflict", "both write env", "declare it", True
    )
    assert remark.verdict == "illegal"


def test_log_is_a_sequence_with_filters() -> None:
    missed = Remark.from_blocker("tile", Blocker("single-shard", "one environment"))
    log = RemarkLog([hoisted()])
    log.add(missed)
    log.extend([hoisted(0.5)])
    assert list(log) == [hoisted(), missed, hoisted(0.5)]
    assert list(log.applied()) == [hoisted(), hoisted(0.5)]
    assert list(log.missed()) == [missed]
    assert list(log.for_pass("tile")) == [missed]
    assert log[1] is missed
    assert list(log[1:]) == [missed, hoisted(0.5)]
    assert len(log) == 3


def test_render_groups_by_verdict_and_merges_equal_remarks() -> None:
    blocker = Blocker("batch-coupling", "a normalizer over all rows", "normalize per shard", True)
    log = RemarkLog(
        [
            Remark.from_blocker("tile", Blocker("opaque-call", "nothing is declared"), (STEP,)),
            hoisted(0.0012),
            Remark("note", "place", (), "lanes", "two lanes"),
            Remark.from_blocker("tile", blocker, (ACT, STEP)),
            hoisted(0.0012),
            Remark("applied", "hoist", (STEP,), "hoisted", "the same on every trip"),
        ]
    )
    assert log.render(60).splitlines() == [
        "Applied (3)",
        "  hoist [hoisted]  ppo.py:41  (2 times)",
        "      the same on every trip",
        "      gain: 2.4 ms an iteration",
        "  hoist [hoisted]  ppo.py:43",
        "      the same on every trip",
        "",
        "Missed: illegal, the result would change (1)",
        "  tile [batch-coupling]  ppo.py:41 -> ppo.py:43",
        "      a normalizer over all rows",
        "      would allow it (changes training): normalize per shard",
        "",
        "Missed: unknown whether it is legal (1)",
        "  tile [opaque-call]  ppo.py:43",
        "      nothing is declared",
        "",
        "Notes (1)",
        "  place [lanes]",
        "      two lanes",
    ]


def test_render_keeps_to_the_width() -> None:
    log = RemarkLog([Remark("note", "place", (), "lanes", "a word and another " * 20)])
    assert max(map(len, log.render(40).splitlines())) <= 40
    assert RemarkLog().render() == "No remarks."


@pytest.mark.parametrize("code", BLOCKER_CODES)
def test_every_code_has_a_section(code: str) -> None:
    sections = re.split(r"^### ", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    section = next((s for s in sections if s.splitlines()[0].strip() == code), None)
    assert section is not None, f"docs/remarks.md has no section `### {code}`"
    assert f"({BLOCKER_CODES[code].verdict})" in section
    assert len(section.split()) > 12, f"the section on {code} says next to nothing"


def test_docs_name_no_code_that_does_not_exist() -> None:
    named = re.findall(r"^### (\S+)$", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(named) == sorted(BLOCKER_CODES)


def test_every_blocker_in_the_package_has_a_code_of_the_set() -> None:
    # a wrong code would raise only when the blocker is met
    wrong = []
    for path in sorted((ROOT / "rose_compiler").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            code = node.args[0]
            if (
                isinstance(node.func, ast.Name)
                and node.func.id == "Blocker"
                and isinstance(code, ast.Constant)
                and code.value not in BLOCKER_CODES
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {code.value}")
    assert not wrong, "\n".join(wrong)


def test_every_code_of_a_note_in_the_package_is_of_the_set() -> None:
    found = set()
    for path in sorted((ROOT / "rose_compiler").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Remark":
                kind, code = (node.args[k] if len(node.args) > k else None for k in (0, 3))
                if isinstance(kind, ast.Constant) and isinstance(code, ast.Constant):
                    found |= {code.value} if kind.value != "missed" else set()
    assert "few-points" in found
    assert found <= set(NOTE_CODES)
    rows = re.findall(r"^\| `(\S+)` \|", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rows == list(NOTE_CODES)
