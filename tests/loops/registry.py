"""Every script of this folder, in the order of the table that they make."""

from __future__ import annotations

from tests.loops import (
    actor_critic,
    callbacks,
    contexts,
    diffusion,
    dqn,
    hazards,
    lightning_like,
    lstm_ppo,
    masked,
    ppo_script,
    ppo_trainer,
    public_styles,
    recurrent_replay,
    soft_q,
    td3,
    vtrace,
    world_model,
)
from tests.loops.harness import Script

MODULES = (
    ppo_script,
    ppo_trainer,
    lstm_ppo,
    public_styles,
    dqn,
    td3,
    vtrace,
    diffusion,
    world_model,
    recurrent_replay,
    contexts,
    hazards,
    actor_critic,
    soft_q,
    callbacks,
    lightning_like,
    masked,
)
SCRIPTS: list[Script] = [script for module in MODULES for script in module.SCRIPTS]
