"""A traced graph without gradients as one function that was compiled.

By Inductor, kernels of many small operations become few; by TorchScript, what Python does between
them goes. As with losses, what is compiled holds for one make of
arguments, every call checks them, and torch's own operations do what differs, and what a check of
the user's code would refuse. It is used only where it was faster when it was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rose_compiler.base.latest import latest
from rose_compiler.runtime.cuda_graphs import Replays, copies, replays_of
from rose_compiler.runtime.inductor import (
    INDUCTOR,
    LEEWAY,
    MAX_FUNCTIONS,
    PAYS,
    Form,
    Forward,
    Makes,
    Note,
    Refused,
    attempted,
    built,
    faster,
    finished,
    holding,
    identity,
    instead,
    intercepted,
    known_of,
    name_of,
    unchecked,
)
from rose_compiler.runtime.probe import compare_outputs, same_bits
from rose_compiler.runtime.rounding import difference, moved


@dataclass(frozen=True)
class Make:
    """A graph compiled for arguments of one make.

    ``known`` is what must hold of each argument. ``run`` takes the ``tensors`` among them (by
    position) and makes the results, each tensor once; where the graph has checks (``checked``), a
    truth value in front of them. ``places`` says which of them each result is, or that it is
    argument ``~place``; None if there is one result that is no tuple. ``gain``: what a call takes
    and took, timed by itself.
    """

    threads: int
    known: tuple[Any, ...]
    tensors: tuple[int, ...]
    run: Callable[..., Sequence[Tensor]]
    replays: Replays
    checked: bool
    places: tuple[int, ...] | None
    gain: str


class Graph:
    """One graph of a compiled function, and what it is compiled to for each make of arguments."""

    def __init__(self, forward: Forward, form: Form = INDUCTOR) -> None:
        self.forward = forward
        self.makes = Makes(forward, compiled, form)

    def __call__(
        self,
        args: tuple[Any, ...],
        tell: Callable[[Note], object],
        quiet: Callable[[], bool] | None = None,
    ) -> Any:
        """What ``forward(*args)`` returns. ``tell`` is given a note of each attempt to compile.

        With ``quiet`` it is replayed as a CUDA graph where it can be (see
        :mod:`rose_compiler.runtime.cuda_graphs`).
        """
        if _recording(args) or intercepted(args):
            return self.forward(*args)
        make = self.makes.get(args, tell)
        if make is None:
            return self.forward(*args)
        given = [args[k] for k in make.tensors]
        replayed = make.replays(given, copies, quiet, tell) if quiet is not None else None
        made = attempted(make.run, given) if replayed is None else replayed[0]
        if made is None:
            return self.forward(*args)
        if make.checked:
            valid, *made = made
            if not valid:
                return self.forward(*args)
        if make.places is None:
            return made[0]
        return tuple([made[k] if k >= 0 else args[~k] for k in make.places])


def _recording(args: tuple[Any, ...]) -> bool:
    """Whether the graph's operations record gradients, or make tensors that never can."""
    if torch.is_inference_mode_enabled():
        return True
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def compiled(forward: Forward, args: tuple[Any, ...], form: Form = INDUCTOR) -> Make:
    """Compile a graph for arguments of the make of ``args``.

    It is used only if what it computes from them agrees with torch's own operations to the
    tolerance of ``numerics="close"``, or in every bit where the form promises that, and sooner.

    Raises:
        Refused: when that is not so; Inductor raises errors of its own.
    """
    tensors = tuple(k for k, a in enumerate(args) if isinstance(a, Tensor))
    given = [args[k] for k in tensors]
    if not given:
        raise Refused("it takes no tensor")
    copies = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
    forward(*copies)
    if any(isinstance(a, Tensor) and a._version for a in copies):
        raise Refused("it writes an argument")
    alone, results = _results(forward(*args))
    # what is handed out twice, or was handed in, is one tensor: so it is here. Arguments that are
    # one tensor now may be two in another call: what is handed on is told by objects of their own
    own_objects = [a.detach() if isinstance(a, Tensor) else a for a in args]
    handed = _results(forward(*own_objects))[1]
    positions = {id(own_objects[k]): ~k for k in tensors}
    firsts: list[int] = []
    for k, result in enumerate(handed):
        if id(result) not in positions:
            positions[id(result)] = len(firsts)
            firsts.append(k)
    places = tuple(positions[id(r)] for r in handed)
    expected = [results[k] for k in firsts]
    if not expected:
        raise Refused("it makes nothing")
    _apart(given, expected)

    def own(others: tuple[Any, ...]) -> list[Tensor]:
        found = _results(forward(*others))[1]
        return [found[k] for k in firsts]

    conditions: list[Tensor] = []
    unchecked(forward, conditions)(*args)
    checked = bool(conditions)

    def joint(*values: Tensor) -> list[Tensor]:
        taken = list(args)
        for k, value in zip(tensors, values, strict=True):
            taken[k] = value
        noted: list[Tensor] = []
        found = _results(unchecked(forward, noted)(*taken))[1]
        made = [found[k] for k in firsts]
        return [holding(noted, made[0].device), *made] if checked else made

    run = (form.build or built)(joint, [a.detach() for a in given])
    made = list(run(*given))
    if checked and not made.pop(0):
        raise Refused("its checks fail")
    _apart(given, made)
    if [(a.stride(), a.requires_grad) for a in expected] != [
        (b.stride(), b.requires_grad) for b in made
    ]:
        raise Refused("compiled, its results lie otherwise in memory")
    if form.exact and not all(map(same_bits, expected, made)):
        raise Refused("its bits differ from those of torch's own operations one by one")
    _agree(own, args, expected, made)
    gain = _pays(lambda: forward(*args), lambda: run(*given))
    return Make(
        torch.get_num_threads(),
        tuple(map(known_of, args)),
        tensors,
        run,
        replays_of(name_of(forward), run),
        checked,
        None if alone else places,
        gain,
    )


