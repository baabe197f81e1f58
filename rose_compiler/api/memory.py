"""What an iteration takes of memory: measured in program order, predicted for every schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table

from rose_compiler.base.callers import warn_caller
from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.base.sizes import show_bytes
from rose_compiler.ir.program import Program
from rose_compiler.tune.memory import PROCESS, Piece, Stretch, added, peaks

PASS = "memory"


@dataclass(frozen=True)
class Estimate:
    """Predicted peaks, bytes by place, and the pieces that are not in program order."""

    peak: Mapping[str, int]
    pieces: tuple[Piece, ...]


class Memory:
    """The memory of one unit's schedules.

    ``limit`` is in bytes, of the CUDA device that an iteration uses, of the process where it uses
    none. :meth:`base` says what program order takes; as long as that is not known, nothing is
    predicted.
    """

    def __init__(self, limit: float | None, log: RemarkLog) -> None:
        self.limit = limit
        self.log = log
        self.measured: dict[Decision | None, Mapping[str, int]] = {}
        self.estimates: dict[Decision, Estimate] = {}
        self._stretches: tuple[Stretch, ...] = ()
        self._pieces: dict[int, tuple[Program, tuple[Piece, ...]]] = {}
        self._exact = False  # measured while nothing else but the iteration ran
        self._warned = False

    def first(self, peak: Mapping[str, int], keys: Sequence[str]) -> None:
        """What the first iteration took, which also keeps what it has seen."""
        if not self._exact:
            self._stretches = (Stretch(tuple(keys), peak),)
            self.estimates.clear()

    def base(self, stretches: Sequence[Stretch]) -> None:
        """What an iteration in program order took, stretch by stretch."""
        joined: list[Stretch] = []
        for one in stretches:
            # trips of a loop, looked at one after the other
            if joined and joined[-1].keys == one.keys:
                most = {p: max(b, joined[-1].peak.get(p, 0)) for p, b in one.peak.items()}
                joined[-1] = Stretch(one.keys, most)
            else:
                joined.append(one)
        self._stretches, self._exact = tuple(joined), True
        self.measured[Decision()] = self.before
        self.estimates.clear()

    def forget(self) -> None:
        """The program is another one."""
        self.measured.clear()
        self.estimates.clear()
        self._pieces.clear()
        self._stretches, self._exact = (), False

    @property
    def before(self) -> dict[str, int]:
        """The peak of program order by place."""
        return peaks(self._stretches, (), ())

    @property
    def place(self) -> str:
        """What is limited: the process, or the CUDA device that is used most."""
        devices = {p: size for p, size in self.before.items() if p != PROCESS and size}
        return max(devices, key=devices.__getitem__, default=PROCESS)

    @property
    def left(self) -> float | None:
        """Bytes that a schedule may add; ``None`` without a limit."""
        if self.limit is None:
            return None
        return max(0.0, self.limit - self.before.get(self.place, 0))

    def estimate(
        self, decision: Decision, captured: Program, scheduled: Program
    ) -> Estimate | None:
        """The peak of a schedule; ``None`` while program order was not measured."""
        if not self._stretches:
            return None
        known = self._pieces.get(id(scheduled))
        if known is None:
            known = self._pieces[id(scheduled)] = scheduled, added(captured, scheduled)
        pieces = known[1]
        order = [n.name for n in scheduled.root.graph.nodes]
        found = Estimate(peaks(self._stretches, pieces, order), pieces)
        self.estimates[decision] = found
        return found

    def over(self, decision: Decision, captured: Program, scheduled: Program) -> Blocker | None:
        """Why a schedule is none to be run: it is predicted to peak above the limit."""
        if self.limit is None:
            return None
        found = self.estimates.get(decision) or self.estimate(decision, captured, scheduled)
        if found is None:
            return None
        place = self.place
        peak = found.peak.get(place, 0)
        if peak <= self.limit:
            return None
        more = sorted((p for p in found.pieces if p.place == place), key=lambda p: -p.bytes)
        most = "; ".join(map(str, more[:2]))
        return Blocker(
            "memory-limit",
            f"[{decision}] is predicted to peak at {show_bytes(peak)} of the {_name(place)}, "
            f"{show_bytes(peak - self.before.get(place, 0))} above program order, and "
            f"{show_bytes(self.limit)} are allowed" + (f" ({most})" if most else ""),
            f"memory_limit={peak}",
        )

    def warn(self, name: str) -> None:
        """Say once that the program as written is above the limit already: it runs all the same."""
        peak = self.before.get(self.place, 0)
        if self.limit is None or self._warned or peak <= self.limit:
            return
        self._warned = True
        why = (
            f"{name} as written peaks at {show_bytes(peak)} of the {_name(self.place)}, above "
            f"memory_limit={show_bytes(self.limit)}; it runs all the same, without a schedule that "
            "takes more"
        )
        self.log.add(Remark("note", PASS, (), "over-limit", why))
        warn_caller(why)

    def render(self, decision: Decision, width: int = 100) -> str:
        """What is known, as text: peaks by schedule, then the pieces of ``decision``."""
        if not self._stretches:
            return "no iteration was measured yet"
        place = self.place
        how = "resident memory of the process" if place == PROCESS else f"allocated on {place}"
        table = Table(title=f"peak of an iteration ({how})", title_justify="left")
        for title in ("schedule", "predicted", "measured", "ratio"):
            table.add_column(title, justify="left" if title == "schedule" else "right")
        for one in dict.fromkeys([*self.measured, *self.estimates]):
            said = None if one is None else self.estimates.get(one)
            ahead = None if said is None else said.peak.get(place)
            seen = self.measured.get(one, {}).get(place)
            table.add_row(
                "eager" if one is None else str(one).replace("[", r"\["),
                "-" if ahead is None else show_bytes(ahead),
                "-" if seen is None else show_bytes(seen),
                f"{ahead / seen:.2f}" if ahead and seen else "-",
            )
        console = Console(width=width, file=StringIO(), color_system=None)
        with console.capture() as captured:
            console.print(table)
        lines = [captured.get().rstrip()]
        if self.limit is not None:
            lines.append(f"memory_limit: {show_bytes(self.limit)} of the {_name(place)}")
        found = self.estimates.get(decision)
        pieces = () if found is None else found.pieces
        lines.append(f"[{decision}] adds to program order, in tensors and arrays:")
        lines += [f"  {p}" for p in sorted(pieces, key=lambda p: -p.bytes)] or ["  nothing"]
        return "\n".join(lines)


def _name(place: str) -> str:
    return "process's memory" if place == PROCESS else f"memory of {place}"
