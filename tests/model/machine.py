"""Targets that can crash, losing their cache or not: in a thread, or as a process of their own."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from iserblk.datamover.iser import HEADER_LENGTH
from iserblk.target.scsi.device import LogicalUnit
from iserblk.target.store.store import Extent
from iserblk.target.store.volatile import VolatileStore
from tests.model.trouble import TroubledDevice, Troubles
from tests.support.faults.proxy import FaultProxy
from tests.support.target import TargetProcess
from tests.support.target_here import serve
from tests.target.fake_store import FakeStore

IQN = "iqn.2026-11.example:disk"
CACHE = 512 << 10  # smaller than the disk, so that some of it is written back now and then
PATIENCE_S = 30.0
PAGE = 4096
_ZEROES = bytes(PAGE)


class Media(FakeStore):
    """The medium, which survives every crash. Keeps no log of calls. Pages of zeroes are holes.
    ``shown``: what reads see."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.shown = self.content
        self._losing: tuple[int, Callable[[], bool]] | None = None

    def _called(self, *call: object) -> None: ...

    @contextmanager
    def losing(self, lost: Callable[[], bool]) -> Iterator[None]:
        """In the body each change that this thread makes is lost if ``lost`` says so."""
        self._losing = threading.get_ident(), lost
        try:
            yield
        finally:
            self._losing = None

    def _is_lost(self) -> bool:
        losing = self._losing
        return losing is not None and losing[0] == threading.get_ident() and losing[1]()

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        return self._is_lost() or super().write(data, offset, durable, nowait)

    def zero(self, offset: int, length: int) -> None:
        if not self._is_lost():
            super().zero(offset, length)

    def punch(self, offset: int, length: int) -> None:
        if not self._is_lost():
            super().punch(offset, length)

    def extents(self, offset: int, length: int, limit: int) -> list[Extent]:
        found: list[Extent] = []
        for at in range(offset, offset + length, PAGE):
            count = min(PAGE, offset + length - at)
            is_data = self.shown[at : at + count] != _ZEROES[:count]
            if found and found[-1][2] == is_data:
                found[-1] = (found[-1][0], found[-1][1] + count, is_data)
            elif len(found) == limit:
                break
            else:
                found.append((at, count, is_data))
        return found


class Machine:
    """A target in a thread. ``url``: LUN 0 through ``proxy``. ``crash``, ``start`` and ``turn`` may
    be called from any thread."""

    def __init__(
        self,
        size: int,
        block: int,
        scheme: str,
        seed: object,
        cached: bool = True,
        turns: bool = False,
        header: int = HEADER_LENGTH,
    ) -> None:
        """``cached``: the target has a volatile write cache. ``turns``: the cache is off at first,
        and can be switched on and off. ``header``: bytes of the iSER header."""
        self.media = Media(size)
        self.block = block
        self.cached = cached
        self.write_cache = cached and not turns
        self.troubles = Troubles(seed)
        self._chance = random.Random(f"machine {seed}")
        self._cache = VolatileStore(self.media, CACHE) if cached else None
        self._header = header
        self._port = 0
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope: trio.CancelScope | None = None
        self.crashes = 0
        self.start()
        self.proxy = FaultProxy(("127.0.0.1", self._port))
        self.url = f"{scheme}://127.0.0.1:{self.proxy.port}/{IQN}/0"

    def start(self) -> None:
        ready = threading.Event()
        failure: list[BaseException] = []

        async def main() -> None:
            unit = LogicalUnit(
                self._cache or self.media,
                serial="MODEL",
                block=self.block,
                write_cache=self.write_cache,
            )
            self._unit = unit
            self._token = trio.lowlevel.current_trio_token()
            with trio.CancelScope() as self._scope:
                await serve(
                    f"127.0.0.1:{self._port}",
                    IQN,
                    {0: unit},
                    is_ready,
                    header=self._header,
                    make_device=device,
                )

        def device(*words: Any) -> TroubledDevice:
            self._device = TroubledDevice(self.troubles, *words)
            return self._device

        def is_ready(url: str) -> None:
            self._port = int(url.partition("://")[2].partition("/")[0].rpartition(":")[2])
            ready.set()

        def run() -> None:
            try:
                trio.run(main)
            except BaseException as error:
                failure.append(error)
                ready.set()

        self._thread = threading.Thread(target=run, name="target", daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S) and not failure, failure

    def crash(self, loses_cache: bool) -> None:
        """End the target in the middle of its commands. ``start`` brings it back."""
        assert self._token is not None and self._scope is not None and self._thread is not None
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.crashes += 1
        if loses_cache and self._cache is not None:
            # Some of the cache had been written back: a cache may do that at any time.
            with self.media.losing(lambda: self._chance.random() >= 0.3):
                self._cache.flush()
            self._cache = VolatileStore(self.media, CACHE)

    def turn(self) -> None:
        """Switch the write cache on or off while commands run."""
        assert self._token is not None
        trio.from_thread.run_sync(self._device.turn, self._unit, trio_token=self._token)
        self.write_cache = self._unit.write_cache

    def blink(self) -> None:
        """Lose the content of the write cache; connections stay."""
        assert self._token is not None

        def lose() -> None:
            if self._cache is not None:
                with self.media.losing(lambda: True):
                    self._cache.flush()
            self._device.reset()

        trio.from_thread.run_sync(lose, trio_token=self._token)

    def settle(self) -> None:
        """Make writes durable that began before the write cache was switched off."""
        if self._cache is not None and not self.write_cache:
            self._cache.flush()

    def close(self) -> None:
        self.crash(False)
        self.proxy.close()


class ProcessMachine:
    """A target that is a process of its own and is killed. With ``cached`` a crash that loses
    nothing is an orderly end; without, nothing is ever lost."""

    def __init__(self, place: Path, size: int, block: int, scheme: str, cached: bool) -> None:
        cache = f":volatile-cache={CACHE}" if cached else ":wce=0"
        self._spec = f"{place}/lun:size={size}:block={block}{cache}"
        self._log = place / "target.log"
        self.cached = self.write_cache = cached
        self.crashes = 0
        self._target = TargetProcess([self._spec], self._log)
        self.proxy = FaultProxy(("127.0.0.1", self._target.port))
        self.url = self.proxy.through(f"{self._target.url}/0").replace("iser:", f"{scheme}:")

    def start(self) -> None:
        self._target = TargetProcess([self._spec], self._log, self._target.listen)

    def crash(self, loses_cache: bool) -> None:
        self.crashes += 1
        if self.cached and not loses_cache:
            self._target.stop()
        else:
            self._target.kill()

    def close(self) -> None:
        self._target.stop()
        self.proxy.close()


AnyMachine = Machine | ProcessMachine


@contextmanager
def machine(
    size: int,
    block: int,
    scheme: str,
    seed: object,
    cached: bool = True,
    place: Path | None = None,
    turns: bool = False,
    header: int = HEADER_LENGTH,
) -> Iterator[AnyMachine]:
    """A target. ``place``: a directory, for a target that is a process; None: in a thread.
    ``turns``, ``header``: of one in a thread."""
    made: AnyMachine
    if place is None:
        made = Machine(size, block, scheme, seed, cached, turns, header)
    else:
        made = ProcessMachine(place, size, block, scheme, cached)
    try:
        yield made
    finally:
        made.close()