def _results(made: Any) -> tuple[bool, list[Tensor]]:
    """Whether there is one result that is no tuple, and the results."""
    alone = isinstance(made, Tensor)
    found = [made] if alone else list(made)
    if not found or not all(isinstance(m, Tensor) for m in found):
        raise Refused("its results are more than tensors")
    return alone, found


def _apart(given: list[Tensor], made: list[Tensor]) -> None:
    """Refuse results that share memory with an argument or with each other: what is done to one
    must show, or not show, in the other as it does with torch's own operations."""
    taken = {a.untyped_storage().data_ptr() for a in given if a.numel()}
    for value in made:
        where = value.untyped_storage().data_ptr()
        if where in taken and value.numel():
            raise Refused("a result shares memory with another one")
        taken.add(where)


def _agree(
    own: Callable[[tuple[Any, ...]], list[Tensor]],
    args: tuple[Any, ...],
    expected: list[Tensor],
    made: list[Tensor],
) -> None:
    wrong = [k for k, a in enumerate(expected) if compare_outputs(a, made[k]) == "differ"]
    if not wrong:
        return
    allowed = moved(own, args, expected)
    for k in wrong:
        off = difference(expected[k], made[k])
        if not off <= LEEWAY * allowed[k]:
            raise Refused(f"compiled, it differs by {off:.2g}, more than rounding does")


def _pays(own: Callable[[], object], compiled: Callable[[], object]) -> str:
    """Refuse what is not faster, the two timed in turn; what was seen, in words."""
    before, after = faster(own, compiled, finished)
    if after > PAYS * before:
        raise Refused(
            f"compiled, it takes {1e6 * after:.0f} us instead of {1e6 * before:.0f}: too little "
            "is won"
        )
    return instead(before, after)


_known_graphs: dict[Any, Graph] = {}


def of(forward: Forward, form: Form = INDUCTOR) -> Graph:
    """The graph of a function; one and the same for functions of the same code and globals."""
    key = form.kind, identity(forward)
    return latest(_known_graphs, key, lambda: Graph(forward, form), MAX_FUNCTIONS)
