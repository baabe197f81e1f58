"""Runs passes in order: selects them, limits rewrites, verifies and records what they leave."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rose_compiler.base.errors import fail, nearest
from rose_compiler.base.knobs import Settings
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.ir.rewriter import Fuel, Rewriter
from rose_compiler.ir.verify import verify
from rose_compiler.passes.base import Pass, PassContext

#: The name under which history holds the program as it came in.
START = "captured"


@dataclass
class History(Sequence[tuple[str, str]]):
    """The program as text after each pass, as ``(name, dump)``; the first entry is its beginning.

    ``remarks`` holds what the passes said, ``rewrites`` how many rewrites each applied.
    """

    entries: list[tuple[str, str]] = field(default_factory=list)
    remarks: RemarkLog = field(default_factory=RemarkLog)
    rewrites: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.entries)

    def after(self, name: str | None = None) -> str:
        """The dump after a pass, or after the last one.

        Raises:
            ConfigError: when no pass of that name ran.
        """
        return self.entries[self.number(name)][1]

    def number(self, name: str | None = None) -> int:
        """The place of a pass in the history, of the last one by default.

        Raises:
            ConfigError: when no pass of that name ran.
        """
        if name is None:
            return len(self.entries) - 1
        for number, (found, _) in enumerate(self.entries):
            if found == name:
                return number
        names = [found for found, _ in self.entries]
        raise fail(
            "config-pass",
            f"no pass {name!r} has run{nearest(name, names)}",
            expected="one of " + ", ".join(names),
            found=repr(name),
        )


def headed(text: str, number: int, name: str) -> str:
    """A dump whose first line says which pass left the program like this."""
    if name == START:
        return text
    head, _, rest = text.partition("\n")
    return f"{head.rpartition(' | ')[0]} | after {number:02d} {name}\n{rest}"


def select(passes: Sequence[Pass], names: Sequence[str]) -> tuple[Pass, ...]:
    """The passes that ``ROSE_PASSES`` leaves: all but the ``-names``, or the named ones alone.

    Required passes always stay.

    Raises:
        ConfigError: for a name that no pass has, or a required pass that is to be left out.
    """
    known = {p.name: p for p in passes}
    out = {name[1:] for name in names if name.startswith("-")}
    only = {name for name in names if not name.startswith("-")}
    for name in (*out, *only):
        if name not in known:
            raise fail(
                "config-pass",
                f"there is no pass {name!r}{nearest(name, known)}",
                expected="some of " + ", ".join(known),
                found=",".join(names),
            )
        if name in out and known[name].required:
            raise fail("config-pass", f"pass {name!r} can't be left out", found=",".join(names))
    return tuple(
        p for p in passes if p.required or (p.name not in out and (not only or p.name in only))
    )


class PassManager:
    """An ordered list of passes and how they are watched.

    ``verify``: 0 checks nothing, 1 checks the rules of the stage after each pass, 2 checks also
    that the dump parses back to itself. ``fuel`` is how many rewrites may be applied in all; passes
    then leave the rest, so that a wrong rewrite is found by bisection. ``dump_dir`` receives a
    numbered dump after each pass, with times, activity and origins if ``facts``. ``names`` selects
    passes as :func:`select` does. ``echo`` prints remarks to standard error as they are made.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        *,
        verify: int = 1,
        fuel: int | None = None,
        dump_dir: str | Path | None = None,
        names: Sequence[str] = (),
        facts: bool = False,
        echo: bool = False,
    ) -> None:
        self.passes = select(passes, names)
        self.facts = facts
        self.echo = echo
        self.verify = verify
        self.fuel = fuel
        self.dump_dir = None if dump_dir is None else Path(dump_dir)

    @classmethod
    def of(cls, passes: Sequence[Pass], settings: Settings) -> Self:
        """A manager as the settings in force want it."""
        return cls(
            passes,
            verify=settings.verify,
            fuel=settings.fuel,
            dump_dir=settings.dump,
            names=settings.passes,
            facts=settings.facts,
            echo=settings.remarks,
        )

    def run(self, program: Program, context: PassContext | None = None) -> History:
        """Rewrite the program in place; what it was after each pass, with the remarks.

        Raises:
            VerifyError: when a pass leaves a program that breaks a rule. The note names the pass.
        """
        context = context or PassContext()
        history = History()
        fuel = Fuel(self.fuel)
        self._record(program, START, history)
        recorded, checked = _parts(program), list[Any]()
        for one in self.passes:
            rewriter = Rewriter(program, history.remarks, one.name, fuel, context)
            before = len(history.remarks)
            try:
                one.run_program(program, rewriter)
                rewriter.tidy()
                now = _parts(program)
                if not _same(now, checked):
                    self._check(program)
                    checked = now
            except Exception as error:
                error.add_note(f"in pass {one.name!r} over program {program.name!r}")
                raise
            history.rewrites[one.name] = rewriter.rewrites
            if self.echo and len(history.remarks) > before:
                print(history.remarks[before:].render(), file=sys.stderr)
            self._record(program, one.name, history, same=_same(now, recorded))
            recorded = now
        return history

    def _check(self, program: Program) -> None:
        if self.verify >= 1:
            verify(program)
        if self.verify >= 2:
            check_round_trip(program)

    def _record(self, program: Program, name: str, history: History, *, same: bool = False) -> None:
        """Note the program as text; ``same``: it is as it was when that was last done."""
        text = history.entries[-1][1] if same else dump(program)
        if self.dump_dir is not None:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            path = self.dump_dir / f"{program.name}.{len(history):02d}-{name}.py"
            shown = dump(program, costs=True, origins=True) if self.facts else text
            shown = headed(shown, len(history), name)
            path.write_text(shown + "\n", encoding="utf-8")
        history.entries.append((name, text))


def _parts(program: Program) -> list[Any]:
    """All that a program consists of: another list of the same objects means that nothing changed.

    Arguments and facts of nodes are replaced, never changed in place. The list holds on to its
    objects, so that no later one can be mistaken for one of them.
    """
    parts: list[Any] = [program.name, program.stage, program.value_params, program.state_params]
    graphs = [*program.graphs()]
    for op in program.ops.by_name.values():
        parts += [op, op.signature, op.kind, op.source, op.impl, op.body]
        parts += [*op.attributes, *op.attributes.values()]
        graphs += [op.body.graph] if op.body is not None else []
    for graph in graphs:
        parts.append(graph)
        for node in graph.nodes:
            parts += [node, node.target, node.args, node.kwargs, node.meta.get("rose")]
    return parts


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def check_round_trip(program: Program) -> None:
    """Check that the program's dump parses back to a program with the same dump.

    Raises:
        VerifyError: when it does not (``verify-round-trip``).
        ParseError: when the dump does not parse at all.
    """
    text = dump(program)
    again = dump(parse(text))
    if again == text:
        return
    line, ours, theirs = next(
        (k, a, b)
        for k, (a, b) in enumerate(
            zip([*text.splitlines(), ""], [*again.splitlines(), ""], strict=False), 1
        )
        if a != b
    )
    raise fail(
        "verify-round-trip",
        f"the dump of {program.name!r} changes in line {line} when it is parsed and printed",
        expected=ours,
        found=theirs,
    )
