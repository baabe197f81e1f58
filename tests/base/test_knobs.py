from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path

import pytest

from rose_compiler.base.errors import ConfigError
from rose_compiler.base.knobs import KNOBS, Settings, current, knobs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in KNOBS.values():
        monkeypatch.delenv(knob.variable, raising=False)


def test_every_knob_is_a_setting_with_the_same_default() -> None:
    assert list(KNOBS) == [field.name for field in dataclasses.fields(Settings)]
    assert {name: knob.default for name, knob in KNOBS.items()} == dataclasses.asdict(Settings())
    assert all(knob.help and knob.type for knob in KNOBS.values())


def test_every_knob_is_in_the_docs() -> None:
    house = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    assert set(re.findall(r"ROSE_[A-Z]+", house)) == {k.variable for k in KNOBS.values()}


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("ROSE_DUMP", "out/dumps", "dump", "out/dumps"),
        ("ROSE_FACTS", "on", "facts", True),
        ("ROSE_REMARKS", "1", "remarks", True),
        ("ROSE_VERIFY", "2", "verify", 2),
        ("ROSE_VERIFY", "0", "verify", 0),
        ("ROSE_PASSES", "-fuse, -hoist", "passes", ("-fuse", "-hoist")),
        ("ROSE_FUEL", "0", "fuel", 0),
        ("ROSE_INTERP", "yes", "interp", True),
        ("ROSE_SERIAL", "False", "serial", False),
        ("ROSE_SERIAL", "", "serial", False),
        ("ROSE_TRACE", "t.json", "trace", "t.json"),
        ("ROSE_EDIT", "run.py", "edit", "run.py"),
    ],
)
def test_environment_is_read(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(current(), name) == value
    assert current({variable: text}) == current()


def test_block_wins_over_the_environment_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_VERIFY", "2")
    with knobs(verify=0, serial=True) as settings:
        assert settings == current() == Settings(verify=0, serial=True)
        with knobs(serial=False, dump=Path("d")):
            assert current() == Settings(verify=0, serial=False, dump="d")
        with knobs(verify=None):
            assert current().verify == 1
        assert current() == settings
    assert current() == Settings(verify=2)


def test_block_ends_when_its_body_raises() -> None:
    with pytest.raises(KeyError), knobs(serial=True):
        raise KeyError
    assert not current().serial


def test_block_does_not_reach_another_thread() -> None:
    seen: list[Settings] = []
    with knobs(serial=True):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [Settings()]


def test_unknown_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_SERAIL", "1")
    with pytest.raises(ConfigError, match="'ROSE_SERAIL'; did you mean 'ROSE_SERIAL'"):
        current()


def test_unknown_keyword_names_the_nearest_before_the_block() -> None:
    with pytest.raises(ConfigError, match="'remark'; did you mean 'remarks'"):
        knobs(remark=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dump", ""),
        ("dump", 3),
        ("facts", "maybe"),
        ("serial", 2),
        ("verify", 3),
        ("verify", -1),
        ("verify", True),
        ("verify", "one"),
        ("passes", "fuse,,hoist"),
        ("passes", "-"),
        ("passes", "fuse hoist"),
        ("fuel", -1),
        ("fuel", 1.5),
    ],
)
def test_bad_value_is_refused_with_what_the_knob_takes(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="config-knob") as caught:
        knobs(**{name: value})
    assert caught.value.expected == KNOBS[name].type
    assert caught.value.found == repr(value)
    assert KNOBS[name].variable in str(caught.value)


def test_bad_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_FUEL", "plenty")
    with pytest.raises(ConfigError, match="ROSE_FUEL has a value that it can't take"):
        current()


def test_a_variable_that_is_set_or_taken_back_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = current()
    assert current() is before  # read once, as long as the environment stays
    monkeypatch.setenv("ROSE_FUEL", "3")
    assert current().fuel == 3
    with knobs(fuel=5):
        assert current().fuel == 5
    monkeypatch.delenv("ROSE_FUEL")
    assert current() == before
