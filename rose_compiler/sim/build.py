"""Checking the shards of a :class:`ShardedEnv` and building them in their hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv

from rose_compiler.base.errors import fail
from rose_compiler.base.remarks import Remark
from rose_compiler.runtime.hosts import ProcessHost, ThreadHost
from rose_compiler.runtime.hosts.child import own_cores
from rose_compiler.runtime.hosts.process import abandon_all
from rose_compiler.sim.body import Body, BodyFactory, Traits
from rose_compiler.sim.hosted_shards import ThreadShard
from rose_compiler.sim.losses import TruncatingShard
from rose_compiler.sim.process_shard import ProcessShard
from rose_compiler.sim.shards import BaseShard, InlineShard
from rose_compiler.sim.shared_body import SharedBodyFactory


def checked(shards: Sequence[Any], hosts: str, recover: bool | str = False) -> list[Any]:
    """Check the list of shards before anything is built."""
    if recover not in (False, True, "truncate"):
        what, wanted = "ShardedEnv does not know how to recover so", 'True, False or "truncate"'
        raise fail("sim-shards", what, expected=wanted, found=f"recover={recover!r}")
    if recover and hosts != "process":
        what = "only shards in processes can be recovered"
        raise fail("sim-shards", what, expected='hosts="process"', found=f"hosts={hosts!r}")
    if hosts not in ("inline", "thread", "process"):
        raise fail(
            "sim-shards",
            "ShardedEnv does not know these hosts",
            expected='hosts="inline", "thread" or "process"',
            found=repr(hosts),
        )
    if callable(shards) or isinstance(shards, VectorEnv | str) or len(shards) == 0:
        raise fail("sim-shards", "ShardedEnv needs a list of shards", found=repr(shards))
    for i, item in enumerate(shards):
        if isinstance(item, list | tuple):
            wrong = [fn for fn in item if not callable(fn)]
            if wrong or not item:
                raise fail(
                    "sim-shards",
                    f"shard {i} is a list that can't be built",
                    expected="factories, each building one gymnasium.Env",
                    found=repr(wrong[0]) if wrong else "an empty list",
                )
        elif not callable(item) and (not hasattr(item, "num_envs") or hosts == "process"):
            raise fail(
                "sim-shards",
                f"shard {i} can't be placed in {hosts} hosts",
                expected="a factory or a list of factories"
                + ("" if hosts == "process" else ", or a vector environment"),
                found=f"a {type(item).__name__}",
            )
    return list(shards)


def check_alike(traits: Sequence[Traits], mode: AutoresetMode | None) -> None:
    """Raise ``ConfigError`` unless the shards have the same spaces and autoreset mode."""
    first = traits[0]
    for i, other in enumerate(traits):
        for what, mine, theirs in (
            ("observation space", first.single_observation_space, other.single_observation_space),
            ("action space", first.single_action_space, other.single_action_space),
            (
                "autoreset mode",
                first.metadata.get("autoreset_mode") if mode is None else mode,
                other.metadata.get("autoreset_mode"),
            ),
        ):
            if mine != theirs:
                raise fail(
                    "sim-shards",
                    f"shard {i} has another {what} than the rest",
                    expected=mine,
                    found=theirs,
                )


def sizes(count: int, shards: int) -> list[int]:
    """How many environments each shard has when ``count`` are split evenly."""
    if not 1 <= shards <= count:
        raise fail(
            "sim-shards",
            f"{count} environments can't be split into {shards} shards",
            expected=f"1 to {count} shards",
        )
    small, larger = divmod(count, shards)
    return [small + (i < larger) for i in range(shards)]


def inline(factories: Sequence[BodyFactory]) -> list[BaseShard]:
    """Build the shards in the caller's thread."""
    shards: list[BaseShard] = []
    offset = 0
    for i, factory in enumerate(factories):
        body = factory()
        body.place(offset)
        traits = body.traits()
        shards.append(InlineShard(f"shard {i}", traits, offset, body))
        offset += traits.num_envs
    return shards


def in_threads(factories: Sequence[BodyFactory], timeout: float | None) -> list[BaseShard]:
    """Build the shards in a thread each, at the same time."""
    shards: list[BaseShard] = []
    hosts = []
    offset = 0
    try:
        for i, factory in enumerate(factories):
            hosts.append(ThreadHost(factory, name=f"shard {i}", timeout=timeout))
        for host in hosts:
            host.ready()
        for i, host in enumerate(hosts):
            traits: Traits = host.call("traits")
            host.call("place", offset)
            shard: BaseShard
            if traits.native_async:
                # it steps in workers of its own, so that a thread would only add a hand-off
                body: Body = host.call("keep")
                host.close()
                shard = InlineShard(f"shard {i}", traits, offset, body)
            else:
                shard = ThreadShard(f"shard {i}", traits, offset, host)
            shards.append(shard)
            offset += traits.num_envs
    except BaseException:
        for host in hosts:
            host.abandon()
        raise
    return shards


def in_processes(
    factories: Sequence[BodyFactory],
    timeout: float | None,
    start_timeout: float | None,
    environment: dict[str, str] | None,
    recover: bool | str,
    remarks: list[Remark],
) -> list[BaseShard]:
    """Build the shards in a process each, at the same time; with ``recover`` a new process takes
    over from one that ends, and ``remarks`` tell of it."""
    hosts: list[ProcessHost] = []
    makers: list[Callable[..., ProcessHost]] = []
    shards: list[BaseShard] = []
    offset = 0
    try:
        for i, factory in enumerate(factories):
            again = partial(
                ProcessHost,
                SharedBodyFactory(factory),
                name=f"shard {i}",
                timeout=timeout,
                environment=environment,
                cores=own_cores(),
                start_timeout=start_timeout,
            )
            hosts.append(again())
            makers.append(again)
        for host in hosts:
            host.ready()
        for i, host in enumerate(hosts):
            traits = host.call("traits")
            place = f"shard {i}", traits, offset, host, makers[i]
            shard: ProcessShard
            if recover == "truncate":
                shard = TruncatingShard(*place, remarks)
            else:
                shard = ProcessShard(*place)
                if recover:
                    shard.recover(remarks)
            shards.append(shard)
            offset += traits.num_envs
    except BaseException:
        abandon_all(hosts)
        raise
    return shards
