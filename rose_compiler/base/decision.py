"""Which schedule to build: the options of the passes that a chooser tries, as plain frozen data.

A decision says nothing about legality. A pass that is asked for something illegal leaves it out
and says so in a remark; so any decision yields a program that trains the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from rose_compiler.base.errors import fail

Late = Literal["shadow", "inline"]
Lanes = Literal["native", "thread", "inline"]

_CHOICES: Mapping[str, tuple[str, ...]] = {"late": get_args(Late), "lanes": get_args(Lanes)}
_FLAGS = (
    *("defer", "fuse", "hosted", "overlap", "accumulate", "streams", "compile", "script"),
    "cuda_graphs",
    *("wrappers", "copies"),
)
#: Least values.
_COUNTS = {"groups": 0, "rollout_threads": 1, "update_threads": 1, "tiles": 0}


@dataclass(frozen=True)
class Pipelined:
    """One loop whose trips overlap.

    ``loop`` is its key: the names of the loops around it and its own, with slashes between.
    ``lanes`` is how many lanes there are beside the coordinator, ``micros`` what each operation of
    the loop's own body takes, by its name, in whole microseconds; one left out takes no time. The
    schedule follows from these alone, so that a decision gives the same one wherever it is used.
    """

    loop: str
    lanes: int
    micros: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        whole = isinstance(self.lanes, int) and not isinstance(self.lanes, bool) and self.lanes > 0
        if not isinstance(self.loop, str) or not self.loop or not whole:
            raise _malformed("pipeline", "a loop, and one lane or more", self)
        object.__setattr__(self, "micros", _pairs(self.micros, "pipeline", least=0))


@dataclass(frozen=True)
class Decision:
    """One point of the schedule space. The default is the program in its own order.

    ``groups``: into how many groups of neighbouring shards the batch of a stepping loop is cut; 0
    and 1 leave it whole. More groups than shards are as many as there are shards.
    ``late``: work that no later step waits for runs in the shadow of the simulator (``"shadow"``),
    or where it stands (``"inline"``).
    ``defer``: pure late work is collected over the loop and computed in one call behind it.
    ``lanes``: who runs a step: the simulator's own asynchronous step (``"native"``), a thread for
    each shard (``"thread"``), or the coordinator itself (``"inline"``).
    ``rollout_threads``, ``update_threads``: torch's intra-operation threads while a loop steps a
    simulator, and while a loop trains; ``None`` leaves them as the user set them.
    ``hosted``: calls of components in hosts run beside what does not need their results.
    ``overlap``: evaluations, checkpoints, logs and other work that no training waits for run on
    threads of their own, and so does one of two operations that do not need each other.
    ``accumulate``: in the first epoch, the gradient of a group is added up while the next group is
    collected; forwards over what was collected run in the loop that collects.
    ``streams``: where tensors live on a device with streams, work that the next step or update does
    not wait for, and each group of shards, is queued on streams of its own.
    ``copies``: evaluations that run beside the training read copies of the parameters, and
    checkpoints write such, so that they may go on beside the update too; only with ``overlap``.
    ``cores``: the cores of each lane, of the coordinator's too, as (lane, number) pairs: torch uses
    as many threads there, and the processes of hosts are bound to theirs; ``"shards"`` stands for
    those of all shards together. Who is not named is not bound.
    ``fuse``: optimizers that can step by one kernel for all parameters do so.
    ``compile``: a loss and its ``backward`` become one function that Inductor compiles, and so does
    each of the longest graphs that record no gradients.
    ``script``: what ``compile`` would compile, and does not, becomes one call of TorchScript that
    makes torch's own calls in the same order, without Python and the autograd engine between them;
    bits are the same.
    ``tiles``: with ``script``, a loss and its gradients are the sum of those of so many tiles of a
    minibatch's rows, which run beside each other on one thread each; 0 and 1 leave it whole.
    ``cuda_graphs``: what ``compile`` made on a CUDA device is captured as a CUDA graph and
    replayed, where that is faster.
    ``wrappers``: the wrappers of a simulator's environments advance all environments of a shard at
    once, where they are known to keep them apart.
    ``pipeline``: loops whose trips overlap over lanes, each with what its schedule is made from.
    """

    groups: int = 0
    late: Late = "inline"
    defer: bool = False
    lanes: Lanes = "native"
    rollout_threads: int | None = None
    update_threads: int | None = None
    fuse: bool = False
    hosted: bool = False
    overlap: bool = False
    accumulate: bool = False
    streams: bool = False
    copies: bool = False
    cores: tuple[tuple[str, int], ...] = ()
    compile: bool = False
    script: bool = False
    tiles: int = 0
    cuda_graphs: bool = False
    pipeline: tuple[Pipelined, ...] = ()
    wrappers: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cores", _pairs(self.cores))
        object.__setattr__(self, "pipeline", _pipelined(self.pipeline))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _malformed(name, " or ".join(map(repr, choices)), getattr(self, name))
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is None and name in ("rollout_threads", "update_threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise _malformed(name, f"a whole number, {least} or more", value)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _malformed(name, "true or false", getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote; anything else raises ``ConfigError`` (``config-decision``)."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise fail(
                "config-decision",
                f"a decision has no field {unknown[0]!r}",
                expected="some of " + ", ".join(sorted(known)),
                found=", ".join(sorted(data)),
            )
        return cls(**data)

    def save(self, path: str | Path) -> None:
        """Write the decision to a file as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote; raises ``ConfigError`` (``config-decision``)."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise fail(
                "config-decision", f"{path} can't be read as a decision", found=str(error)
            ) from error
        if not isinstance(data, dict):
            raise _malformed(str(path), "an object with the fields of a decision", data)
        return cls.from_dict(data)

    def __str__(self) -> str:
        """The fields that differ from the default, on one line."""
        default = type(self)()
        parts = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in ("cores", "pipeline")
            and getattr(self, f.name) != getattr(default, f.name)
        ]
        if self.cores:
            parts.append("cores=" + ",".join(f"{lane}/{count}" for lane, count in self.cores))
        if self.pipeline:
            loops = (f"{one.loop.replace('/', '.')}:{one.lanes}" for one in self.pipeline)
            parts.append("pipeline=" + ",".join(loops))
        return " ".join(parts) or "program order"


def _pipelined(found: Any) -> tuple[Pipelined, ...]:
    """Loops whose trips overlap, from JSON too."""
    try:
        made = tuple(one if isinstance(one, Pipelined) else Pipelined(**one) for one in found)
    except TypeError:
        raise _malformed("pipeline", "loops with their lanes", found) from None
    if len({one.loop for one in made}) != len(made):
        raise _malformed("pipeline", "each loop once", found)
    return made


def _pairs(cores: Any, name: str = "cores", least: int = 1) -> tuple[tuple[str, int], ...]:
    """Names and their numbers (lanes and their cores), from JSON too."""
    try:
        pairs = tuple((lane, count) for lane, count in cores)
    except (TypeError, ValueError):
        raise _malformed(name, "pairs of a name and a number", cores) from None
    lanes = [lane for lane, _ in pairs]
    whole = all(type(count) is int and count >= least for _, count in pairs)
    named = all(isinstance(lane, str) and lane for lane in lanes)
    if not whole or not named or len(set(lanes)) != len(lanes):
        raise _malformed(name, "pairs of a name, once each, and a number", cores)
    return pairs


def _malformed(name: str, expected: str, found: object) -> Exception:
    return fail(
        "config-decision",
        f"{name!r} of a decision has a value that it can't take",
        expected=expected,
        found=repr(found),
    )
