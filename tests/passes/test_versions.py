"""versions: evaluations read copies of parameters, and go on while those are trained."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts, interp
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.ops import FREEZE, VERSION
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.overlap import Overlap
from rose_compiler.passes.versions import Versions, copying
from rose_compiler.testing import slots
from rose_compiler.tune.space import candidates
from tests.passes.texts import changed

TEXT = """
@op(reads=["envs", "agent.params"], writes=["envs"], kind="step", attributes={"step": {"env": "envs", "action": "agent"}})
def collect(agent, envs): ...

@op(reads=["agent.params", "envs"], writes=["@agent.params"], results=0, calls=["optimizer"])
def train(agent, envs, x): ...

@op(kind="graph", reads=["w"], writes=[], may_raise=False)
def act(look, w):
    y = look * w
    return y

@op(reads=["tests"], writes=["tests"], kind="step", attributes={"step": {"env": "tests", "action": "action"}})
def try_out(action, tests): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, score): ...

def iterations(n, start, *, agent, envs, tests, log):
    w: state("agent.params.w") = state(agent, "w")
    for it in training(0, n, 1):
        x = collect(agent, envs)
        for t, look in evaluation(0, 3, 1, look=start):
            action = act(look, w)
            seen = try_out(action, tests)
            yield seen
        score = evaluation.look
        note(log, score)
        train(agent, envs, x)
        yield ()
    return n
"""
COPIES = Decision(overlap=True, copies=True)
CONTEXT = PassContext(options=COPIES)


def test_an_evaluation_reads_copies(golden: Any) -> None:
    golden("evaluation", [Versions(), Overlap()], CONTEXT, program=parse(TEXT), folder="versions")
    assert copying(parse(TEXT))


def beside(program: Program) -> bool:
    """Whether an evaluation is awaited behind the update that stands after it."""
    loop = next(n for n in program.graph.nodes if is_call(n) and op_of(n).name == "loop")
    body = loop.graph.owning_module.get_submodule(str(loop.args[0].target))  # type: ignore[union-attr]
    order = {op_of(n).name: s.order for n in body.graph.nodes if is_call(n) and (s := facts.get(n).slot)}  # fmt: skip
    return order["loop"] < order["train"]


class Agent:
    def __init__(self) -> None:
        self.w = torch.tensor(2.0)


class Counted:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def note(self, x: Any) -> Any:
        self.seen.append(float(x))
        return torch.tensor(float(x) + len(self.seen))


def train(agent: Agent, envs: Counted, x: torch.Tensor) -> None:
    agent.w.add_(0.25 * x)


BIND: dict[str, Callable[..., Any]] = {
    "collect": lambda agent, envs: envs.note(agent.w),
    "train": train,
    "try_out": lambda action, tests: tests.note(action) % 7,
    "note": lambda log, score: log.seen.append(float(score)),
}


@pytest.mark.parametrize("trips", [0, 1, 4])
def test_what_it_computes_is_what_program_order_does(trips: int) -> None:
    def objects() -> dict[str, Any]:
        return {"agent": Agent(), "envs": Counted(), "tests": Counted(), "log": Counted()}

    plain = objects()
    program = parse(TEXT, bind=BIND)
    interp.run(program, [trips, torch.tensor(1.0)], plain)
    PassManager([Versions(), Overlap()], verify=2).run(program, CONTEXT)
    assert beside(program)
    for seed in range(4):
        found = objects()
        slots.run(program, [trips, torch.tensor(1.0)], found, seed=seed)
        assert float(found["agent"].w) == float(plain["agent"].w)
        for name in ("envs", "tests", "log"):
            assert found[name].seen == plain[name].seen


REFUSED: dict[str, tuple[tuple[tuple[str, str], ...], PassContext]] = {
    "switched-off": ((), PassContext(options=Decision(overlap=True))),
    # a statement that is handed the policy itself
    "effects-conflict": (
        (
            ('reads=["tests"], writes=["tests"], kind="step"', 'reads=["tests", "agent.params.w"], writes=["tests"], kind="step"'),
            ("def try_out(action, tests)", "def try_out(action, agent, tests)"),
            ("= try_out(action, tests)", "= try_out(action, agent, tests)"),
        ),
        CONTEXT,
    ),
    # nothing is known of how large the parameter is
    "memory-limit": ((), PassContext(options=COPIES, memory_limit=1e9)),
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code: str) -> None:
    changes, context = REFUSED[code]
    program = parse(changed(TEXT, changes))
    history = PassManager([Versions()], verify=2).run(program, context)
    assert [r.code for r in history.remarks.missed()] == [code]
    assert not any(is_call(n, VERSION) for n in program.nodes())


def test_a_size_above_the_limit_is_refused_and_one_below_is_not() -> None:
    for limit, copied in ((7.0, 0), (8.0, 1)):  # two copies of four bytes
        program = parse(TEXT, bind=BIND)
        program.objects["agent"] = Agent()
        history = PassManager([Versions()], verify=2).run(
            program, PassContext(options=COPIES, memory_limit=limit)
        )
        assert sum(is_call(n, VERSION) for n in program.nodes()) == copied
        assert [r.code for r in history.remarks.missed()] == ["memory-limit"][copied:]


def test_memory_that_a_copy_would_not_lie_in_stays() -> None:
    program = parse(TEXT, bind=BIND)
    program.objects["agent"] = agent = Agent()
    agent.w = torch.arange(4.0)[1]
    history = PassManager([Versions()], verify=2).run(program, CONTEXT)
    assert [r.code for r in history.remarks.missed()] == ["unsupported-shape"]


@pytest.mark.parametrize(
    "context",
    [PassContext(options=Decision(copies=True)), PassContext(options=COPIES, run_ahead=False)],
)
def test_without_overlap_nothing_is_copied(context: PassContext) -> None:
    program = parse(TEXT)
    PassManager([Versions()], verify=2).run(program, context)
    assert not any(is_call(n, VERSION) for n in program.nodes())


def test_copies_are_one_more_candidate() -> None:
    known: dict[str, Any] = {"close": False, "threads": 1, "asynchronous": True, "eager": True}
    without = candidates(2, overlap=True, **known)
    found = candidates(2, overlap=True, copies=True, **known)
    assert len([one for one in found if one is not None and one.copies]) == 1
    assert [one for one in found if one is None or not one.copies] == without
    assert candidates(2, copies=True, **known) == candidates(2, **known)


AGAIN = """        train(agent, envs, x)
        for s, gaze in again(0, 2, 1, gaze=start):
            move = act(gaze, w)
            found = try_out(move, tests)
            yield found
        worth = again.gaze
        note(log, worth)
