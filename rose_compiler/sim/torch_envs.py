"""Simulators written as tensor code, whose step a compiler can inline and trace.

A step rebinds ``self.state`` and its counters to new tensors and never writes into a tensor that
was handed out; it has no branch on data and draws no random numbers. Environments are independent
rows. An episode that ends is restarted within the same step (gymnasium's same-step autoreset):
``info["final_obs"]`` holds the observations before restarts, ``info["_final_obs"]`` the mask.

Restarts take their noise from a bank drawn when the whole batch is reset: the k-th restart of
environment i since then uses row ``k % bank`` of column i. So a step costs no draw, and its
numbers do not depend on how the steps of several environments are interleaved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class TorchSimulator:
    """Base of the simulators in this module.

    A subclass defines :meth:`observe`, :meth:`advance`, the number of state variables and how far
    a restart spreads around :attr:`origin`.

    ``num_envs``: batch size N. ``limit``: steps after which an episode is truncated.
    ``generator``: source of restart noise, on the simulator's device; None draws from torch's
    global one. ``bank``: restarts of an environment before its noise repeats.
    """

    #: State variables, observation entries and action entries of one environment.
    state_dim: int
    obs_dim: int
    act_dim: int

    def __init__(
        self,
        num_envs: int,
        *,
        limit: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        bank: int = 32,
    ) -> None:
        if num_envs < 1 or limit < 1 or bank < 1:
            raise ValueError("num_envs, limit and bank must be at least 1")
        self.num_envs = num_envs
        self.limit = limit
        self.dtype = dtype
        self.device = torch.device(device)
        self.generator = generator
        self.bank = bank
        self.rows = torch.arange(num_envs, device=self.device)
        self.reset()

    def reset(self, *, seed: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Start all episodes anew: (observations (N, obs_dim), empty infos).

        Draws one bank of restart noise. ``seed`` seeds the simulator's generator first.

        Raises ``ValueError`` for a seed without a generator of its own.
        """
        if seed is not None:
            if self.generator is None:
                raise ValueError("reset(seed=...) needs a simulator built with generator=...")
            self.generator.manual_seed(seed)
        noise = torch.rand(
            (self.bank, self.num_envs, self.state_dim),
            dtype=self.dtype,
            device=self.device,
            generator=self.generator,
        )
        self.starts = self.start(noise)
        self.state = self.starts[0].clone()
        self.steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.restarts = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return self.observe(self.state), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """One step with actions (N, act_dim) in [-1, 1]; values beyond are clipped.

        Returns (observations (N, obs_dim), rewards (N,), terminated (N,), truncated (N,), infos).
        """
        state, reward, terminated = self.advance(self.state, actions.clamp(-1.0, 1.0))
        steps = self.steps + 1
        truncated = (steps >= self.limit) & ~terminated
        done = terminated | truncated
        restarts = self.restarts + done
        fresh = self.starts[restarts % self.bank, self.rows]
        final_obs = self.observe(state)
        self.state = torch.where(done[:, None], fresh, state)
        self.steps = torch.where(done, 0, steps)
        self.restarts = restarts
        infos = {"final_obs": final_obs, "_final_obs": done}
        return self.observe(self.state), reward, terminated, truncated, infos

    def get_state(self) -> dict[str, Tensor]:
        """Everything that later steps depend on, as copies."""
        return {
            "state": self.state.clone(),
            "steps": self.steps.clone(),
            "restarts": self.restarts.clone(),
            "starts": self.starts.clone(),
        }

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Continue from what :meth:`get_state` returned."""
        self.state = state["state"].clone()
        self.steps = state["steps"].clone()
        self.restarts = state["restarts"].clone()
        self.starts = state["starts"].clone()

    def start(self, noise: Tensor) -> Tensor:
        """First states of episodes from uniform noise in [0, 1), both (..., state_dim)."""
        raise NotImplementedError

    def observe(self, state: Tensor) -> Tensor:
        """Observations (N, obs_dim) of states (N, state_dim)."""
        raise NotImplementedError

    def advance(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Next states (N, state_dim), rewards (N,) and terminations (N,)."""
        raise NotImplementedError


