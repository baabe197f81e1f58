"""What importing the package, or a public name of it, leaves alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import rose_compiler


def test_a_name_that_is_imported_when_first_used_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import random, numpy\nthing = random.random(), numpy.random.rand()\n"
    (tmp_path / "draws_at_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(rose_compiler._PUBLIC, "thing", "draws_at_import")
    kept = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        wanted = random.random(), np.random.rand()  # noqa: NPY002
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        assert rose_compiler.__getattr__("thing") == wanted, "drawn while it was imported"
        assert (random.random(), np.random.rand()) == wanted  # noqa: NPY002
    finally:
        vars(rose_compiler).pop("thing", None)
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
