"""Shards of simulators that are stepped one at a time or together: the smallest that can work."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import struct
import subprocess
import sys
from multiprocessing import shared_memory
from typing import Any

import numpy as np

OBS, ACT = 17, 6


def make_env(frame_skip: int = 5, gamma: float = 0.99) -> Any:
    import gymnasium as gym

    env = gym.make("HalfCheetah-v5", frame_skip=frame_skip)
    env.unwrapped.model.opt.timestep = 0.05 / frame_skip
    env = gym.wrappers.RecordEpisodeStatistics(env)
    env = gym.wrappers.ClipAction(env)
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(
        env, lambda obs: np.clip(obs, -10, 10), env.observation_space
    )
    env = gym.wrappers.NormalizeReward(env, gamma=gamma)
    return gym.wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))


def make_shard(n: int, frame_skip: int = 5) -> Any:
    import gymnasium as gym

    return gym.vector.SyncVectorEnv([lambda: make_env(frame_skip) for _ in range(n)])


class Views:
    def __init__(self, mem: Any, n: int) -> None:
        b, off = mem.buf, 0
        self.act = np.ndarray((n, ACT), np.float32, b, off)
        off += n * ACT * 4
        off += -off % 64
        self.obs = np.ndarray((n, OBS), np.float64, b, off)
        off += n * OBS * 8
        self.rew = np.ndarray((n,), np.float64, b, off)
        off += n * 8
        self.term = np.ndarray((n,), np.bool_, b, off)
        off += n
        self.trunc = np.ndarray((n,), np.bool_, b, off)
        self.size = off + n


def worker(name: str, n: int, seed: int, skip: int, rfd: int, wfd: int) -> None:
    mem = shared_memory.SharedMemory(name=name, track=False) if sys.version_info >= (3, 13) else (
        shared_memory.SharedMemory(name=name))
    v = Views(mem, n)
    env = make_shard(n, skip)
    obs, _ = env.reset(seed=seed)
    v.obs[:] = obs
    os.write(wfd, struct.pack("i", 0))
    while os.read(rfd, 1):
        obs, rew, term, trunc, infos = env.step(v.act)
        v.obs[:], v.rew[:], v.term[:], v.trunc[:] = obs, rew, term, trunc
        blob = pickle.dumps(infos, -1)
        os.write(wfd, struct.pack("i", len(blob)) + blob)


class ProcessShard:
    def __init__(self, n: int, seed: int, skip: int) -> None:
        self.mem = shared_memory.SharedMemory(create=True, size=n * 512 + 4096)
        self.v = Views(self.mem, n)
        r1, w1 = os.pipe()
        r2, w2 = os.pipe()
        code = f"from bench.handwritten_envs import worker; worker({self.mem.name!r},{n},{seed},{skip},{r1},{w2})"
        self.p = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=(r1, w2), stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=str(pathlib.Path(__file__).resolve().parents[1]),
        )
        os.close(r1)
        os.close(w2)
        self.r, self.w = r2, w1
        self.n = n

    def ready(self) -> np.ndarray:
        os.read(self.r, 4)
        return self.v.obs

    def submit(self, act: np.ndarray) -> None:
        self.v.act[:] = act
        os.write(self.w, b"s")

    def wait(self) -> tuple:
        head = os.read(self.r, 65536)
        size = struct.unpack("i", head[:4])[0]
        blob = head[4:]
        while len(blob) < size:
            blob += os.read(self.r, 65536)
        v = self.v
        return v.obs, v.rew, v.term, v.trunc, blob

    def close(self) -> None:
        os.close(self.w)
        self.p.wait(10)
        self.mem.close()
        with contextlib.suppress(FileNotFoundError):
            self.mem.unlink()


class InlineShard:
    def __init__(self, n: int, seed: int, skip: int) -> None:
        self.env = make_shard(n, skip)
        self.obs, _ = self.env.reset(seed=seed)

    def ready(self) -> np.ndarray:
        return self.obs

    def submit(self, act: np.ndarray) -> None:
        self.out = self.env.step(act)

    def wait(self) -> tuple:
        return self.out

    def close(self) -> None:
        self.env.close()


class PoolShard:
    def __init__(self, n: int, seed: int, threads: int) -> None:
        import envpool

        self.env = envpool.make(
            "HalfCheetah-v4", env_type="gymnasium", num_envs=n, num_threads=threads, seed=seed
        )
        self.obs, _ = self.env.reset()
        self.ids = np.arange(n, dtype=np.int32)

    def ready(self) -> np.ndarray:
        return self.obs

    def submit(self, act: np.ndarray) -> None:
        self.env.send(act.astype(np.float64), self.ids)

    def wait(self) -> tuple:
        return self.env.recv()

    def close(self) -> None:
        self.env.close()


class Shards:
    """Vector environment of independent shards."""

    def __init__(self, shards: list, sizes: tuple[int, ...]) -> None:
        self.shards = shards
        ends = np.cumsum(sizes).tolist()
        self.slices = [slice(e - n, e) for e, n in zip(ends, sizes, strict=True)]

    def reset(self) -> np.ndarray:
        return np.concatenate([s.ready() for s in self.shards])

    def step(self, act: np.ndarray) -> tuple:
        for s, k in zip(self.shards, self.slices, strict=True):
            s.submit(act[k])
        outs = [s.wait() for s in self.shards]
        obs, rew, term, trunc = (np.concatenate([o[i] for o in outs]) for i in range(4))
        infos = [pickle.loads(o[4]) if isinstance(o[4], bytes) else o[4] for o in outs]
        return obs, rew, term, trunc, merge(infos) if len(infos) > 1 else infos[0]

    def close(self) -> None:
        for s in self.shards:
            s.close()


def merge(infos: list[dict]) -> dict:
    out = {}
    for k in infos[0]:
        vals = [i.get(k) for i in infos]
        if isinstance(vals[0], dict):
            out[k] = merge(vals)
        elif all(isinstance(v, np.ndarray) for v in vals):
            out[k] = np.concatenate(vals)
    return out


def make_envs(simulator: str, hosts: str, sizes: tuple[int, ...], seed: int,
              skips: tuple[int, ...] = (), threads: int = 1) -> Shards:
    made, first = [], seed
    for i, n in enumerate(sizes):
        skip = skips[i] if skips else 5
        if simulator == "envpool":
            made.append(PoolShard(n, first, threads))
        elif hosts == "process":
            made.append(ProcessShard(n, first, skip))
        else:
            made.append(InlineShard(n, first, skip))
        first += n
    return Shards(made, sizes)
