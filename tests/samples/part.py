"""A component for hosts that fails as it is told; quick to import in a worker."""

from __future__ import annotations

import os
import threading
from typing import Any


class Refusing(Exception):
    """Pickles well and does not unpickle."""

    def __init__(self, one: str, two: int) -> None:
        super().__init__(one)


class Part:
    """Every method fails in another way."""

    def lock(self) -> Any:
        return threading.Lock()

    def sleep(self) -> None:
        threading.Event().wait(60)

    def end(self) -> None:
        os._exit(3)

    def refuse(self) -> None:
        raise Refusing("a", 2)
