"""docs/passes.md: the table is the pipeline, and the pass that it shows works."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from rose_compiler.base.decision import Decision
from rose_compiler.ir.parse import parse
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.pipeline import ORDER

PAGE = (Path(__file__).parents[2] / "docs" / "passes.md").read_text(encoding="utf-8")


def test_the_table_lists_the_pipeline_in_order() -> None:
    section = PAGE.split("## In order")[1].split("`passes/pipeline.py` holds")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == [e.one.name for e in ORDER]


def test_every_field_of_a_decision_is_explained() -> None:
    for field in fields(Decision):
        assert f"`{field.name}`" in PAGE


def test_the_pass_on_the_page_runs() -> None:
    code = PAGE.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(code, "passes.md", "exec", dont_inherit=True), names)
    made = names["DropNotes"]
    assert isinstance(made, type)
    text = """
@op(reads=["log"], writes=["log"{host}], results=0)
def note(log, x): ...

def f(x, *, log):
    for t in trips(0, 3, 1):
        note(log, x)
        yield ()
    return x
"""
    history = PassManager([made()], verify=2).run(parse(text.replace("{host}", "")))
    assert "note(" not in history.after()
    history = PassManager([made()], verify=2).run(parse(text.replace("{host}", ', "host"')))
    assert [r.code for r in history.remarks.missed()] == ["not-pure"]
