"""The verifier on states, effects and facts: a planted fault for every rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rose_compiler.ir import facts, ops
from rose_compiler.ir.facts import Slot
from rose_compiler.ir.program import Program, output_node, placeholders
from rose_compiler.ir.verify import verify
from rose_compiler.ir.verify_meaning import MEANING
from rose_compiler.ir.verify_schedule import UNSCHEDULED
from tests.ir.verifying import broken, loop, program

Break = Callable[[Program], None]
FAULTS: dict[str, list[Break]] = {}


def fault(rule: str) -> Callable[[Break], Break]:
    """Register a planted fault of a rule."""

    def register(plant: Break) -> Break:
        FAULTS.setdefault(rule, []).append(plant)
        return plant

    return register


@fault("facts")
def _facts_that_can_change(p: Program) -> None:
    facts.put(p.find("act"), context=(facts.Context("autocast", ([1],)),))


@fault("facts")
def _facts_of_another_kind(p: Program) -> None:
    p.find("act").meta["rose"] = {"alias": []}


@fault("captured")
def _a_state_captured_as_a_value(p: Program) -> None:
    inner = next(x for x in loop(p).captured_params if facts.get(x).state == "env")
    facts.put(inner, state="")


@fault("captured")
def _a_state_under_another_name(p: Program) -> None:
    inner = next(x for x in loop(p).captured_params if facts.get(x).state == "env")
    facts.put(inner, state="buf")


@fault("captured")
def _a_carried_state(p: Program) -> None:
    facts.put(loop(p).carried[0], state="env")


@fault("states")
def _a_root_under_another_name(p: Program) -> None:
    for graph in p.graphs():
        for node in placeholders(graph):
            if facts.get(node).state == "env":
                facts.put(node, state="other")


@fault("states")
def _a_state_below_a_root_under_another_name(p: Program) -> None:
    facts.put(p.find("w"), state="elsewhere.w")


@fault("states")
def _a_shard_beside_its_simulator(p: Program) -> None:
    env = next(n for n in placeholders(p.graph) if n.name == "env")
    with p.graph.inserting_before(loop(p).node):
        facts.put(p.graph.call_function(ops.SHARD, (env, 0)), state="env0")


@fault("states")
def _an_instance_named_like_a_root(p: Program) -> None:
    facts.put(p.find("scratch"), state="scratch")


@fault("states")
def _a_loop_that_is_a_state(p: Program) -> None:
    facts.put(loop(p).node, state="%rollout")


@fault("values")
def _a_state_carried_in(p: Program) -> None:
    node = loop(p).node
    env = next(n for n in placeholders(p.graph) if n.name == "env")
    node.args = (*node.args[:2], (env,), node.args[3])


@fault("values")
def _a_state_handed_on(p: Program) -> None:
    inner = next(x for x in loop(p).captured_params if facts.get(x).state == "env")
    output_node(loop(p).graph).args = ((inner,),)


@fault("values")
def _a_state_handed_out_by_an_exit(p: Program) -> None:
    inner = next(x for x in loop(p).captured_params if facts.get(x).state == "env")
    node = p.find("break_if")
    node.args = (node.args[0], (inner,))


def _signed(p: Program, **changes: object) -> None:
    store = p.ops.by_name["store"].with_signature(**changes)
    p.ops.by_name["store"] = store
    p.find("store").target = store


@fault("signatures")
def _an_effect_on_an_unknown_root(p: Program) -> None:
    _signed(p, writes=("buffer.obs[t]",))


@fault("signatures")
def _an_effect_on_an_unknown_state(p: Program) -> None:
    _signed(p, writes=("@buffer.obs",))


@fault("signatures")
def _an_effect_that_is_none(p: Program) -> None:
    _signed(p, writes=("buf..obs",))


@fault("signatures")
def _a_batch_axis_of_nothing(p: Program) -> None:
    _signed(p, batch=(("observation", 0),))


@fault("signatures")
def _two_parameters_of_one_name(p: Program) -> None:
    _signed(p, params=("buf", "buf", "obs"), writes=("buf.obs",))


@fault("signatures")
def _a_step_without_its_simulator(p: Program) -> None:
    p.ops.by_name["step"].attributes["step"] = {"env": "simulator", "action": "a"}


@fault("kept")
def _a_list_that_keeps_a_lent_buffer(p: Program) -> None:
    with p.graph.inserting_before(loop(p).node):
        items = p.graph.call_function(ops.NEW_LIST, ())
        facts.put(items, state="%items")
        lent = p.graph.call_function(ops.ROWS, (placeholders(p.graph)[0], 0, 2))
        facts.put(lent, alias=("env.outputs",))
        p.graph.call_function(ops.APPEND, (items, lent))


@fault("unscheduled")
def _a_slot_in_a_captured_program(p: Program) -> None:
    facts.put(p.find("act"), slot=Slot())


@pytest.mark.parametrize(
    ("rule", "plant"),
    [(rule, plant) for rule, plants in FAULTS.items() for plant in plants],
    ids=lambda x: x.__name__.strip("_") if callable(x) else x,
)
def test_planted_fault_is_caught_by_its_rule(rule: str, plant: Break) -> None:
    p = program()
    verify(p)
    plant(p)
    assert broken(p) == rule


def test_every_rule_has_a_planted_fault() -> None:
    assert {r.name for r in (*MEANING, *UNSCHEDULED)} == set(FAULTS)
