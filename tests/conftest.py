"""What holds for every test: reproducible hypothesis runs, GPU tests only where there is a GPU."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# no test reads or writes the user's cache; those about it name a folder of their own
os.environ["ROSE_CACHE"] = "0"

# started in the background of a shell, this process ignores Ctrl-C, and those it starts would too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile(
    "rose",
    derandomize=True,  # the same examples on every run, so that a red test is red again
    deadline=None,  # the machine is shared; pytest-timeout bounds the whole test
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("rose")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch with a single thread, and what it had afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_finish() -> None:
    """The collector need not go through torch and all tests again and again: it took a sixth of the
    time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is let go at the end is looked at by those who bind other languages


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(no_device)
