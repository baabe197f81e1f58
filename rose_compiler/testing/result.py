"""What the fuzzer's checks have in common: what a run found, and generated modules."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rose_compiler.passes.manager import History
from rose_compiler.testing.features import features_of_text
from rose_compiler.testing.functions import load


@dataclass
class Result:
    """What a run found. ``rewrites`` counts what passes did (``moves`` for reorderings), so that
    programs in which nothing could go wrong show; ``applied`` in how many programs each pass did
    something, ``features`` in how many each feature occurs. ``failure`` is the smallest one, as
    text."""

    kind: str
    programs: int = 0
    rewrites: Counter[str] = field(default_factory=Counter)
    applied: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    shown: str = ""  # the program under check

    def count(self, history: History) -> None:
        """Add what passes did to one program."""
        done = {name: n for name, n in history.rewrites.items() if n}
        self.rewrites.update(done)
        self.applied.update(done.keys())


Check = Callable[[Any, Result, Path], None]
_NUMBER = itertools.count()


def written(text: str, result: Result, folder: Path) -> ModuleType:
    """The module of a generated text, which the result shows from its first function on."""
    result.features.update(features_of_text(result.shown))
    return load(text, folder / f"{result.kind}_{next(_NUMBER)}.py")


def module_of(
    text: str, source: ModuleType, result: Result, folder: Path
) -> tuple[ModuleType, Callable[[], tuple[Any, ...]]]:
    """The module of a text with a function ``main``, and what makes arguments for it."""
    result.shown = text[text.index("def main") :]
    module = written(text, result, folder)
    return module, source.arguments(module)


def start_generators() -> None:
    """Every generator of the process from the same state."""
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 (the global generator is compared)
    random.seed(7)
