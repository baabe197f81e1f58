"""The manager: selection, verification, fuel, history, dumps; and passes of other packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest

from rose_compiler.base.errors import ConfigError, VerifyError
from rose_compiler.base.knobs import Settings
from rose_compiler.ir import facts
from rose_compiler.ir.ops import Op, Signature
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes import manager, pipeline
from rose_compiler.passes.base import Pass, PassContext
from rose_compiler.passes.canonicalize import Canonicalize
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.manager import PassManager, check_round_trip, select
from rose_compiler.passes.pipeline import ORDER, PIPELINE
from rose_compiler.passes.place import Place

DEAD = """
@op(reads=[], writes=[], may_raise=False)
def double(x): ...

def f(x):
    a = double(x)
    b = double(x)
    c = double(x)
    return x
"""


def test_history_holds_the_program_after_each_pass() -> None:
    history = PassManager(PIPELINE, verify=2).run(parse(DEAD))
    assert [name for name, _ in history] == ["captured", *(p.name for p in PIPELINE)]
    assert "double(x)" in history.after("captured")
    assert "double(x)" not in history.after("canonicalize")
    assert history.after() == history[-1][1]
    assert history.rewrites["canonicalize"] == 3
    with pytest.raises(ConfigError, match="did you mean 'hoist'"):
        history.after("hoit")


class Changing(Pass):
    """Changes a program by hand, past the rewriter."""

    name: ClassVar[str] = "changing"

    def __init__(self, change: Callable[[Program], object]) -> None:
        object.__setattr__(self, "change", change)

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        self.change(program)


def _note(program: Program) -> None:
    facts.put(program.find("a"), note="changed")


def _renamed(program: Program) -> None:
    op = program.ops.by_name["double"]
    op.signature = replace(op.signature, may_raise=True)


def _handed_on(program: Program) -> None:
    program.find("b").args = (program.find("a"),)


@pytest.mark.parametrize("change", [_note, _renamed, _handed_on], ids=lambda c: c.__name__)
def test_only_what_a_pass_changed_is_looked_at_again(
    change: Callable[[Program], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Program] = []
    monkeypatch.setattr(manager, "verify", looked.append)
    passes = [Changing(lambda program: None), Changing(change), Changing(lambda program: None)]
    history = PassManager(passes).run(parse(DEAD))
    assert len(looked) == 2
    texts = [text for _, text in history]
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_fuel_stops_after_so_many_rewrites() -> None:
    for fuel, left in ((0, 3), (1, 2), (2, 1), (3, 0), (None, 0)):
        history = PassManager(PIPELINE, fuel=fuel).run(parse(DEAD))
        assert history.after().count("double(x)\n") == left
        assert len(history.remarks.applied()) == 3 - left


def test_dumps_are_numbered(tmp_path: Path) -> None:
    PassManager([Canonicalize(), Place()], dump_dir=tmp_path / "out").run(parse(DEAD))
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["f.00-captured.py", "f.01-canonicalize.py", "f.02-place.py"]
    heads = [(tmp_path / "out" / name).read_text().splitlines()[0] for name in names]
    assert heads == [
        "# rose ir | f | captured",
        "# rose ir | f | after 01 canonicalize",
        "# rose ir | f | after 02 place",
    ]


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ((), [p.name for p in PIPELINE]),
        (("-hoist",), [p.name for p in PIPELINE if p.name != "hoist"]),
        (("-hoist", "-late"), [p.name for p in PIPELINE if p.name not in ("hoist", "late")]),
        (("split", "hoist"), ["hoist", "split", "place"]),
    ],
)
def test_rose_passes_selects(names: tuple[str, ...], left: list[str]) -> None:
    assert [p.name for p in select(PIPELINE, names)] == left
    assert [p.name for p in PassManager(PIPELINE, names=names).passes] == left


@pytest.mark.parametrize("names", [("hoits",), ("-place",), ("-relax",)])
def test_selections_that_make_no_sense_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        select(PIPELINE, names)
    assert raised.value.code == "config-pass"


@dataclass(frozen=True)
class Breaks(Pass):
    """A faulty pass: it hangs a call of too few arguments into the program."""

    name = "breaks"

    def run_program(self, program, rewrite) -> None:
        op = Op(Signature("broken", ("a", "b"), (), ()))
        rewrite.call(op, 1, before=next(n for n in program.graph.nodes if n.op == "output"))


def test_a_pass_that_breaks_a_rule_is_named() -> None:
    with pytest.raises(VerifyError) as raised:
        PassManager([Breaks()]).run(parse(DEAD))
    assert any("'breaks'" in note for note in raised.value.__notes__)
    PassManager([Breaks()], verify=0).run(parse(DEAD))


def test_a_program_whose_dump_changes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse(DEAD)
    monkeypatch.setattr(
        "rose_compiler.passes.manager.parse", lambda text: parse(text.replace("f(x)", "g(x)"))
    )
    with pytest.raises(VerifyError) as raised:
        check_round_trip(program)
    assert raised.value.code == "verify-round-trip"


def test_every_pass_of_the_pipeline_has_its_reason() -> None:
    assert all(len(entry.reason) > 20 for entry in ORDER)
    assert len({entry.one.name for entry in ORDER}) == len(ORDER)


@dataclass(frozen=True)
class Visits(Pass):
    """A pass of another package: it notes which loops it is given."""

    name = "visits"
    seen: ClassVar[list[str]] = []

    def run(self, loop, rewrite) -> None:
        self.seen.append(loop.label)


def test_passes_of_other_packages_run_in_front_of_those_that_place(monkeypatch) -> None:
    point = EntryPoint("visits", "tests_visits:Visits", pipeline.ENTRY_POINTS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Visits)
    monkeypatch.setattr(pipeline, "entry_points", lambda group: [point])
    passes = pipeline.pipeline()
    names = [p.name for p in passes]
    assert names.index("visits") == names.index("late") - 1
    text = "def f(x):\n    for t in outer(0, x, 1):\n        for u in inner(0, x, 1):\n"
    text += "            yield ()\n        yield ()\n    return x\n"
    PassManager(passes).run(parse(text))
    assert Visits.seen == ["inner", "outer"]


def test_an_entry_point_that_is_no_pass_is_refused(monkeypatch) -> None:
    point = EntryPoint("wrong", "builtins:int", pipeline.ENTRY_POINTS)
    monkeypatch.setattr(pipeline, "entry_points", lambda group: [point])
    with pytest.raises(ConfigError, match="'wrong'"):
        pipeline.pipeline()


def test_a_pass_without_run_says_so() -> None:
    @dataclass(frozen=True)
    class Empty(Pass):
        name = "empty"

    text = "def f(x):\n    for t in outer(0, x, 1):\n        yield ()\n    return x\n"
    with pytest.raises(NotImplementedError, match="Empty"):
        PassManager([Empty()]).run(parse(text), PassContext())


def test_late_marks_the_program_as_scheduled_only_if_it_placed_something() -> None:
    program = parse(DEAD)
    PassManager([LateWork()]).run(program)
    assert program.stage == "captured"
    PassManager([Place()]).run(program)
    assert program.stage == "scheduled"


def test_settings_reach_the_manager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(
        dump=str(tmp_path), facts=True, remarks=True, verify=2, passes=("-hoist",), fuel=2
    )
    manager = PassManager.of(PIPELINE, settings)
    assert (manager.verify, manager.fuel, manager.facts) == (2, 2, True)
    assert "hoist" not in [p.name for p in manager.passes]
    manager.run(parse(DEAD))
    assert capsys.readouterr().err.count("nothing uses the value of `double`") == 1
    assert len(list(tmp_path.iterdir())) == len(manager.passes) + 1
