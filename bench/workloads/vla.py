"""A small vision-language-action policy: an instruction, a frame and joint angles in, a chunk of
actions out, by integrating a learned flow from noise (flow matching, Lipman et al. 2023) with noise
added in each step, so that the path has a likelihood (Flow-GRPO, Liu et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class VLAConfig:
    """`width` and `depth` of the vision transformer, pixels a `patch`, steps of the flow, entries
    of an action chunk."""

    width: int = 192
    depth: int = 10
    heads: int = 3
    patch: int = 21
    frame: int = 84
    prompt: int = 12
    joints: int = 6
    action: int = 12
    flow_steps: int = 4
    sigma: float = 0.15


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, width) to the same."""
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        hidden: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return hidden


class PromptEncoder(nn.Module):
    """Token numbers (rows, prompt) to (rows, prompt, width)."""

    def __init__(self, cfg: VLAConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, cfg.width)
        self.place = nn.Parameter(0.02 * torch.randn(cfg.prompt, cfg.width))
        self.blocks = nn.Sequential(*[Block(cfg.width, cfg.heads) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode."""
        encoded: Tensor = self.blocks(self.embed(tokens) + self.place)
        return encoded


class Vision(nn.Module):
    """Frames, joints and an encoded instruction to one context vector a row."""

    def __init__(self, cfg: VLAConfig) -> None:
        super().__init__()
        self.cfg = cfg
        patches = (cfg.frame // cfg.patch) ** 2
        self.patches = nn.Linear(3 * cfg.patch**2, cfg.width)
        self.joints = nn.Linear(cfg.joints, cfg.width)
        self.place = nn.Parameter(0.02 * torch.randn(patches + 1, cfg.width))
        self.blocks = nn.Sequential(*[Block(cfg.width, cfg.heads) for _ in range(cfg.depth)])
        self.norm = nn.LayerNorm(cfg.width)

    def forward(self, frame: Tensor, joints: Tensor, prompt: Tensor) -> Tensor:
        """(rows, 84, 84, 3) uint8, (rows, 6), (rows, prompt, width) to (rows, width)."""
        rows, p = frame.shape[0], self.cfg.patch
        side = self.cfg.frame // p
        pixels = frame.float() / 127.5 - 1.0
        cut = pixels.view(rows, side, p, side, p, 3).permute(0, 1, 3, 2, 4, 5)
        image = self.patches(cut.reshape(rows, side * side, 3 * p * p))
        own = torch.cat([image, self.joints(joints).unsqueeze(1)], 1) + self.place
        mixed = self.blocks(torch.cat([own, prompt], 1))
        context: Tensor = self.norm(mixed.mean(1))
        return context


class MiniVLA(nn.Module):
    """The policy."""

    def __init__(self, cfg: VLAConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.prompt_encoder = PromptEncoder(cfg)
        self.vision = Vision(cfg)
        self.flow = nn.Sequential(
            *(nn.Linear(cfg.action + cfg.width + 1, 256), nn.SiLU()),
            *(nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, cfg.action)),
        )

    def mean_of(self, x: Tensor, context: Tensor, k: int) -> Tensor:
        """Where step `k` of the flow leads from `x`, without its noise."""
        time = torch.full((x.shape[0], 1), k / self.cfg.flow_steps)
        velocity: Tensor = self.flow(torch.cat([x, context, time], 1))
        return x + velocity / self.cfg.flow_steps

    def sample(
        self, frame: Tensor, joints: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A chunk (rows, action), its path (rows, steps + 1, action), and its log-probability."""
        prompt = self.prompt_encoder(tokens)
        context = self.vision(frame, joints, prompt)
        x = torch.randn(context.shape[0], self.cfg.action)
        path = [x]
        log_prob = torch.zeros(context.shape[0])
        for k in range(self.cfg.flow_steps):
            noise = torch.randn_like(x)
            x = self.mean_of(x, context, k) + self.cfg.sigma * noise
            path.append(x)
            log_prob = log_prob + self.density(noise)
        return x, torch.stack(path, 1), log_prob

    def log_prob(self, frame: Tensor, joints: Tensor, tokens: Tensor, path: Tensor) -> Tensor:
        """Log-probabilities of paths, (rows,)."""
        prompt = self.prompt_encoder(tokens)
        context = self.vision(frame, joints, prompt)
        total = torch.zeros(path.shape[0])
        for k in range(self.cfg.flow_steps):
            mean = self.mean_of(path[:, k], context, k)
            total = total + self.density((path[:, k + 1] - mean) / self.cfg.sigma)
        return total

    def density(self, noise: Tensor) -> Tensor:
        """Log-density of a step of the flow from its noise (rows, action)."""
        norm = self.cfg.action * (math.log(self.cfg.sigma) + 0.5 * math.log(2 * math.pi))
        return -0.5 * noise.pow(2).sum(1) - norm
