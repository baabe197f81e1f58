"""Every script of this folder, in the order of the table that they make."""

from __future__ import annotations

from tests.loops import lstm_ppo, ppo_script, ppo_trainer
from tests.loops.harness import Script

SCRIPTS: list[Script] = [
    script for module in (ppo_script, ppo_trainer, lstm_ppo) for script in module.SCRIPTS
]
