"""A store that is a LUN of another target.

Reads, writes and flushes of the target are begun and ended in the loop that both sides share. The
target's data buffer is the one that is advertised to the other target. An operation of one command
has no task, no thread and no coroutine: it is the waiter of that command, and a strand ends all
whose answers came together. What takes more (flushes, retries) is a strand each. All else comes
from the target's threads, and waits there.

All initiators share the session with the other target. Their operations have them as owners, and
take turns, also those that come from threads: one initiator that floods does not keep out the
others.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import trio
from outcome import Error, Outcome, Value

from iserblk.commands.command import Command, Waiter
from iserblk.disk.seam import EXTENT_HOLE, DirectDisk, Rest
from iserblk.errors import CommandError, CommandTimeout, IserblkError, NotSupported
from iserblk.gateway.statuses import internal_error, status_error
from iserblk.loop.nap import Nap
from iserblk.loop.strands import Strands, park
from iserblk.loop.tasks import sleep
from iserblk.target.store.store import OWNER, Ended, Extent, OnLoss, no_loss

log = logging.getLogger(__name__)

T = TypeVar("T")
SIZES_S = 10.0  # between two questions for the size: not all targets tell that it has changed

_READ: Final = 0
_WRITE: Final = 1
_FLUSH: Final = 2
_NOTHING: Final = memoryview(b"")


class _Operation:
    """One read, write or flush, and at once the waiter of its command. ``owner``: see ``owner_of``.
    ``slot``: while it has that command."""

    __slots__ = (
        "buffer",
        "durable",
        "ended",
        "kind",
        "offset",
        "owner",
        "pending",
        "slot",
        "store",
    )

    def __init__(
        self,
        store: DiskStore,
        kind: int,
        owner: object,
        ended: Ended,
        buffer: memoryview = _NOTHING,
        offset: int = 0,
        durable: bool = False,
    ) -> None:
        self.store = store
        self.kind = kind
        self.owner = owner
        self.ended = ended
        self.buffer = buffer
        self.offset = offset
        self.durable = durable
        self.pending = 0
        self.slot: Command | None = None

    def task_done(self) -> None:
        """Implements Waiter, for one command."""
        self.pending -= 1
        if not self.pending:
            self.store.answered(self)


class DiskStore:
    """Implements LoopStore. ``group``: of its strands. ``nursery``: of its tasks. ``close`` may be
    called from a thread; the owner of the disk waits for ``closing``, then calls ``end``, and
    ``finish`` when the disk has ended."""

    def __init__(self, disk: DirectDisk, group: Strands, nursery: trio.Nursery) -> None:
        self.disk = disk
        self.size = disk.size
        self.on_loss: OnLoss = no_loss  # not called: losses come with the flushes
        self.batch_ended: Callable[[], None] = lambda: None
        # Looks whether the remote LUN says other things of itself than before. Its owner sets it.
        self.look: Callable[[], None] = lambda: None
        self.closing = trio.Event()
        self._closed = trio.Event()
        self.failure: IserblkError | None = None  # of the flush at the end
        self._group = group
        self._nursery = nursery
        self._answered: list[_Operation] = []  # whose command has ended since the last turn
        self._over: list[tuple[_Operation, OSError | None]] = []  # that a strand has ended
        self._settling: set[trio.CancelScope] = set()
        self._turns: set[trio.Event] = set()  # of strands for threads; set when they have ended
        self._woken = self._ended = self._hurried = False
        self._ending = Nap()
        self._token = trio.lowlevel.current_trio_token()  # for threads of any kind
        self._strand = group.start_soon(self._on_answers, name="gateway")
        self._strand.abandon = self._abandon

    # -- operations in the loop -------------------------------------------------------------------

    def begin_read(self, buffer: memoryview, offset: int, owner: object, ended: Ended) -> object:
        operation = _Operation(self, _READ, owner, ended, buffer, offset)
        operation.slot = self.disk.begin_read(buffer, offset, operation)
        if operation.slot is None:
            self._carry_out_soon(operation, None, "gateway: read")
        return operation

    def begin_write(
        self, data: memoryview, offset: int, durable: bool, owner: object, ended: Ended
    ) -> object:
        operation = _Operation(self, _WRITE, owner, ended, data, offset, durable)
        if not durable:
            operation.slot = self.disk.begin_write(data, offset, operation)
        if operation.slot is None:
            self._carry_out_soon(operation, None, "gateway: write")
        return operation

    def begin_flush(self, owner: object, ended: Ended) -> object:
        operation = _Operation(self, _FLUSH, owner, ended)
        self._carry_out_soon(operation, None, "gateway: flush")
        return operation

    def give_up(self, operation: object) -> None:
        """Abort its command at the remote target. What has no single command ends by itself, at its
        deadline at the latest."""
        assert isinstance(operation, _Operation)
        if operation.slot is not None and operation.pending:
            self.disk.abandon(lambda waiter: waiter is operation)

    def answered(self, operation: _Operation) -> None:
        self._answered.append(operation)
        self._ending.wake()
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._strand.wake()

    async def _on_answers(self) -> None:
        """Body of the strand. What the target begins because of the answers leaves together."""
        while not self._ended:
            await park()
            self._woken = False
            held = self.disk.begin_batch()
            try:
                answered, self._answered = self._answered, []
                for operation in answered:
                    self._end(operation)
                over, self._over = self._over, []
                for operation, problem in over:
                    _tell(operation, problem)
                self.batch_ended()
            finally:
                self.disk.end_batch(held)

    def _end(self, operation: _Operation) -> None:
        """The command of an operation has ended."""
        slot, operation.slot = operation.slot, None
        try:
            assert slot is not None  # ``begin_…`` set it
            end = self.disk.end_read if operation.kind == _READ else self.disk.end_write
            rest = end(slot)
        except IserblkError as error:
            _tell(operation, status_error(error))
            return
        except Exception:
            log.exception("internal error of the gateway")
            _tell(operation, internal_error())
            return
        if rest is not None and not self._group.closing:
            self._carry_out_soon(operation, rest, "gateway: again")
        else:
            _tell(operation, None if rest is None else internal_error())

    def _carry_out_soon(self, operation: _Operation, rest: Rest | None, name: str) -> None:
        self._group.start_soon(self._carry_out, operation, rest, name=name, owner=operation.owner)

    async def _carry_out(self, operation: _Operation, rest: Rest | None) -> None:
        """Body of a strand. ``rest``: of one that has begun already."""
        disk = self.disk
        problem: OSError | None = None
        try:
            if operation.kind == _READ:
                await disk.read_into(operation.buffer, operation.offset, rest)
            elif operation.kind == _WRITE:
                await disk.write(operation.buffer, operation.offset, operation.durable, rest)
            else:
                await disk.flush()
        except IserblkError as error:
            problem = status_error(error)
        except Exception:
            log.exception("internal error of the gateway")
            problem = internal_error()
        self._over.append((operation, problem))
        self._wake()

    async def _abandon(self, _waiter: object) -> None:
        """The strands are being closed because one has failed. Abort the commands, and wait until
        they have ended: before that no buffer is free."""
        ended = len(self._answered) + self.disk.abandon(self._is_mine)
        while len(self._answered) < ended:
            await self._ending.sleep()
        for operation in self._answered:
            self._end(operation)
        self.batch_ended()

    def _is_mine(self, waiter: Waiter) -> bool:
        return isinstance(waiter, _Operation) and waiter.store is self

    # -- what has ended, but may not be over ------------------------------------------------------

    def settle(self, ended: Callable[[], None]) -> None:
        self._nursery.start_soon(self._settle, ended)

    def hurry(self) -> None:
        self._hurried = True
        for scope in self._settling:
            scope.cancel()

    async def _settle(self, ended: Callable[[], None]) -> None:
        """Send a command that changes nothing, until the remote target answers it. It answers on a
        connection that has outlived all commands that ended before, or that has taken the place of
        theirs; and then the login has ended at the target what was left of them."""
        with trio.CancelScope() as scope:
            self._settling.add(scope)
            while not self._hurried:
                try:
                    await self.disk.refresh()
                except CommandTimeout:
                    continue  # still away
                except CommandError:
                    break  # this is an answer, too
                except IserblkError as error:
                    log.warning("the remote LUN is lost: %s", error)
                    break
                break
        self._settling.discard(scope)
        ended()
        self.batch_ended()

    # -- Store, for threads -----------------------------------------------------------------------

    def _wait(self, function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        try:
            return trio.from_thread.run(
                self._in_turn,
                OWNER.get(),
                partial(function, *arguments),
                trio_token=self._token,
            )
        except IserblkError as error:
            raise status_error(error) from None

    async def _in_turn(self, owner: object, function: Callable[[], Awaitable[T]]) -> T:
        """Run ``function`` as a strand, so that its commands take the turns of ``owner``."""
        outcome: list[Outcome[T]] = []
        ended = trio.Event()

        async def body() -> None:
            try:
                outcome.append(Value(await function()))
            except NotSupported as error:
                self.look()  # the remote LUN has refused what it said it can
                outcome.append(Error(error))
            except Exception as error:
                outcome.append(Error(error))
            finally:
                ended.set()

        if not self._group.closing:
            self._turns.add(ended)
            self._group.start_soon(body, name="gateway: thread", owner=owner)
            await ended.wait()
            self._turns.discard(ended)
        if not outcome:  # a strand has failed, and all were closed, perhaps before they began
            raise internal_error()
        value: T = outcome[0].unwrap()  # (outcome 1.2 has no types)
        return value

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        if nowait:
            return False
        self._wait(self.disk.read_into, buffer, offset)
        return True

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        if nowait:
            return False
        self._wait(self.disk.write, data, offset, durable)
        return True

    def flush(self) -> None:
        self._wait(self.disk.flush)

    def unmap(self, offset: int, length: int) -> None:
        self._wait(self.disk.trim, offset, length)

    def punch(self, offset: int, length: int) -> None:
        self._wait(partial(self.disk.zero, offset, length, may_trim=True))

    def zero(self, offset: int, length: int) -> None:
        self._wait(self.disk.zero, offset, length)

    def extents(self, offset: int, length: int, limit: int) -> list[Extent]:
        found = self._wait(self.disk.extents, offset, length)
        return [(start, count, not flags & EXTENT_HOLE) for start, count, flags in found[:limit]]

    def prefetch(self, offset: int, length: int) -> None:
        self._wait(self.disk.cache, offset, length)

    def usage(self) -> tuple[int, int] | None:
        return None

    def measure(self) -> int:
        self.size = max(self.size, self.disk.size)
        return self.size

    async def watch_size(self) -> None:
        """Body of a task: ask for the size from time to time; ``disk`` remembers it. Also look at
        what the LUN says of itself, which may be something else after a reconnection."""
        while True:
            await sleep(SIZES_S)
            try:
                await self.disk.refresh()
            except IserblkError as error:
                log.debug("the size is the last one known: %s", error)
            self.look()

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, log out and end the session. Only from a thread. Raises OSError if the flush has
        failed."""
        trio.from_thread.run(self._close, trio_token=self._token)

    async def _close(self) -> None:
        self.closing.set()
        await self._closed.wait()
        if self.failure is not None:
            raise status_error(self.failure)

    def end(self) -> None:
        """Let the strand end: no operation is under way any more."""
        self._ended = True
        self._wake()

    def finish(self) -> None:
        """The disk has ended, and so have all strands: no thread waits any longer."""
        self._closed.set()
        for ended in self._turns:
            ended.set()


def _tell(operation: _Operation, problem: OSError | None) -> None:
    try:
        operation.ended(problem)
    except Exception:  # a bug, which must not stop other operations
        log.exception("internal error of the gateway")
