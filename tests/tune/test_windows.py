"""Windows: where activity is low, on which level, what runs, what could fit."""

from __future__ import annotations

from rose_compiler.base.profile import Activity, OpTime, Profile, Span, Timeline, Window
from rose_compiler.ir.parse import parse
from rose_compiler.tune.fits import Fits
from rose_compiler.tune.windows import Windows, find_windows, loop_runs, loop_times


def trips(path: tuple[str, ...], *ends: float, start: float = 0.0) -> tuple[Span, ...]:
    starts = (start, *ends)
    return tuple(
        Span("/".join(path), "", a, b, trip=(k,), path=path)
        for k, (a, b) in enumerate(zip(starts, ends, strict=False))
    )


# two trips of act (one core of two) and step (two cores), then an update that sleeps
TIMELINE = Timeline(
    spans=(
        Span("roll/act", "", 0.0, 1.0, path=("roll",), label="act"),
        Span("roll/step", "", 1.0, 3.0, path=("roll",), label="step"),
        Span("roll/act", "", 3.0, 4.0, path=("roll",), label="act"),
        Span("roll/step", "", 4.0, 6.0, path=("roll",), label="step"),
        Span("save", "", 6.0, 8.0, label="save"),
    ),
    loops=trips(("roll",), 3.0, 6.0),
    activity=(
        Activity(0.0, 1.0, "cpu", 0.5),
        Activity(1.0, 3.0, "cpu", 1.0),
        Activity(3.0, 4.0, "cpu", 0.5),
        Activity(4.0, 5.5, "cpu", 1.0),
        Activity(5.5, 6.0, "cpu", 0.5),
        Activity(6.0, 6.5, "cpu", 0.25),
        Activity(6.5, 8.0, "cpu", 0.0, resident=False),
    ),
)
PROFILE = Profile("two cores", (8.0,), timeline=TIMELINE)


def test_windows_lie_on_their_loop_s_level() -> None:
    found = find_windows(PROFILE, least_s=0.25)
    assert [(w.start_s, w.end_s, w.path, w.level, w.trip) for w in found] == [
        (0.0, 1.0, ("roll",), 1, (0,)),
        (3.0, 4.0, ("roll",), 1, (1,)),
        (5.5, 6.0, ("roll",), 1, (1,)),
        (6.0, 6.5, (), 0, ()),
        (6.5, 8.0, (), 0, ()),
    ]
    assert [w.running for w in found] == [("act",), ("act",), ("step",), ("save",), ("save",)]


def test_nothing_resident_is_told_from_few_busy() -> None:
    found = find_windows(PROFILE, least_s=0.25)
    assert [w.idle for w in found] == [False, False, False, False, True]
    assert [w.activity for w in found] == [0.5, 0.5, 0.5, 0.25, 0.0]
    assert (found[1].before, found[1].after) == ("step", "step")


def test_short_windows_and_busy_stretches_are_left_out() -> None:
    assert len(find_windows(PROFILE, least_s=0.75)) == 3
    assert [w.start_s for w in find_windows(PROFILE, threshold=0.4, least_s=0.1)] == [6.0, 6.5]
    assert len(find_windows(Profile("m", (1.0,)))) == 0


def test_a_window_ends_where_a_long_operation_does() -> None:
    spans = (Span("a", "", 0.0, 1.0), Span("b", "", 1.0, 1.1), Span("c", "", 1.1, 2.1))
    timeline = Timeline(spans, activity=(Activity(0.0, 2.1, "cpu", 0.5),))
    found = find_windows(Profile("m", (2.1,), timeline=timeline), least_s=0.5)
    assert [(w.start_s, w.end_s) for w in found] == [(0.0, 1.0), (1.0, 2.1)]
    assert found[1].running == ("c", "b")


