"""The command line: ``rose-compiler``, or ``python -m rose_compiler``."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import rose_compiler
from rose_compiler.base import knobs as settings
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import CATALOGUE, RoseError, nearest
from rose_compiler.base.remarks import BLOCKER_CODES, NOTE_CODES
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.ir.verify import verify
from rose_compiler.passes.pipeline import ORDER, registered
from rose_compiler.runtime.quotas import all_backends

app = typer.Typer(
    help="Looks into rose_compiler: its messages, settings, passes, and the files it writes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "envpool", "triton", "nvidia-ml-py")


def _out() -> Console:
    return Console(highlight=False)


def _err(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


def _reported(command: Callable[..., None]) -> Callable[..., None]:
    """Show an error of the package as its message, without a traceback, and exit with 1."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except RoseError as error:
            _err("\n".join([str(error), *getattr(error, "__notes__", ())]))
            raise typer.Exit(1) from None

    return run


def _version(asked: bool) -> None:
    if asked:
        _out().print(rose_compiler.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Looks into rose_compiler: its messages, settings, passes, and the files it writes."""


# -- explain


@app.command()
@_reported
def explain(
    code: Annotated[str, typer.Argument(help="The code of an error or a remark.")],
) -> None:
    """Say what an error or a remark code means, and what to do."""
    code = code.strip().strip("[]")
    text = _error_page(code) or _remark_page(code) or _note_page(code)
    if text is None:
        _load_everything()
        text = _error_page(code)
    if text is None:
        _err(f"there is no code {code!r}{nearest(code, (*CATALOGUE, *BLOCKER_CODES, *NOTE_CODES))}")
        raise typer.Exit(1)
    _out().print(Markdown(text))


def _load_everything() -> None:
    """Import every part of the package: a part puts its error codes into the catalogue then."""
    for module in pkgutil.walk_packages(rose_compiler.__path__, "rose_compiler."):
        with suppress(ImportError):  # of an optional package
            importlib.import_module(module.name)


def _error_page(code: str) -> str | None:
    entry = CATALOGUE.get(code)
    if entry is None:
        return None
    help = f" **Way out:** {entry.help}." if entry.help else ""
    own = f"`{entry.error.__name__}`: {entry.description}.{help}"
    return f"# {code}\n\n{_section('errors.md', code) or own}"


def _remark_page(code: str) -> str | None:
    entry = BLOCKER_CODES.get(code)
    if entry is None:
        return None
    own = f"({entry.verdict}) {entry.description}."
    return f"# {code}\n\n{_section('remarks.md', code) or own}"


def _note_page(code: str) -> str | None:
    said = NOTE_CODES.get(code)
    return None if said is None else f"# {code}\n\n(note) {said[0].upper()}{said[1:]}."


def _section(page: str, code: str) -> str | None:
    """A code's section of the docs; ``None`` where the docs are not beside the package."""
    try:
        text = (_DOCS / page).read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(rf"^### {re.escape(code)}\n(.*?)(?=^#{{1,3}} |\Z)", text, re.M | re.S)
    return None if found is None else found[1].strip()


# -- knobs


@app.command()
@_reported
def knobs() -> None:
    """List every setting: what it takes, its default, its value here and now, its meaning."""
    now, out = settings.current(), _out()
    for knob in settings.KNOBS.values():
        value = getattr(now, knob.name)
        head = Text(knob.variable, "bold")
        if value != knob.default:
            head += Text(f"={_told(value)}", "bold green")
        out.print(head + Text(f"  {knob.type}; default: {_told(knob.default)}", "not bold"))
        out.print(_indented(knob.help))
    out.print(Text("\nEach is also a keyword of `with rose_compiler.knobs(...)`."))


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 4))


def _told(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(value) if isinstance(value, tuple) else str(value)


# -- check


@app.command()
@_reported
def check(
    dump: Annotated[
        Path, typer.Argument(help="A dump, as ROSE_DUMP writes it.", exists=True, dir_okay=False)
    ],
) -> None:
    """Read a dump back and check it against the rules of its stage, without running it."""
    program = parse(dump.read_text(encoding="utf-8", errors="replace"), file=str(dump))
    verify(program)
    called = {op_of(n) for n in program.nodes() if is_call(n)}
    operations = [op for op in called if op.kind != "builtin"]
    loops = len(list(program.loops()))
    out = _out()
    out.print(
        f"{program.name} ({program.stage}): {_count(len(operations), 'operation')} in "
        f"{_count(loops, 'loop')}",
        markup=False,
    )
    out.print(f"values: {', '.join(program.value_params) or 'none'}", markup=False)
    out.print(f"states: {', '.join(program.state_params) or 'none'}", markup=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# -- passes, decision


@app.command()
@_reported
def passes() -> None:
    """List the passes in the order in which they run, with the reason for each one's place."""
    out = _out()
    for number, entry in enumerate(ORDER, 1):
        out.print(Text(f"{number}. {entry.one.name}", "bold"))
        out.print(_indented(_first_line(entry.one)))
        out.print(_indented(f"its place: {entry.reason}"))
    for one in registered():
        out.print(Text(one.name, "bold"))
        out.print(_indented(_first_line(one)))
        out.print(_indented("its place: from another package, in front of late"))


def _first_line(one: object) -> str:
    return (type(one).__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")


@app.command()
@_reported
def decision(
    file: Annotated[Path, typer.Argument(help="A saved decision.", exists=True, dir_okay=False)],
) -> None:
    """Show a schedule that was saved with `compiled.decision.save(path)`."""
    found, default = Decision.load(file), Decision()
    table = Table("field", "value", "default")
    for field in dataclasses.fields(Decision):
        value = getattr(found, field.name)
        table.add_row(field.name, str(value), str(getattr(default, field.name)))
    _out().print(table)


# -- info


@app.command()
@_reported
def info() -> None:
    """Show what the compiler finds here: versions, cores, GPUs, and what it can control."""
    table = Table("what", "found", show_header=False)
    table.add_row("rose_compiler", rose_compiler.__version__)
    table.add_row("python", f"{platform.python_version()} on {platform.system()}")
    for name in _PACKAGES:
        table.add_row(name, _installed(name))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    table.add_row("cores", f"{usable} of {os.cpu_count()} usable by this process")
    table.add_row("torch threads", str(torch.get_num_threads()))
    for number, found in enumerate(_gpus()):
        table.add_row(f"GPU {number}" if found != "none" else "GPU", found)
    for lever, state in _levers():
        table.add_row(lever, state)
    _out().print(table)


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return ["none"]
    found = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        found.append(
            f"{about.name}, {about.multi_processor_count} SMs, {about.total_memory / 2**30:.0f} GiB"
        )
    return found


def _levers() -> Iterator[tuple[str, str]]:
    """What could divide cores and SMs among lanes, as each back end finds it."""
    for backend in all_backends():
        found = backend.probe()
        yield f"quota: {backend.name}", ("" if found.available else "no: ") + found.why


if __name__ == "__main__":
    sys.exit(app())