"""


def test_an_evaluation_behind_an_update_reads_what_that_wrote() -> None:
    def objects() -> dict[str, Any]:
        return {"agent": Agent(), "envs": Counted(), "tests": Counted(), "log": Counted()}

    text = TEXT.replace("        train(agent, envs, x)\n", AGAIN)
    plain = objects()
    interp.run(parse(text, bind=BIND), [3, torch.tensor(1.0)], plain)
    program = parse(text, bind=BIND)
    history = PassManager([Versions(), Overlap()], verify=2).run(program, CONTEXT)
    missed = [r for r in history.remarks.missed() if r.pass_name == "versions"]
    assert [r.code for r in missed] == ["effects-conflict"]
    for seed in range(3):
        found = objects()
        slots.run(program, [3, torch.tensor(1.0)], found, seed=seed)
        assert found["log"].seen == plain["log"].seen


SAVED = """
@op(reads=["envs", "agent.params"], writes=["envs"], kind="step", attributes={"step": {"env": "envs", "action": "agent"}})
def collect(agent, envs): ...

@op(reads=["agent.params", "envs"], writes=["@agent.params"], results=0, calls=["optimizer"])
def train(agent, envs, x): ...

@op(reads=["agent.params"], writes=[])
def holds(agent): ...

@op(reads=["host"], writes=["host"], results=0, attributes={"saves": "held"})
def save(held, log): ...

def iterations(n, *, agent, envs, log):
    for it in training(0, n, 1):
        x = collect(agent, envs)
        held = holds(agent) @ facts(alias=["agent.params"])
        save(held, log)
        train(agent, envs, x)
        yield ()
    return n