def test_runs_of_an_inner_loop_are_told_apart() -> None:
    inner = tuple(
        Span("o/i", "", t, t + 1, trip=trip, path=("o", "i"))
        for t, trip in ((0.0, (0, 0)), (1.0, (0, 1)), (3.0, (1, 0)), (4.0, (1, 1)))
    )
    timeline = Timeline(loops=(*inner, *trips(("o",), 2.5, 5.5)))
    runs = [(r.path, r.start_s, r.end_s) for r in loop_runs(timeline)]
    assert runs == [(("o", "i"), 0.0, 2.0), (("o",), 0.0, 5.5), (("o", "i"), 3.0, 5.0)]
    assert loop_times(timeline) == {"o/i": 2.0, "o": 5.5}


def test_windows_print_as_a_table_by_kind() -> None:
    text = str(find_windows(PROFILE, least_s=0.25))
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert any("roll" in r and "act" in r and "2 │ 1000.00" in r for r in rows), text
    assert "nothing resident" in text
    assert "4.5 of 8.0 s" not in text
    assert "4500.0 of 8000.0 ms lie in windows" in text
    assert str(Windows((), 1.0)) == "no windows of low activity"


def test_labels_are_printed_as_they_are() -> None:
    window = Window(0.0, 0.5, "cpu", 0.5, running=("roll[t] = x",), fits=("y[bold]",))
    text = str(Windows([window], 1.0))
    assert "roll[t] = x" in text
    assert "y[bold]" in text


def test_devices_are_told_apart_where_there_are_several() -> None:
    both = Windows(
        [Window(0.0, 0.5, "cpu", 0.5, running=("a",)), Window(0, 1, "cuda:0", 0, running=("a",))],
        1.0,
    )
    text = " ".join(str(both).split())
    assert "device" in text.split("windows", 2)[1]
    assert "cpu: 500.0 of 1000.0 ms lie in windows" in text
    assert "cuda:0: 1000.0 of 1000.0 ms lie in windows" in text
    assert "device" not in str(both[:1]).split("where")[0]


def test_what_is_little_is_only_counted() -> None:
    many = Windows(
        [Window(0.0, 0.5, "cpu", 0.5, running=("a",)), Window(1, 1.001, "cpu", 0, running=("b",))],
        1.0,
    )
    assert "1 sorts with 1.0 ms not shown" in " ".join(str(many).split())


def test_windows_survive_json() -> None:
    window = find_windows(PROFILE, least_s=0.25)[0]
    assert Window.from_dict(window.to_dict()) == window


TEXT = """
@op(reads=["params"], writes=[])
def act(obs, params): ...

@op(reads=["params"], writes=[])
def critic(obs, params): ...

@op(kind="step", reads=["env"], writes=["env"])
def step(action, env): ...

@op(reads=[], writes=["roll[t]"])
def put(roll, t, value): ...

@op(reads=["roll"], writes=["params"])
def update(roll, params): ...

def ppo(obs0, *, params, env, roll):
    for t, obs in rollout(0, 8, 1, obs=obs0):
        a = act(obs, params)
        v = critic(obs, params)
        put(roll, t, v)
        r = step(a, env)
        yield r
    done = update(roll, params)
    return rollout.obs
"""


def test_only_independent_work_of_the_right_length_fits() -> None:
    profile = Profile(
        "m",
        (1.0,),
        (
            OpTime("rollout/a", 8, 0.010, 0.01, label="act", path=("rollout",)),
            OpTime("rollout/v", 8, 0.002, 0.01, label="critic", path=("rollout",)),
            OpTime("rollout/put", 8, 1e-6, 0.01, label="put", path=("rollout",)),
            OpTime("rollout/r", 8, 0.005, 0.01, label="step", path=("rollout",)),
            OpTime("done", 1, 0.001, 0.01, label="update"),
        ),
    )
    fits = Fits(parse(TEXT), profile)
    # the action is needed by the step and too long; the update needs the whole loop
    assert fits(("rollout",), ("rollout/r",), 0.006) == ("critic",)
    assert fits(("rollout",), ("rollout/r",), 0.001) == ()
    assert fits(("rollout",), ("rollout/a",), 0.020) == ("critic",)
    assert fits((), ("done",), 0.020) == ()
    assert fits(("rollout",), ("unknown",), 0.020) == ()
