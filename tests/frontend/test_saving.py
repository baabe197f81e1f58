"""What a checkpoint holds and its writing are two operations; what it may hold is known."""

from __future__ import annotations

from typing import Any

import torch

from rose_compiler.frontend.capture import capture
from rose_compiler.frontend.effects_val import Val, joined
from rose_compiler.ir.ops import SAVES
from rose_compiler.ir.program import Program, is_call, op_of


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def save(self, place, more=None):
        """Writes all files."""
        kept = {"net": self.state_dict(), "more": more}
        torch.save(kept, place)
        self.kept = True
        torch.save(self, f"{place}.whole")

    def now_and_then(self, t, places):
        if t % 2 == 0:
            self.save(places[t], more=t)

    def tell(self, place):
        print(place)
        return torch.save(self, place)


def by_itself(net, places, n):
    for t in range(n):
        net.now_and_then(t, places)
        if t % 3 == 0:
            net.tell(places[t])
    return n


def every(net, place, n):
    for t in range(n):
        if t % 2 == 0:
            torch.save(net.state_dict(), f"{place}/{t}.pt")
        torch.save({"net": net.state_dict(), "t": t}, f=f"{place}/last.pt")
    return n


def named(net, place, n):
    kept = net.state_dict()
    torch.save(kept, place)
    torch.save(kept, place + str(len(kept)))
    torch.save(kept, place, pickle_protocol=3)
    torch.save("plain", place)
    return n


def saved(program: Program) -> list[tuple[str, Any]]:
    """The last line of each operation that saves, and what it is known to save."""
    ops = [op_of(n) for n in program.nodes() if is_call(n)]
    return [
        (o.source[-1].strip(), o.attributes.get(SAVES))
        for o in ops
        if any("save(" in line for line in o.source)
    ]


def test_what_is_saved_and_the_writing_are_two() -> None:
    found = saved(capture(every, (Net(), "x", 3), {}).program)
    assert [line.split(",")[0] for line, _ in found] == [f"torch.save({name}" for _, name in found]
    assert len({name for _, name in found}) == 2


def test_a_method_that_saves_does_so_under_the_test_that_it_is_called_under() -> None:
    program = capture(by_itself, (Net(), ["x", "y"], 2), {}).program
    found = saved(program)
    assert found == [
        ("torch.save(saved, place)", "saved"),
        ("torch.save(saved_2, f'{place}.whole')", "saved_2"),
    ]
    lines = [op_of(n).source[-1].strip() for n in program.nodes() if is_call(n) if op_of(n).source]
    assert "self.kept = True" in lines
    assert [line for line in lines if "places[t]" in line] == [
        "given = places[t]",
        "net.tell(places[t])",  # what returns something is not entered
    ]


def test_what_is_looked_at_otherwise_is_not_known_to_be_written_only() -> None:
    found = saved(capture(named, (Net(), "x", 3), {}).program)
    assert [name for _, name in found] == ["kept", None, None, None]


def test_what_any_of_several_values_holds_is_held_by_all() -> None:
    one, other = Val(frozenset({"a"})), Val(frozenset({"b"}))
    for holding in (Val(items=(one,)), Val(items={"k": one}), Val(each=one)):
        assert joined([holding, other]).all_places == {"a", "b"}
        assert joined([holding, Val(type=type(None))]).all_places == {"a"}
    pair = joined([Val(items=(one, other)), Val(items=(other, one))])
    assert isinstance(pair.items, tuple)
    assert not pair.shares