"""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)


def write(held: Any, log: Counted) -> None:
    file = io.BytesIO()
    torch.save(held, file)
    log.seen.append(float(torch.load(io.BytesIO(file.getvalue()))["w"]))


FILES: dict[str, Callable[..., Any]] = {
    **BIND,
    "holds": lambda agent: agent.state_dict(),
    "save": write,
}


def files() -> dict[str, Any]:
    return {"agent": Net(), "envs": Counted(), "log": Counted()}


def test_a_file_is_written_as_its_parts_were_while_they_are_trained() -> None:
    plain = files()
    program = parse(SAVED, bind=FILES)
    assert copying(program)
    interp.run(program, [4], plain)
    history = PassManager([Versions(), Overlap()], verify=2).run(program, CONTEXT)
    assert [r.pass_name for r in history.remarks.applied()] == ["versions", "overlap"]
    order = {op_of(n).name: s.order for n in program.nodes() if is_call(n) and (s := facts.get(n).slot)}  # fmt: skip
    assert order["freeze"] < order["save"] < order["train"]
    for seed in range(4):
        found = files()
        slots.run(program, [4], found, seed=seed)
        assert found["log"].seen == plain["log"].seen
        assert float(found["agent"].w) == float(plain["agent"].w)


WHOLE = SAVED.replace('        held = holds(agent) @ facts(alias=["agent.params"])\n', "")
WHOLE = WHOLE.replace("save(held, log)", "save(agent, log)").replace(
    'reads=["host"], writes=["host"], results=0, attributes={"saves": "held"}',
    'reads=["agent", "host"], writes=["host"], results=0, attributes={"saves": "agent"}',
)


@pytest.mark.parametrize(
    ("text", "frozen"),
    [
        (WHOLE, True),
        (WHOLE.replace('"agent", "host"]', '"agent", "@agent.params", "host"]'), False),
        (WHOLE.replace('"agent", "host"]', '"agent", "@envs", "host"]'), False),
        (WHOLE.replace('"agent", "host"]', '"agent", "log.held", "host"]'), False),
        (WHOLE.replace('writes=["host"], results=0, att', 'writes=["host", "agent"], results=0, att'), False),
    ],
)  # fmt: skip
def test_a_module_is_saved_whole_as_it_was(text: str, frozen: bool) -> None:
    def put(agent: Any, log: Counted) -> None:
        file = io.BytesIO()
        torch.save(agent, file)
        log.seen.append(file.getvalue())

    bound = {**FILES, "save": put}
    plain = files()
    interp.run(parse(text, bind=bound), [4], plain)
    program = parse(text, bind=bound)
    history = PassManager([Versions(), Overlap()], verify=2).run(program, CONTEXT)
    made = [n for n in program.nodes() if is_call(n, FREEZE)]
    assert len(made) == frozen, history.remarks
    for node in made:  # so that no update may go in front of it
        assert "agent" in [e.state for e in Dependences(program).effects(node)]
    for seed in range(4):
        found = files()
        slots.run(program, [4], found, seed=seed)
        assert found["log"].seen == plain["log"].seen


SAVE = "        save(held, log)\n"
LATER = {
    "made behind the first": '        later = holds(agent) @ facts(alias=["agent.params"])\n        save(later, log)\n',
    "the same twice": SAVE,
    "behind an update": "        train(agent, envs, x)\n" + SAVE,
}


@pytest.mark.parametrize("name", LATER)
def test_each_of_two_files_is_written_as_its_parts_were_there(name: str) -> None:
    text = SAVED.replace(SAVE, SAVE + LATER[name])
    plain = files()
    interp.run(parse(text, bind=FILES), [3], plain)
    program = parse(text, bind=FILES)
    PassManager([Versions(), Overlap()], verify=2).run(program, CONTEXT)
    assert sum(is_call(n, FREEZE) for n in program.nodes()) == 2
    for seed in range(3):
        found = files()
        slots.run(program, [3], found, seed=seed)
        assert found["log"].seen == plain["log"].seen
        assert float(found["agent"].w) == float(plain["agent"].w)


@pytest.mark.parametrize(
    "change",
    [  # a statement that looks at the policy, too, while it writes; one that does more than write
        ('reads=["host"], writes', 'reads=["host", "@agent.params"], writes'),
        (', attributes={"saves": "held"}', ""),
    ],
)
def test_a_file_of_what_is_read_otherwise_too_is_written_from_the_living(change: Any) -> None:
    program = parse(SAVED.replace(*change))
    history = PassManager([Versions()], verify=2).run(program, CONTEXT)
    assert [r.code for r in history.remarks.missed()] == ["effects-conflict"]
    assert not any(is_call(n, FREEZE) for n in program.nodes())


def test_what_a_file_holds_is_counted() -> None:
    for limit, kept in ((7.0, 0), (8.0, 1)):  # two copies of four bytes
        program = parse(SAVED, bind=FILES)
        program.objects.update(files())
        known = PassContext(options=COPIES, memory_limit=limit)
        history = PassManager([Versions()], verify=2).run(program, known)
        assert sum(is_call(n, FREEZE) for n in program.nodes()) == kept
        assert [r.code for r in history.remarks.missed()] == ["memory-limit"][kept:]
    program = parse(SAVED, bind=FILES)
    program.objects.update(files(), agent=Net().to("meta"))
    history = PassManager([Versions()], verify=2).run(program, CONTEXT)
    assert [r.code for r in history.remarks.missed()] == ["unsupported-shape"]
