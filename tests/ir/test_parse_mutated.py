"""Reading dumps: no text crashes the parser, and what is no dump is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.base.errors import ParseError, RoseError
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.ir.verify import verify
from rose_compiler.testing.programs import Generated, programs
from tests.ir.test_parse import GOLDEN, example

TOKEN = re.compile(r"\w+|\s+|.")
ALPHABET = "abx_019 \n\t()[]{}:,.=@#'\"+-*/<>~\\\0é"


def _mutated(data: st.DataObject, text: str) -> str:
    """The text with one small thing changed."""
    how = data.draw(st.sampled_from(["drop", "double", "swap", "token", "cut", "put", "indent"]))
    lines = text.split("\n")
    at = data.draw(st.integers(0, len(lines) - 1))
    other = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.integers(0, len(text)))
    if how == "drop":
        del lines[at]
    elif how == "double":
        lines.insert(other, lines[at])
    elif how == "swap":
        lines[at], lines[other] = lines[other], lines[at]
    elif how == "indent":
        lines[at] = lines[at][4:] if lines[at].startswith("    ") else "    " + lines[at]
    elif how == "token":
        tokens = TOKEN.findall(text)
        tokens[data.draw(st.integers(0, len(tokens) - 1))] = data.draw(st.sampled_from(tokens))
        return "".join(tokens)
    elif how == "cut":
        return text[:place] + text[place + data.draw(st.integers(1, 9)) :]
    else:
        return text[:place] + data.draw(st.text(ALPHABET, max_size=3)) + text[place:]
    return "\n".join(lines)


def _is_refused_or_valid(text: str) -> bool:
    try:
        program = parse(text)
    except ParseError as error:
        refused = error
    else:
        again = dump(program)
        assert dump(parse(again)) == again
        return _is_valid(program)
    assert refused.where is not None
    assert 1 <= refused.where.line <= text.count("\n") + 1
    return False


def _is_valid(program: Program) -> bool:
    try:
        verify(program)
    except RoseError:  # a program, but one that no stage allows
        return False
    return True


@settings(max_examples=250)
@given(st.data())
def test_mutated_dumps_are_refused_or_valid(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([*GOLDEN, example()]))
    for _ in range(data.draw(st.integers(1, 3))):
        text = _mutated(data, text)
    _is_refused_or_valid(text)


@settings(max_examples=100)
@given(programs(size=8), st.data())
def test_mutated_dumps_of_generated_programs_are_refused_or_valid(
    generated: Generated, data: st.DataObject
) -> None:
    _is_refused_or_valid(_mutated(data, dump(generated.program)))


def test_mutations_hit_both_outcomes() -> None:
    """Else the two tests above would say nothing."""
    seen: list[bool] = []

    @settings(max_examples=150)
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        seen.append(_is_refused_or_valid(_mutated(data, example())))

    collect()
    assert seen.count(True) > 10
    assert seen.count(False) > 10


def test_random_text_is_refused() -> None:
    @settings(max_examples=150)
    @given(st.text(ALPHABET + "\r\x0c\ud800", max_size=30))
    def check(text: str) -> None:
        with pytest.raises(ParseError):
            parse(text)

    check()
