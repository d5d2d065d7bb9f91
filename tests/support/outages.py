"""Something that goes away and comes back, again and again, while others work."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.faults.proxy import FaultProxy
from tests.support.target import TargetProcess

JOIN_S = 30.0


class Outages:
    """Calls ``strike`` and ``mend`` in turn, in a thread: up for ``up_s`` or up to half more, then
    down for ``down_s``. ``count``: how often it struck."""

    def __init__(
        self, strike: Callable[[], None], mend: Callable[[], None], up_s: float, down_s: float
    ) -> None:
        self._strike = strike
        self._mend = mend
        self._up_s = up_s
        self._down_s = down_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outages", daemon=True)
        self.count = 0
        self.failure: BaseException | None = None

    def _run(self) -> None:
        chance = random.Random(1)
        try:
            while not self._stop.wait(self._up_s * (1 + chance.random() / 2)):
                self._strike()
                self.count += 1
                self._stop.wait(self._down_s)
                self._mend()
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Outages:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure


class Restarted:
    """A target process that is killed, and a successor on its port."""

    def __init__(self, target: TargetProcess, start: Callable[[str], TargetProcess]) -> None:
        self.target = target
        self._start = start

    def kill(self) -> None:
        self.target.kill()

    def start(self) -> None:
        self.target = self._start(self.target.listen)


@contextmanager
def one_portal_at_a_time(
    portals: tuple[FaultProxy, FaultProxy], up_s: float, down_s: float
) -> Iterator[Outages]:
    """Each of the two in turn is killed and comes back."""
    turn = 0

    def strike() -> None:
        portals[turn].refuse()
        portals[turn].cut()

    def mend() -> None:
        nonlocal turn
        portals[turn].admit()
        turn = 1 - turn

    with Outages(strike, mend, up_s, down_s) as outages:
        yield outages
