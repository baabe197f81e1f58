"""The command line, as a user runs it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import CATALOGUE
from rose_compiler.base.knobs import KNOBS
from rose_compiler.base.remarks import BLOCKER_CODES, NOTE_CODES
from rose_compiler.cli import app
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.passes.pipeline import ORDER
from rose_compiler.runtime.quotas import all_backends

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
@op(reads=["params"], writes=[])
def act(obs, params): ...
@op(kind="step", reads=["env"], writes=["env"])
def env_step(action, env): ...

def rollout(obs0, *, params, env):
    for t, obs in steps(0, 128, 1, obs=obs0):
        action = act(obs, params)
        stepped = env_step(action, env)
        yield stepped
    return steps.obs
"""


def run(*args: str, code: int = 0) -> str:
    result: Result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output + repr(result.exception)
    assert "Traceback" not in result.output
    return result.output


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in KNOBS.values():
        monkeypatch.delenv(knob.variable, raising=False)


def test_the_console_script_is_there() -> None:
    (script,) = entry_points(group="console_scripts", name="rose-compiler")
    assert script.value == "rose_compiler.cli:app"


def test_without_arguments_it_says_what_it_can() -> None:
    text = run(code=2)
    for command in ("explain", "knobs", "check", "passes", "decision", "info"):
        assert command in text


def test_version() -> None:
    assert re.search(r"\d+\.\d+", run("--version"))


# -- explain


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_every_error_code_is_explained(code: str) -> None:
    text = words(run("explain", code))
    entry = CATALOGUE[code]
    assert code in text
    assert entry.error.__name__ in text
    assert len(text.split()) > 12


@pytest.mark.parametrize("code", sorted(BLOCKER_CODES))
def test_every_remark_code_is_explained(code: str) -> None:
    text = words(run("explain", code))
    assert code in text
    assert BLOCKER_CODES[code].verdict in text


def test_codes_of_notes_are_explained() -> None:
    for code, said in NOTE_CODES.items():
        assert words(said).lower() in words(run("explain", code)).lower()


def test_an_explanation_has_the_section_of_the_docs() -> None:
    text = words(run("explain", "capture-rebind-component"))
    assert "Guards and lanes are tied to the object" in text
    assert "keep the object and change its contents" in text
    assert "host-pickle" not in text, "the next section is none of its business"


def test_a_code_may_be_pasted_with_its_brackets() -> None:
    assert "capture-eval" in run("explain", "[capture-eval]")


def test_an_unknown_code_names_the_nearest_and_fails() -> None:
    text = run("explain", "capture-evla", code=1)
    assert "did you mean 'capture-eval'" in words(text)


# -- knobs


def test_knobs_have_type_default_value_and_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_FUEL", "7")
    text = run("knobs")
    for knob in KNOBS.values():
        assert knob.variable in text
    assert "stop after this many rewrites" in text
    assert "ROSE_FUEL=7 " in text
    assert "ROSE_SERIAL " in text


def test_a_wrong_setting_is_said_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_FUELS", "7")
    text = run("knobs", code=1)
    assert "[config-knob]" in text
    assert "did you mean 'ROSE_FUEL'" in words(text)


# -- check


def test_a_sound_dump_is_summed_up(tmp_path: Path) -> None:
    path = tmp_path / "rollout.py"
    path.write_text(dump(parse(PROGRAM)))
    text = words(run("check", str(path)))
    assert "rollout" in text
    assert "captured" in text
    assert "2 operations" in text
    assert "1 loop" in text
    assert "params, env" in text


def test_a_malformed_dump_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rollout.py"
    path.write_text(PROGRAM.replace("act(obs, params)\n        s", "act(obbs, params)\n        s"))
    text = run("check", str(path), code=1)
    assert "[parse-unknown-name]" in text
    assert "rollout.py:8" in text.replace("\n", "")


def test_a_dump_that_breaks_a_rule_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollout.py"
    path.write_text(PROGRAM.replace(" = act(obs, params)", " = act(obs, params) @ lane(stage=1)"))
    text = run("check", str(path), code=1)
    assert "[verify-" in text


def test_a_file_that_is_not_there_is_a_message() -> None:
    assert "no-such-file" in run("check", "no-such-file", code=2)


def test_a_binary_file_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(bytes(range(256)) * 4)
    assert "[parse-syntax]" in run("check", str(path), code=1)


# -- passes, decision, info


def test_passes_stand_in_order_with_their_reasons() -> None:
    text = run("passes")
    assert re.findall(r"^\d+\. (\w+)", text, re.MULTILINE) == [e.one.name for e in ORDER]
    assert "no later pass should reason" in words(text)


def test_a_decision_is_shown_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    Decision(groups=4, late="shadow", rollout_threads=1).save(path)
    text = run("decision", str(path))
    for name in ("groups", "late", "defer", "lanes", "rollout_threads", "update_threads"):
        assert name in text
    assert "shadow" in text
    assert "4" in next(line for line in text.splitlines() if "groups" in line)


def test_a_corrupted_decision_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    path.write_text("{")
    assert "[config-decision]" in run("decision", str(path), code=1)


def test_info_has_versions_cores_and_levers() -> None:
    text = run("info")
    for word in ("torch", "python", "cores", "GPU", "numpy"):
        assert word in text
    for backend in all_backends():
        assert f"quota: {backend.name}" in text


def test_as_a_module_it_finds_codes_of_all_parts_and_colors_nothing_in_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rose_compiler.cli", "explain", "sim-order"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "RuntimeFault" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_package_is_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rose_compiler", "explain", "sim-order"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("rose_compiler", run_name="__main__")
    assert ended.value.code == 0
    assert "RuntimeFault" in capsys.readouterr().out


def test_messages_go_to_standard_error() -> None:
    result = CliRunner().invoke(app, ["explain", "nothing-like-it"])
    assert result.stdout == ""
    assert "nothing-like-it" in result.stderr
