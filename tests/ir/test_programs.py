"""The generator of programs: they run, the same way every time, and their signatures are true."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given, settings

from rose_compiler.ir import facts, interp
from rose_compiler.ir.effects import parse_entry
from rose_compiler.ir.ops import BRANCH, BREAK_IF, CONTINUE_IF, LOOP, Op
from rose_compiler.ir.program import LoopView
from rose_compiler.ir.verify import verify
from rose_compiler.testing.program_ops import OPS, fresh_objects
from rose_compiler.testing.program_state import Net
from rose_compiler.testing.programs import FEATURES, Generated, frozen, observe, programs

Leaf = tuple[str, int | None]  # a state and an index into it, or the whole


@settings(max_examples=40)
@given(programs())
def test_programs_run_and_are_the_same_after_a_round_trip(generated: Generated) -> None:
    verify(generated.program)
    first = generated.run_and_snapshot()
    assert first.raised == ""
    assert generated.run_and_snapshot() == first
    assert generated.run_and_snapshot(generated.clone()) == first
    assert observe(generated) == (first.result, first.states)


def test_a_snapshot_sees_every_kind_of_change() -> None:
    """A run that changes one thing differs in just that state."""
    generated = _example()

    def seen(change: Any) -> Any:
        return generated.observe(lambda objects: change(objects, generated.world))

    changes = {
        "cells": lambda o, w: o["cells"].__setitem__(3, 100),
        "bag": lambda o, w: o["bag"]["left"].append(1),
        "grid": lambda o, w: o["grid"][1, 2].mul_(-1),
        "table": lambda o, w: o["table"].update(last=True),
        "gen": lambda o, w: torch.rand((), generator=o["gen"]),
        "sim": lambda o, w: o["sim"].step(1),
        "rng:torch": lambda o, w: torch.rand(()),
        "host": lambda o, w: w.host.append(1),
        "net": lambda o, w: o["net"].w.data.add_(1),
        "chance": lambda o, w: o["chance"].random(),
    }
    base = seen(lambda o, w: None).states
    assert set(base) == set(changes)
    for name, change in changes.items():
        states = seen(lambda o, w, change=change: (change(o, w), None)[1]).states
        assert [n for n in base if base[n] != states[n]] == [name]


def test_bits_and_types_matter_in_a_snapshot() -> None:
    zero = torch.zeros(2)
    for other in (-zero, zero.double(), zero.reshape(2, 1), [0.0, 0.0]):
        assert frozen(zero) != frozen(other)
    assert frozen(True) != frozen(1)
    assert frozen([1]) != frozen((1,))


def _example() -> Generated:
    found: list[Generated] = []

    @settings(max_examples=1)
    @given(programs())
    def first(generated: Generated) -> None:
        found.append(generated)

    first()
    return found[0]


def test_every_kind_of_structure_occurs() -> None:
    seen: set[str] = set()

    @settings(max_examples=250)
    @given(programs())
    def collect(generated: Generated) -> None:
        for loop in generated.program.loops():
            seen.add(loop.facts.kind)
            depth = _depth(loop.node.graph)
            seen.add(f"depth {depth}")
            positions = {p: i for i, p in enumerate(loop.carried)}
            for i, value in enumerate(loop.carried_next):
                if positions.get(value, i) != i:
                    seen.add("handed down the line")
        for node in generated.program.nodes():
            known = facts.get(node)
            seen.update(
                name
                for name, there in (
                    ("branch", node.target is BRANCH),
                    ("break", node.target is BREAK_IF),
                    ("continue", node.target is CONTINUE_IF),
                    ("context", len(known.context) > 1),
                    ("alias", bool(known.alias)),
                    ("borrowed", known.borrowed),
                    ("unbound", known.maybe_unbound),
                    ("local", known.state.startswith("%") and node.op == "call_function"),
                )
                if there
            )
            if isinstance(node.target, Op):
                seen.add(f"op {node.target.name}")

    def _depth(graph: fx.Graph) -> int:
        # a body's owner is not recorded in it; nesting shows in the labels the generator gives
        return max((int(str(n)[4]) for n in graph.nodes if n.target is LOOP), default=0)

    collect()
    expected = {"range", "iter", "while", "depth 0", "depth 1", "depth 2", "handed down the line"}
    expected |= {"branch", "break", "continue", "context", "alias", "borrowed", "unbound", "local"}
    expected |= {f"op {name}" for name in (*OPS, "log", "meddle", "append", "new_list", "state")}
    assert expected - seen == set()


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_features_can_be_left_out(feature: str) -> None:
    @settings(max_examples=15)
    @given(programs(without={feature}, size=12))
    def check(generated: Generated) -> None:
        nodes = list(generated.program.nodes())
        targets = {n.target for n in nodes}
        kinds = {LoopView(n).facts.kind for n in nodes if n.target is LOOP}
        names = {t.name for t in targets if isinstance(t, Op)}
        absent = {
            "branch": BRANCH not in targets,
            "context": not any(facts.get(n).context for n in nodes),
            "draw": not names & {"roll", "dice", "noise", "throw"},
            "exit": CONTINUE_IF not in targets,
            "gradient": not names & {"forward", "backward", "update", "weight"},
            "host": "log" not in names,
            "iter": "iter" not in kinds,
            "local": not any("%" in facts.get(n).state for n in nodes),
            "loop": LOOP not in targets,
            "opaque": "meddle" not in names,
            "simulator": "step" not in names,
            "store": not names & {"store", "load", "hit"},
            "strange": not any(n.startswith("strange") for n in names),
            "unbound": not any(facts.get(n).maybe_unbound for n in nodes),
            "view": "view_row" not in names,
            "while": "while" not in kinds,
        }
        assert absent[feature]

    check()


def test_an_unknown_feature_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown features"):
        programs(without={"teleport"})


# Signatures


def _leaves(objects: dict[str, Any], host: list[int]) -> dict[Leaf, Any]:
    found: dict[Leaf, Any] = {("rng:torch", None): frozen(torch.get_rng_state())}
    found["host", None] = frozen(host)
    for name, value in objects.items():
        found.update(_below(name, value))
    return found


def _below(name: str, value: Any) -> Iterator[tuple[Leaf, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _below(f"{name}.{key}", item)
    elif isinstance(value, list | torch.Tensor):
        for i, item in enumerate(value):
            yield (name, i), frozen(item)
    elif isinstance(value, Net):
        yield (f"{name}.w", None), frozen(value.w)
        yield (f"{name}.b", None), frozen(value.b)
        yield (f"{name}.grads", None), frozen([p.grad for p in value.parameters])
    else:
        yield (name, None), frozen(value)


def _copied(objects: dict[str, Any]) -> dict[str, Any]:
    found = {name: copy.deepcopy(value) for name, value in objects.items() if name != "gen"}
    found["gen"] = torch.Generator()
    found["gen"].set_state(objects["gen"].get_state())
    return found


def _touches(entry: Leaf, leaf: Leaf) -> bool:
    (state, index), (at, i) = entry, leaf
    below = at == state or at.startswith(f"{state}.") or state.startswith(f"{at}.")
    return below and (index is None or index == i)


def _state(objects: dict[str, Any], name: str) -> Any:
    root, *path = name.split(".")
    found = objects[root]
    for part in path:
        found = found[part]
    return found


class Truth(interp.Hooks):
    """Compares what operations do with what their signatures say, call by call."""

    def __init__(self, generated: Generated, objects: dict[str, Any]) -> None:
        self.world = generated.world
        self.objects = dict(objects)  # and the locals, as they are born
        self.checked: set[str] = set()

    def before(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        self.then = _leaves(self.objects, self.world.host)
        op = node.target
        assert isinstance(op, Op)
        # a graph leads back to the very parameters it was made of, not to copies of them
        on_copies = "backward" not in op.attributes.get("calls", ())
        if op.signature.reads is not None and op.impl is not None and on_copies:
            self._check_reads(node, op, args)

    def after(self, node: fx.Node, args: tuple[Any, ...], result: Any) -> None:
        op = node.target
        assert isinstance(op, Op)
        now = _leaves(self.objects, self.world.host)
        changed = [leaf for leaf in {**self.then, **now} if self.then.get(leaf) != now.get(leaf)]
        writes = self._entries(node, op.signature.writes, args)
        for leaf in changed:
            assert any(_touches(w, leaf) for w in writes), f"{op.name} writes {leaf} unsaid"
        self.checked.add(op.name)
        state = facts.get(node).state
        if state.startswith("%"):
            self.objects[state] = result

    def _entries(
        self, node: fx.Node, texts: tuple[str, ...] | None, args: tuple[Any, ...]
    ) -> list[Leaf]:
        if texts is None:
            return [(name, None) for name in (*self.objects, "host", "rng:torch")]
        assert isinstance(node.target, Op)
        params = node.target.signature.params
        found: list[Leaf] = []
        for text in texts:
            entry = parse_entry(text)
            if entry.root not in params:
                found.append((entry.root, None))
                continue
            known = facts.get(node.args[params.index(entry.root)])  # type: ignore[arg-type]
            path = f".{entry.path}" if entry.path else ""
            index = None if entry.index is None else args[params.index(entry.index[0] or "")]
            if known.state:
                found.append((known.state + path, index))
            found += [(alias, None) for alias in known.alias]
        return found

    def _check_reads(self, node: fx.Node, op: Op, args: tuple[Any, ...]) -> None:
        known = [facts.get(a) if isinstance(a, fx.Node) else facts.Facts() for a in node.args]
        if any(k.alias for k in known):
            return  # a view would have to be taken anew in each copy
        written = {parse_entry(text).root for text in op.signature.writes or ()}
        if any(
            p in written and not k.state for p, k in zip(op.signature.params, known, strict=True)
        ):
            return  # it would change the very value
        reads = self._entries(node, op.signature.reads, args)
        host, rng = list(self.world.host), torch.get_rng_state()
        seen = []
        for poison in (False, True):
            objects = _copied(self.objects)
            if poison:
                self._poison(objects, reads)
            given = [
                _state(objects, k.state) if k.state else a for k, a in zip(known, args, strict=True)
            ]
            then = _leaves(objects, host)
            result = frozen(op(*given))
            now = _leaves(objects, self.world.host)
            written = {leaf: now[leaf] for leaf in now if now[leaf] != then.get(leaf)}
            seen.append((result, written))
            self.world.host[:] = host
            torch.set_rng_state(rng)
        (clean, written), (poisoned, other) = seen
        assert clean == poisoned, f"the result of {op.name} hangs on what it reads unsaid"
        for leaf, value in written.items():
            # where the old value was poisoned to what is written, nothing seems to change
            assert other.get(leaf, value) == value, f"what {op.name} writes hangs on more"

    def _poison(self, objects: dict[str, Any], reads: list[Leaf]) -> None:
        def free(state: str, index: int | None = None) -> bool:
            return not any(_touches(read, (state, index)) for read in reads)

        def change(name: str, value: Any) -> None:
            if isinstance(value, dict):
                for key, item in value.items():
                    if isinstance(item, int):
                        value[key] = item + 1 if free(f"{name}.{key}") else item
                    else:
                        change(f"{name}.{key}", item)
            elif isinstance(value, list | torch.Tensor):
                for i in range(len(value)):
                    if free(name, i):
                        value[i] = value[i] + 1

        for name, value in objects.items():
            change(name, value)
        if free("gen"):
            objects["gen"].manual_seed(99)
        if free("sim"):
            objects["sim"].x += 1
        if free("rng:torch"):
            torch.manual_seed(77)


def test_signatures_say_what_operations_touch() -> None:
    checked: set[str] = set()

    @settings(max_examples=100)
    @given(programs())
    def check(generated: Generated) -> None:
        def run(objects: dict[str, Any]) -> Any:
            truth = Truth(generated, objects)
            result = interp.run(generated.program, generated.args, objects, hooks=truth)
            checked.update(truth.checked)
            return result

        def unchecked(objects: dict[str, Any]) -> Any:
            return interp.run(generated.program, generated.args, objects)

        seen = generated.observe(run)
        assert seen == generated.observe(unchecked), seen.raised

    check()
    assert set(OPS) - checked == set()


def test_a_false_signature_is_found() -> None:
    """The check above fails for signatures that leave something out."""
    objects = fresh_objects()
    generated = _example()
    for name, change in (
        ("total", {"reads": ()}),
        ("store", {"writes": ("cells[v]",)}),
        ("add_to", {"reads": ()}),
        ("roll", {"reads": ()}),
        ("recall", {"reads": ("table.hits",)}),
        ("dice", {"writes": ()}),
    ):
        op = OPS[name].with_signature(**change)
        graph = fx.Graph()
        states = {}
        for root in objects:
            states[root] = graph.placeholder(root)
            facts.put(states[root], role="state", state=root)
        args = [states.get(p, i) for i, p in enumerate(op.signature.params)]
        node = graph.create_node("call_function", op, tuple(args))
        live = [objects[a.name] if isinstance(a, fx.Node) else a for a in args]
        truth = Truth(generated, objects)
        with pytest.raises(AssertionError, match=op.name):
            _checked_call(truth, node, live)


def _checked_call(truth: Truth, node: fx.Node, args: list[Any]) -> None:
    truth.before(node, tuple(args))
    assert isinstance(node.target, Op)
    truth.after(node, tuple(args), node.target(*args))
