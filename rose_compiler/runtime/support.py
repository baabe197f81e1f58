"""What emitted code may call: ``rt``, one :class:`Runtime` a compiled function."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

import torch

from rose_compiler.base import phases
from rose_compiler.base.apart import Apart
from rose_compiler.base.drawn import after
from rose_compiler.base.errors import fail
from rose_compiler.base.faultmap import FaultMap
from rose_compiler.base.frozen import frozen
from rose_compiler.base.profile import Timeline
from rose_compiler.base.recurrence import Recurrence
from rose_compiler.base.spanlog import SpanLog
from rose_compiler.kernels import scan
from rose_compiler.kernels.scan_native import Built
from rose_compiler.runtime import buffers, faults, gradients, graphs, switching
from rose_compiler.runtime.events import DeviceThreadLane, StreamLane, Streams, TorchStreams
from rose_compiler.runtime.inductor import INDUCTOR, Forward, Note
from rose_compiler.runtime.lane_tiles import form_of
from rose_compiler.runtime.lanes import InlineLane, Lane, ThreadLane
from rose_compiler.runtime.modes import Unversioned
from rose_compiler.runtime.optimizers import Fused, why_not_fused
from rose_compiler.runtime.recovery import Finisher
from rose_compiler.runtime.remote import ComponentLane, HostLane, ShardLane
from rose_compiler.runtime.script import SCRIPT

#: Seconds that all lanes together get to come to rest after a fault; what runs longer is left
#: behind.
GRACE = 4.0
#: Seconds that each lane gets at the least, for what has ended to be taken in.
LEAST_S = 0.05


def _switch(env: Any) -> Any:
    return env if hasattr(env, "batch_wrappers") else None


class Runtime:
    """The executor of one compiled function: its lanes and how they are run.

    ``serial`` runs every lane in the coordinator, in issue order. ``timeout`` bounds each wait in
    seconds (``None``: no bound). ``threads`` is the number of torch's intra-operation threads in
    thread lanes. ``device`` and ``streams`` say what ``stream:`` lanes run on and threads issue to;
    ``hosts`` are bare hosts of ``host:`` lanes by name, other ``host:`` lanes run calls of hosted
    components. With ``trace``, each task leaves a span in ``timeline``. ``batching``
    finds what switches how the wrappers of a simulator's environments advance.
    """

    def __init__(
        self,
        *,
        serial: bool = False,
        timeout: float | None = None,
        threads: int | None = None,
        device: str | torch.device = "cpu",
        streams: Streams | None = None,
        hosts: dict[str, Any] | None = None,
        trace: bool = False,
        batching: Callable[[Any], Any] | None = None,
    ) -> None:
        self.serial = serial
        self.timeout = timeout
        self.threads = threads
        self.device = torch.device(device)
        self.streams = streams or TorchStreams(device)
        self._streams_given = streams is not None
        self.hosts = dict(hosts or {})
        self._lanes: dict[str, Lane] = {}
        self._lent: dict[str, Any] = {}  # streams of somebody's own, by lane
        self._spans: SpanLog | None = SpanLog() if trace else None
        self._hastened = False  # threads let each other run sooner
        self._under_way = False  # a run has lanes, and did not come to rest yet
        self._broken = False
        self._fused: list[Fused] = []
        self._batching = batching
        self._batched: dict[int, Any] = {}  # what switches them, by the id of a simulator
        self._graphs: dict[Forward, graphs.Graph] = {}
        self._losses: dict[Forward, gradients.Gradients] = {}
        #: What became of losses, graphs and recurrences that were to be compiled, newest last.
        self.notes: list[Note | Built] = []
        self.together = False  # several runs follow upon each other

    # Lanes.

    def lane(self, name: str) -> Lane:
        """The lane of this name; it is made the first time. The part before the colon says what
        kind it is: ``shard``, ``thread``, ``stream`` or ``host``.

        Raises ``ConfigError`` for another kind.
        """
        found = self._lanes.get(name)
        if found is None:
            found = self._lanes[name] = self._make(name)
            found.spans = self._spans
        self._under_way = True
        if not self._hastened and isinstance(found, ThreadLane | ShardLane):
            self._hastened = True
            switching.hasten(self)
        return found

    def on(self, device: str | torch.device) -> None:
        """Queue what lanes of kind ``stream`` run, and what threads issue, on streams of this
        device from now on, unless the runtime was made with streams of somebody's own."""
        found = torch.device(device)
        if self._streams_given or found == self.device:
            return
        for name in [n for n in self._lanes if n.partition(":")[0] in ("stream", "thread")]:
            self._lanes.pop(name).close()
        self.device, self.streams, self._lent = found, TorchStreams(found), {}

    def lend(self, streams: dict[str, Any]) -> None:
        """Queue what these lanes of kind ``stream`` run on these streams of the same device from
        now on, all others on their own. Between two runs only."""
        if streams == self._lent:
            return
        self._lent = streams
        for name, lane in self._lanes.items():
            if isinstance(lane, StreamLane):
                lane.stream = streams.get(name, lane.own)

    def _make(self, name: str) -> Lane:
        kind, _, rest = name.partition(":")
        if kind not in ("shard", "thread", "stream", "host"):
            raise fail(
                "config-argument",
                f"there is no lane {name!r}",
                expected="shard:…, thread:…, stream:… or host:…",
                found=repr(name),
            )
        if self.serial:
            return InlineLane(name)
        if kind == "shard":
            return ShardLane(name, threads=self.threads, timeout=self.timeout)
        if kind == "thread" and (self._streams_given or self.device.type != "cpu"):
            return DeviceThreadLane(name, self.streams, threads=self.threads, timeout=self.timeout)
        if kind == "thread":
            return ThreadLane(name, threads=self.threads, timeout=self.timeout)
        if kind == "stream":
            return StreamLane(name, self.streams, lent=self._lent.get(name))
        if rest not in self.hosts:
            return ComponentLane(name, timeout=self.timeout)
        return HostLane(name, self.hosts[rest], timeout=self.timeout)

    def drain(self) -> None:
        """Let every lane come to rest; called when a run ends, however it ends."""
        until = perf_counter() + GRACE if self._broken else None
        try:
            if not self.together or self._broken:
                self.apart()
            for lane in self._lanes.values():
                grace = self.timeout if until is None else _left(until)
                if until is None and isinstance(lane, ComponentLane):
                    grace = None  # a call has the lane's limit, and may be repeated after it
                lane.settle(grace)
                lane.failed.clear()
                lane.skipped.clear()
            self._under_way = False
        finally:
            self._relax()
            if self._broken:
                self.close()

    def rest(self) -> None:
        """What is left to do where Ctrl-C came as :meth:`drain` began, or within it: nothing runs
        on, and nothing is switched on. After any other end of a run that is nothing."""
        if self._under_way or self._fused or self._batched:
            self._broken = True
            self._settle_all()
            self.drain()

    def apart(self) -> None:
        """End what was switched on for a run, or for several one after the other."""
        self.together = False
        try:
            self._switch_off()
        except BaseException:  # Ctrl-C may have come in between
            self._switch_off()
            raise

    def _switch_off(self) -> None:
        for one in self._fused:
            one.restore()
        self._fused.clear()
        for one in self._batched.values():
            one.batch_wrappers(False)
        self._batched.clear()

    def close(self) -> None:
        """End every lane; a later run makes them anew."""
        lanes, self._lanes = self._lanes, {}
        self._broken = False
        self._relax()
        for lane in lanes.values():
            lane.close()

    def _relax(self) -> None:
        if self._hastened:
            switching.relax(self)
            self._hastened = False

    @contextmanager
    def recording(self) -> Iterator[SpanLog]:
        """Let every task inside the block leave a span in the log that it is given."""
        spans = SpanLog()
        before = self._spans
        self._watch(spans)
        try:
            with phases.recording(spans):
                yield spans
        finally:
            if before is not None:
                before.extend(spans)
            self._watch(before)

    def _watch(self, spans: SpanLog | None) -> None:
        self._spans = spans
        for lane in self._lanes.values():
            lane.spans = spans

    @property
    def timeline(self) -> Timeline:
        """What the lanes ran since the last :meth:`clear`, if ``trace`` was asked for."""
        return Timeline(tuple(self._spans or ()))

    def clear(self) -> None:
        """Forget the spans so far."""
        if self._spans is not None:
            self._spans.clear()

    # Faults.

    def fault(self, error: BaseException, faultmap: FaultMap) -> None:
        """Come to rest after ``error``, finish what comes before it in program order, and add notes
        to the exception that the run ends in.

        Returns if that is ``error`` itself, for the caller to raise on. Raises another one that
        comes before it in program order.
        """
        self._broken = True
        stuck = self._settle_all()
        lanes = tuple(self._lanes.values())
        tasks = [task for lane in lanes for task in lane.failed]
        lost = Counter(task.site for lane in lanes for task in (*lane.failed, *lane.skipped))
        for task in tasks:
            faults.apart(task.error, error)
        verdict = faults.earliest(error, tasks, faultmap)
        first = error
        if verdict is not None:
            finished: Counter[int] = Counter()
            if isinstance(error, Exception) and not stuck:
                for lane in lanes:
                    lane.failed.clear()
                    lane.skipped.clear()
                finisher = Finisher(verdict, faultmap)
                verdict, finished = finisher.run(), finisher.finished
            first = verdict.error
            faults.apart(first, error)
            for line in faults.notes(verdict, lost, finished, faultmap):
                first.add_note(f"rose: {line}")
        for name in stuck:
            first.add_note(
                f"rose: lane {name} did not come to rest in {self._grace:g} s; it was left"
            )
        if first is not error:
            faults.raise_as_it_was(first)

    @property
    def _grace(self) -> float:
        return GRACE if self.timeout is None else min(GRACE, self.timeout)

    def _settle_all(self) -> list[str]:
        stuck = []
        until = perf_counter() + self._grace  # of all together: lanes that hang must not add up
        for name, lane in tuple(self._lanes.items()):
            try:
                rests = lane.settle(_left(until))
            except Exception:  # whatever its host says: the error that is under way goes first
                rests = False
            if not rests:
                stuck.append(name)
                # its worker may never end; it must not be waited for again
                if isinstance(lane, ThreadLane | ShardLane):
                    lane.abandon()
                del self._lanes[name]
        return stuck

    # Values.

    def fuse(self, optimizer: Any) -> None:
        """Let an optimizer's steps run as fused kernels until the run ends, if they can."""
        if self.together and any(one.optimizer is optimizer for one in self._fused):
            return
        if why_not_fused(optimizer) is None:
            self._fused.append(Fused(optimizer))

    def batch_wrappers(self, env: Any) -> None:
        """Let the wrappers of a simulator's environments advance at once until the run ends."""
        if id(env) in self._batched:  # in an earlier of several runs
            return
        found = _switch(env) if self._batching is None else self._batching(env)
        if found is not None:
            found.batch_wrappers(True)
            self._batched[id(env)] = found

    def gradients(
        self,
        forward: Forward,
        *args: Any,
        recorded: tuple[int, ...] = (),
        replayed: bool = False,
        script: bool = False,
        tiles: int = 0,
        dropped: Any = None,
    ) -> Any:
        """Compute a loss and go backward from it, by what Inductor makes of ``forward``, or with
        ``script`` TorchScript: what ``loss, *others = forward(*args); loss.backward()`` does. The
        others, detached; those at the positions ``recorded`` with a graph that has been gone
        through. ``replayed``: as a CUDA graph, where that is faster. ``tiles``: by TorchScript, as
        a sum over so many tiles of rows beside each other, where that is faster. ``dropped`` says
        which gradients nobody reads."""
        found = self._losses.get(forward)
        if found is None:
            form = SCRIPT if script else INDUCTOR
            if script and tiles > 1:
                form = form_of(tiles)
            found = self._losses[forward] = gradients.of(forward, form)
        quiet = self.quiet if replayed else None
        return found(args, self.notes.append, quiet, dropped, recorded)

    def graph(
        self, forward: Forward, *args: Any, replayed: bool = False, script: bool = False
    ) -> Any:
        """What ``forward(*args)`` returns, by what Inductor makes of it, or with ``script``
        TorchScript, where that is faster. ``replayed``: as a CUDA graph, where that is faster
        still."""
        if any(type(a) is Apart for a in args):
            return forward(*args)
        found = self._graphs.get(forward)
        if found is None:
            form = SCRIPT if script else INDUCTOR
            found = self._graphs[forward] = graphs.of(inspect.unwrap(forward), form)
        return found(args, self.notes.append, self.quiet if replayed else None)

    def graph_of(
        self,
        forward: Forward,
        *,
        script: bool = False,
        sized: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> Callable[..., Any]:
        """:meth:`graph` as a function of the arguments, for a lane to call. ``sized`` gives what
        calls it only for sizes that it was proven for."""
        made = partial(self.graph, forward, script=script)
        return made if sized is None else sized(made)

    def quiet(self) -> bool:
        """Whether no lane of this process runs anything but the coordinator's own."""
        return not any(getattr(lane, "busy", False) for lane in self._lanes.values())

    @staticmethod
    def state(root: Any, path: str) -> Any:
        """The object at a dotted path below ``root``; a number picks an item of a container."""
        for part in path.split("."):
            root = _child(root, part)
        return root

    @staticmethod
    def shard(env: Any, index: int) -> Any:
        """Shard ``index`` of a simulator."""
        return env.shards()[index]

    @staticmethod
    def unbound(name: str) -> NoReturn:
        """Raise what reading an unassigned local variable raises."""
        raise UnboundLocalError(
            f"cannot access local variable '{name}' where it is not associated with a value",
            name=name,
        )

    @staticmethod
    def set_threads(count: int) -> int:
        """Set torch's intra-operation threads of this thread; how many there were."""
        before = torch.get_num_threads()
        if count != before:
            torch.set_num_threads(count)
        return before

    def scan(self, of: Recurrence, trips: scan.Trips, *args: Any) -> Any:
        """All trips of a recurrence at once; one after the other, by ``trips``, where ``args`` are
        not of the types and shapes for that. The final carried value, a tuple of several."""
        made = scan.whole(of, trips, args, self.notes.append)
        return made[0] if len(made) == 1 else made

    unversioned: Callable[[], Any] = Unversioned
    snapshot: Callable[[Any], Any] = staticmethod(buffers.snapshot)
    frozen: Callable[[Any], Any] = staticmethod(frozen)
    rows: Callable[[Any, int, int], Any] = staticmethod(buffers.rows)
    concat: Callable[..., Any] = staticmethod(buffers.concat)
    join_rows: Callable[..., Any] = staticmethod(buffers.join_rows)
    drawn: Callable[[Any, Any], Any] = staticmethod(after)
    split_rows: Callable[[Any, Any], Any] = staticmethod(buffers.split_rows)


def _left(until: float) -> float:
    return max(LEAST_S, until - perf_counter())


def _child(value: Any, name: str) -> Any:
    if isinstance(value, torch.nn.Module):
        for table in (value._modules, value._parameters, value._buffers):
            if name in table:
                return table[name]
        if name.isdecimal() and not hasattr(value, name):
            return value[int(name)]  # type: ignore[index]  # a container of modules
        return getattr(value, name)
    if name.isdecimal() and not hasattr(value, name):
        if isinstance(value, dict):
            return value[int(name)] if int(name) in value else value[name]
        return value[int(name)]
    if isinstance(value, dict) and name in value:
        return value[name]
    return getattr(value, name)
