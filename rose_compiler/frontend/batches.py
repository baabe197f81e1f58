"""Which operations keep the rows of a batch apart: proofs, written into their signatures."""

from __future__ import annotations

from rose_compiler.frontend.record import Record
from rose_compiler.ir.program import Program


def annotate(program: Program, record: Record) -> None:
    pass
