"""The verifier on form: every rule has a planted fault that it, and no rule before it, catches."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable

import pytest
import torch

from rose_compiler.base.errors import SourceLocation, VerifyError
from rose_compiler.ir import facts, ops
from rose_compiler.ir.ops import Op, Signature
from rose_compiler.ir.program import Program, output_node, placeholders
from rose_compiler.ir.verify import RULES, verify
from rose_compiler.ir.verify_form import FORM
from tests.ir.verifying import branch, broken, loop, program


def test_a_sound_program_passes() -> None:
    verify(program())


def test_stages_are_known() -> None:
    with pytest.raises(ValueError, match="no stage 'half'"):
        verify(program(), "half")
    for rules in RULES.values():
        assert len({r.name for r in rules}) == len(rules)
        assert all(r.doc for r in rules)


def test_the_error_names_rule_line_and_further_faults_and_can_be_pickled() -> None:
    p = program()
    node = p.find("store")
    facts.put(node, origin=facts.Origin(SourceLocation("ppo.py", 43, 8, "buf.obs[t] = obs")))
    node.kwargs = {"more": 1}
    p.find("act").kwargs = {"more": 1}
    with pytest.raises(VerifyError) as caught:
        verify(p)
    error = caught.value
    assert error.code == "verify-captured"
    assert "[calls]" in str(error)
    assert error.__notes__ == ["[calls] a call with keyword arguments"]
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)


# -- form: what torch.fx lets pass

Break = Callable[[Program], None]
FAULTS: dict[str, list[Break]] = {}


def fault(rule: str) -> Callable[[Break], Break]:
    """Register a planted fault of a rule."""

    def register(plant: Break) -> Break:
        FAULTS.setdefault(rule, []).append(plant)
        return plant

    return register


@fault("lint")
def _use_before_definition_in_a_body(p: Program) -> None:
    nodes = {n.name: n for n in loop(p).graph.nodes}
    nodes["act"].prepend(nodes["r"])
    p.graph.lint()  # the outer graph is fine, and that is all it looks at


@fault("carried")
def _one_next_value_too_many(p: Program) -> None:
    out = output_node(loop(p).graph)
    out.args = ((*out.args[0], out.args[0][0]),)  # type: ignore[index, misc]


@fault("carried")
def _too_few_values_at_an_exit(p: Program) -> None:
    node = p.find("break_if")
    node.args = (node.args[0], ())


@fault("carried")
def _arms_of_different_length(p: Program) -> None:
    out = output_node(branch(p).orelse.graph)
    out.args = ((*out.args[0], 1),)  # type: ignore[misc]


@fault("carried")
def _an_exit_outside_loops(p: Program) -> None:
    with p.graph.inserting_before(output_node(p.graph)):
        p.graph.call_function(ops.BREAK_IF, (True, ()))


@fault("carried")
def _a_body_that_hands_on_no_tuple(p: Program) -> None:
    out = output_node(loop(p).graph)
    out.args = (list(out.args[0]),)  # type: ignore[arg-type]


@fault("placeholders")
def _one_captured_value_too_few(p: Program) -> None:
    node = loop(p).node
    node.args = (*node.args[:3], node.args[3][:-1])  # type: ignore[index]


@fault("placeholders")
def _a_role_is_missing(p: Program) -> None:
    facts.put(loop(p).carried[0], role="captured")


@fault("placeholders")
def _a_role_on_a_call(p: Program) -> None:
    facts.put(p.find("act"), role="value")


@fault("placeholders")
def _a_value_parameter_behind_a_state(p: Program) -> None:
    p.value_params, p.state_params = ("params",), ("obs0", "env", "buf")


@fault("bodies")
def _a_body_named_like_a_method(p: Program) -> None:
    # what setattr does, and copying a GraphModule: no check, and the method hides the body
    body = loop(p).body
    p.root._modules["train"] = body
    loop_node = loop(p).node
    loop_node.args[0].target = "train"  # type: ignore[union-attr]
    assert p.root.train is not body  # type: ignore[comparison-overlap]


@fault("bodies")
def _a_body_that_is_missing(p: Program) -> None:
    delattr(p.root, str(loop(p).node.args[0].target))  # type: ignore[union-attr]


@fault("bodies")
def _one_body_for_two_loops(p: Program) -> None:
    node = loop(p).node
    with p.graph.inserting_before(output_node(p.graph)):
        p.graph.call_function(ops.LOOP, node.args)


@fault("bodies")
def _a_graph_of_another_module(p: Program) -> None:
    loop(p).graph.owning_module = p.root


@fault("bodies")
def _a_range_of_two_bounds(p: Program) -> None:
    node = loop(p).node
    node.args = (node.args[0], (0, 8), *node.args[2:])


@fault("bodies")
def _a_range_that_stands_still(p: Program) -> None:
    node = loop(p).node
    node.args = (node.args[0], (0, 8, 0), *node.args[2:])


@fault("bodies")
def _a_value_captured_twice(p: Program) -> None:
    node = loop(p).node
    captured = node.args[3]
    node.args = (*node.args[:3], (*captured, captured[0]))  # type: ignore[misc, index]


@fault("bodies")
def _a_loop_of_three_arguments(p: Program) -> None:
    node = loop(p).node
    node.args = node.args[:3]


@fault("bodies")
def _a_constant_captured(p: Program) -> None:
    node = loop(p).node
    node.args = (*node.args[:3], (*node.args[3], 3))  # type: ignore[misc]


@fault("bodies")
def _an_exit_without_tuple(p: Program) -> None:
    node = p.find("break_if")
    node.args = (node.args[0], node.args[1][0])  # type: ignore[index]


@fault("own-nodes")
def _a_node_of_another_graph(p: Program) -> None:
    store = p.find("store")
    store.args = (*store.args[:2], placeholders(p.graph)[0])


@fault("calls")
def _an_operation_that_is_not_in_the_table(p: Program) -> None:
    del p.ops.by_name["store"]


@fault("calls")
def _a_namesake_of_an_operation(p: Program) -> None:
    p.find("store").target = p.ops.by_name["store"].with_signature(writes=())


@fault("calls")
def _a_namesake_of_a_builtin(p: Program) -> None:
    p.ops.by_name["loop"] = Op(Signature("loop", (), (), ()))


@fault("calls")
def _an_entry_under_another_name(p: Program) -> None:
    p.ops.by_name["other"] = p.ops.by_name["store"]


@fault("calls")
def _an_argument_too_few(p: Program) -> None:
    store = p.find("store")
    store.args = store.args[:2]


@fault("calls")
def _a_plain_function(p: Program) -> None:
    with p.graph.inserting_before(output_node(p.graph)):
        p.graph.call_function(torch.add, (1, 2))


@fault("calls")
def _an_operator_in_place(p: Program) -> None:
    with p.graph.inserting_before(output_node(p.graph)):
        p.graph.call_function(operator.iadd, (placeholders(p.graph)[0], 2))


@fault("calls")
def _a_method(p: Program) -> None:
    with p.graph.inserting_before(output_node(p.graph)):
        p.graph.call_method("add_", (placeholders(p.graph)[0], 2))


@fault("calls")
def _a_result_where_there_is_none(p: Program) -> None:
    pick = p.ops.by_name["pick"].with_signature(results=0)
    p.ops.by_name["pick"] = pick
    next(n for n in branch(p).orelse.graph.nodes if n.op == "call_function").target = pick


@fault("calls")
def _a_concat_of_nothing(p: Program) -> None:
    with p.graph.inserting_before(output_node(p.graph)):
        p.graph.call_function(ops.CONCAT, ())


@fault("items")
def _a_carried_value_that_is_not_there(p: Program) -> None:
    p.find("last").args = (loop(p).node, 1)


@fault("items")
def _a_result_that_is_not_there(p: Program) -> None:
    p.find("logp").args = (p.find("act"), 2)


@fault("traced")
def _a_traced_body_with_other_parameters(p: Program) -> None:
    body = p.ops.by_name["features"].body
    assert body is not None
    with body.graph.inserting_after(placeholders(body.graph)[-1]):
        body.graph.placeholder("more")


@fault("traced")
def _a_traced_body_out_of_order(p: Program) -> None:
    body = p.ops.by_name["features"].body
    assert body is not None
    first = next(iter(body.graph.nodes))
    first.prepend(next(n for n in body.graph.nodes if n.op == "call_function"))


@fault("traced")
def _a_traced_body_of_a_block(p: Program) -> None:
    p.ops.by_name["pick"].kind = "graph"


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
    assert {r.name for r in FORM} == set(FAULTS)


def test_lint_of_torch_fx_does_not_enter_bodies() -> None:
    # why the verifier looks at every graph itself
    p = program()
    out = output_node(loop(p).graph)
    out.args = ((*out.args[0], 1, 2, 3),)  # type: ignore[misc]
    p.graph.lint()
    assert broken(p) == "carried"
