"""A shard in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from time import perf_counter
from typing import Any

from rose_compiler.base import phases
from rose_compiler.base.errors import fail
from rose_compiler.base.remarks import Remark
from rose_compiler.runtime.hosts import ProcessHost
from rose_compiler.runtime.hosts.child import bind_process
from rose_compiler.runtime.hosts.host import within
from rose_compiler.runtime.hosts.tape import ENDS
from rose_compiler.sim import layout
from rose_compiler.sim.body import Traits
from rose_compiler.sim.hosted_shards import HostedShard, Told
from rose_compiler.sim.restarts import Asked, ShardTape
from rose_compiler.sim.shard_vector import BodyResult
from rose_compiler.sim.shared_body import END, TIMED, SharedView

_LOST = (
    "rose: the state of these environments was in that process and is lost; with `recover=True` a "
    "new process takes over, for environments that have get_state and set_state"
)


class ProcessShard(HostedShard):
    """A shard in a process of its own: arrays in shared memory, messages for the rest."""

    rose_threads = 1

    def __init__(
        self,
        name: str,
        traits: Traits,
        offset: int,
        host: ProcessHost,
        again: Callable[..., ProcessHost],
    ) -> None:
        super().__init__(name, traits, offset)
        self._again = again
        self._tape: ShardTape | None = None
        self._asked: Asked | None = None  # the step or reset under way, if it is on the tape
        self._attach(host)

    def _attach(self, host: ProcessHost) -> None:
        self.host: ProcessHost = host
        traits = self.traits
        plan = layout.Layout.of(
            traits.single_observation_space, traits.single_action_space, traits.num_envs
        )
        memory, _ = host.share("attach", plan.size, plan, self.offset)
        self._view = SharedView(memory, plan, layout.Tree(traits.single_observation_space))

    def batch_wrappers(self, on: bool) -> None:
        """Let the environments' wrappers advance at once from now on, or one by one."""
        self._view.at_once[0] = on

    # -- steps and resets --------------------------------------------------------------------------

    def _begin(self, actions: Any) -> None:
        if hasattr(actions, "detach"):  # a tensor would make the process load torch
            actions = actions.detach().cpu().numpy()
        self._ask(lambda: self._step(actions), "step", actions)

    def _step(self, actions: Any) -> None:
        self._view.clock[END] = 0.0  # what it says is of this step, or of none that has ended
        if not self._view.fits(actions):
            self._ticket = self.host.submit("step_with", actions)
            return
        changed = self._view.put_actions(actions)
        if changed is not None:
            self.host.submit("actions_are", *changed)
        self._ticket = self.host.submit("step")

    def _finish(self) -> BodyResult:
        message = self._answer()  # which may give the shard another view
        return self._view.result(message)

    def _begin_reset(self, seed: Any, options: dict[str, Any] | None, mask: Any) -> None:
        begin = super()._begin_reset
        self._ask(lambda: begin(seed, options, mask), "reset", seed, options, mask)

    def _finish_reset(self) -> tuple[Any, Any]:
        message = self._answer()
        return self._view.obs(message)

    def invoke(self, method: str, *args: Any) -> Any:
        """Call a method of the body in its process."""
        tape = self._tape
        if tape is None:
            return self.host.call(method, *args)
        entry = tape.asks(method, *args)
        try:
            value = self._until_answered(tape, entry, lambda: self._call(entry))
        finally:
            entry.waiting = False  # Ctrl-C leaves it running: the process has been asked
        if method == "batchable":  # which changes nothing
            tape.drop(entry)
        return value

    def _call(self, entry: Asked) -> Any:
        return self.host.wait(self.host.submit_dumped(entry.payload, entry.method))

    # -- the end of the process, and another one ---------------------------------------------------

    def recover(self, remarks: list[Remark]) -> None:
        """Have a new process take over from one that ends or hangs; remarks say so. Raises
        ``ConfigError`` (``sim-recover``) for environments that can't hand over their state."""
        why = self.host.call("why_no_state")
        if why is not None:
            what = f"{self.name} can't be brought back after the end of its process: {why}"
            raise fail("sim-recover", what)
        self._tape = ShardTape(self, remarks)

    def renew(self) -> None:
        """A new process, in which the environments are built anew."""
        timed, at_once = self.is_timed, bool(self._view.at_once[0])
        self.host.kill()
        self.host = host = self._again()
        host.ready()
        with within(host, self._again_s):
            self._attach(host)
        self.timed(timed)
        self.batch_wrappers(at_once)

    def restore(self, state: Any) -> None:
        """Let the new process go on from this state."""
        with within(self.host, self._again_s):
            self.host.call("set_state", state)

    def repeat(self, entry: Asked) -> None:
        """Ask the new process once more: what is still waited for is only begun."""
        with within(self.host, self._again_s):
            self._repeat(entry)

    def _repeat(self, entry: Asked) -> None:
        method = entry.method
        if method == "step":
            self._step(entry.actions)
        elif method == "reset":
            self._ticket = self.host.submit_dumped(entry.payload, method)
        elif not entry.waiting:  # who waits for its answer asks by himself
            self._call(entry)
        if entry.waiting or method not in ("step", "reset"):
            return
        assert self._ticket is not None
        message = self.host.wait(self._ticket)
        if method == "step":
            self._view.result(message)  # both sides learn how infos are packed
        else:
            self._view.obs(message)

    def _ask(self, begin: Callable[[], None], method: str, *args: Any) -> None:
        tape, self._asked = self._tape, None
        if tape is None:
            begin()
            return
        entry = tape.asks(method, *args)
        try:
            begin()
        except ENDS as error:
            self._revive(tape, error)  # which begins it again
        except BaseException:  # it has not begun, and nobody waits for it
            tape.drop(entry)
            raise
        self._asked = entry

    def _answer(self) -> Any:
        if self._tape is None or self._asked is None:
            return self._wait()
        return self._until_answered(self._tape, self._asked, self._wait)

    def _until_answered(self, tape: ShardTape, entry: Asked, wait: Callable[[], Any]) -> Any:
        while True:
            try:
                value = wait()
            except ENDS as error:
                self._revive(tape, error)
            except Exception:
                tape.drop(entry)
                raise
            else:
                entry.waiting = False
                return value

    def _revive(self, tape: ShardTape, error: BaseException) -> None:
        if not self._revives:
            raise error
        tape.revive(error)
        if self._until is not None and self._again_s is not None:
            self._until = perf_counter() + self._again_s  # the time for the step begins anew

    def _note(self, error: BaseException) -> None:
        super()._note(error)
        if self._tape is None and isinstance(error, ENDS):
            error.add_note(_LOST)

    @property
    def pid(self) -> int:
        """The process of the environments."""
        return self.host.pid

    def rose_limit(self, cores: Collection[int] | None, threads: int | None) -> bool:
        """Bind the process to these cores, and one that takes over, for quotas; it has one thread
        that computes. Raises ``OSError`` if the system refuses."""
        if cores is not None:
            self._again = partial(self._again, cores=frozenset(cores))
            bind_process(self.pid, cores)
        return True

    @property
    def is_timed(self) -> bool:
        """Whether steps are timed from now on."""
        return bool(self._view.clock[TIMED])

    def timed(self, on: bool) -> None:
        """Let the process time its steps from now on, or not; not while one is under way."""
        clock = self._view.clock
        clock[END], clock[TIMED] = 0.0, float(on)

    def told(self) -> Told | None:
        """What is known of the last step; None where it was not timed."""
        _, start, end, cpu, named = self._view.clock.tolist()
        return (start, end, cpu, int(named)) if end else None

    def phases(self) -> list[phases.Ended]:
        """The named phases in the last step, if it was timed; before the next begins."""
        told = self.told()
        return list(self.host.call("phases")) if told is not None and told[3] else []
