"""What code asks of the frames around it: blocks of the user's statements have his names."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch

import rose_compiler

TOLD: list[Any] = []
LOG = logging.getLogger(__name__)


class Noting(logging.Handler):
    """Keeps what a formatter may show of where a record comes from."""

    def emit(self, record: logging.LogRecord) -> None:
        TOLD.append((record.funcName, record.lineno, record.pathname, record.getMessage()))


def caller() -> None:
    code = sys._getframe(1)
    TOLD.append((code.f_code.co_name, code.f_code.co_qualname, code.f_lineno))


def logged(text: str) -> None:
    LOG.warning(text, stacklevel=2)


class Trainer:
    """Logs in its iteration and in a helper that is inlined."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def report(self, loss: Any) -> None:
        LOG.warning("loss %.3f", float(loss.detach()))

    def noted(self, text: str) -> None:
        LOG.warning(text, stacklevel=2)

    def iteration(self, x: Any) -> Any:
        for k in range(2):
            loss = self.net(x).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            LOG.warning("trip %d", k)
            self.report(loss)
            caller()
            logged("by a helper")
            self.noted("by a method")
        LOG.warning("done")
        warnings.warn("now", stacklevel=1)
        return loss.detach()


def test_who_asks_is_told_the_users_function_and_line() -> None:
    handler = Noting()
    LOG.addHandler(handler)
    LOG.propagate = False
    told = []
    try:
        for compiled in (False, True):
            trainer = Trainer()
            fn = rose_compiler.compile(trainer.iteration, tune=False) if compiled else None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    (fn or trainer.iteration)(torch.ones(2, 3))
            TOLD.extend((w.filename, w.lineno) for w in caught)
            told.append(TOLD[:])
            TOLD.clear()
            if fn is not None:
                assert fn._last.unit.last is not None, "a schedule ran"
                fn.close()
    finally:
        LOG.removeHandler(handler)
        LOG.propagate = True
    assert {"iteration", "report"} <= {row[0] for row in told[0]}
    assert told[0] == told[1]
