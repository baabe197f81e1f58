"""The invariants of each stage, as a table of named rules, run after every pass.

A rule looks at the whole program and yields what breaks it. Rules of form come first: the later
ones, which follow dependences, rely on them. ``lint`` of torch.fx does not enter bodies and accepts
a wrong number of carried values, so every graph is looked at here.
"""

from __future__ import annotations

from rose_compiler.base.errors import VerifyError, fail
from rose_compiler.ir.deps import place
from rose_compiler.ir.program import Program
from rose_compiler.ir.verify_form import FORM
from rose_compiler.ir.verify_meaning import MEANING
from rose_compiler.ir.verify_rules import Fault, Rule, Subject
from rose_compiler.ir.verify_schedule import SCHEDULE, UNSCHEDULED

#: stage -> its rules, in the order they are tried
RULES: dict[str, tuple[Rule, ...]] = {
    "captured": (*FORM, *MEANING, *UNSCHEDULED),
    "scheduled": (*FORM, *MEANING, *SCHEDULE),
}


def verify(program: Program, stage: str | None = None) -> None:
    """Check a program against the rules of a stage, by default the one it says it is of.

    Raises:
        VerifyError: for the first rule that is broken, naming it (``[rule-name]``) and the user's
            line; further faults against the same rule are notes of the error.
        ValueError: for a stage that does not exist.
    """
    stage = stage or program.stage
    if stage not in RULES:
        raise ValueError(f"there is no stage {stage!r}, only {', '.join(RULES)}")
    subject = Subject(program)
    for rule in RULES[stage]:
        faults = list(rule.check(subject))
        if faults:
            raise _error(program, stage, rule, faults)


def _error(program: Program, stage: str, rule: Rule, faults: list[Fault]) -> VerifyError:
    first, *more = faults
    code = "verify-dependence" if rule.name == "modulo" else f"verify-{stage}"
    error = fail(
        code,
        f"program {program.name!r} breaks rule [{rule.name}] ({rule.doc}): {first.what}",
        where=place(first.node) if first.node is not None else None,
        expected=first.expected,
        found=first.found,
    )
    assert isinstance(error, VerifyError)
    for fault in more[:5]:
        error.add_note(f"[{rule.name}] {fault.what}")
    if len(more) > 5:
        error.add_note(f"[{rule.name}] and {len(more) - 5} more")
    return error