class TorchCartPole(TorchSimulator):
    """A pole balanced on a cart that a continuous force pushes; the pole starts upright.

    State and observation: cart position (m), velocity (m/s), pole angle from upright (rad),
    angular velocity (rad/s). Action: force in units of 10 N. Reward 1 a step; the episode
    terminates beyond 2.4 m or 12 degrees. Equations of motion: Florian, "Correct equations for
    the dynamics of the cart-pole system" (2007), without friction, semi-implicit Euler of 0.02 s.
    """

    state_dim = 4
    obs_dim = 4
    act_dim = 1

    gravity = 9.8
    mass_cart = 1.0
    mass_pole = 0.1
    half_length = 0.5
    force = 10.0
    dt = 0.02
    max_position = 2.4
    max_angle = 12 * 2 * math.pi / 360

    def __init__(self, num_envs: int, *, limit: int = 500, **kwargs: Any) -> None:
        super().__init__(num_envs, limit=limit, **kwargs)

    def start(self, noise: Tensor) -> Tensor:
        """Every state variable uniform in [-0.05, 0.05)."""
        return 0.1 * noise - 0.05

    def observe(self, state: Tensor) -> Tensor:
        """The state itself, copied."""
        return state.clone()

    def advance(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the equations of motion."""
        position, velocity, angle, spin = state.unbind(1)
        total = self.mass_cart + self.mass_pole
        sin, cos = torch.sin(angle), torch.cos(angle)
        push = self.force * actions[:, 0]
        swing = (push + self.mass_pole * self.half_length * spin * spin * sin) / total
        inertia = self.half_length * (4.0 / 3.0 - self.mass_pole * cos * cos / total)
        spin_rate = (self.gravity * sin - cos * swing) / inertia
        velocity_rate = swing - self.mass_pole * self.half_length * spin_rate * cos / total
        velocity = velocity + self.dt * velocity_rate
        spin = spin + self.dt * spin_rate
        position = position + self.dt * velocity
        angle = angle + self.dt * spin
        out = (position.abs() > self.max_position) | (angle.abs() > self.max_angle)
        return torch.stack([position, velocity, angle, spin], 1), torch.ones_like(push), out


class TorchPendulum(TorchSimulator):
    """A pendulum to be swung up by a bounded torque, starting anywhere.

    State: angle from upright (rad), angular velocity (rad/s). Observation: cosine and sine of the
    angle, angular velocity. Action: torque in units of 2 N m. Reward:
    ``-(angle² + 0.1 velocity² + 0.001 torque²)`` with the angle wrapped to [-π, π). Episodes end
    by truncation only. A uniform rod of 1 kg and 1 m: θ'' = 3g/(2l) sin θ + 3/(m l²) τ,
    semi-implicit Euler of 0.05 s.
    """

    state_dim = 2
    obs_dim = 3
    act_dim = 1

    gravity = 10.0
    mass = 1.0
    length = 1.0
    torque = 2.0
    max_speed = 8.0
    dt = 0.05

    def __init__(self, num_envs: int, *, limit: int = 200, **kwargs: Any) -> None:
        super().__init__(num_envs, limit=limit, **kwargs)

    def start(self, noise: Tensor) -> Tensor:
        """Angle uniform in [-π, π), velocity in [-1, 1)."""
        scale = torch.tensor([2 * math.pi, 2.0], dtype=self.dtype, device=self.device)
        return (noise - 0.5) * scale

    def observe(self, state: Tensor) -> Tensor:
        """Cosine and sine of the angle, angular velocity."""
        angle, speed = state.unbind(1)
        return torch.stack([torch.cos(angle), torch.sin(angle), speed], 1)

    def advance(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the equation of motion; the reward is that of the state before."""
        angle, speed = state.unbind(1)
        torque = self.torque * actions[:, 0]
        wrapped = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        reward = -(wrapped * wrapped + 0.1 * speed * speed + 0.001 * torque * torque)
        gravity = 1.5 * self.gravity / self.length * torch.sin(angle)
        rate = gravity + 3.0 / (self.mass * self.length**2) * torque
        speed = (speed + self.dt * rate).clamp(-self.max_speed, self.max_speed)
        angle = angle + self.dt * speed
        return torch.stack([angle, speed], 1), reward, torch.zeros_like(angle, dtype=torch.bool)
