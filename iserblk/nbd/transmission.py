"""The server's side of the NBD transmission phase, without I/O.

Requests are parsed where they arrived, and the data of small writes stays there; that of large ones
lands in a buffer of its own. Replies are lists of buffers, of which that of a read is one: the
header is packed directly in front of the data.

    get_buffers()   where the next bytes must land
    received(n)     the requests that are complete now
    reply(…)        one of them is done
    out, sent(n)    what is to be sent

The memory that requests take is bounded, by ``buffers``. Where there is none for the next one,
``get_buffers`` answers with none, and the client waits; ``resume`` goes on. What is counted is the
memory itself: the buffers of reads and large writes, whole intakes, in which small writes lie, and
room for the answer of a BLOCK_STATUS; and how many requests there are, as each has a command, or a
strand. A request is counted until its reply has been sent. Answers to what is refused at once are
MOST_REFUSALS at most; ``resume`` is to be called when they have been sent.

What comes is untrusted: ``received`` and ``resume`` raise RemoteProtocolError and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from iserblk.commands.command import Command
from iserblk.disk.seam import Extent
from iserblk.errors import RemoteProtocolError
from iserblk.nbd import messages as nbd
from iserblk.nbd.buffers import (
    GUARANTEED_REQUESTS,
    HEADROOM,
    INTAKE,
    KEPT_BYTES,
    LEAST,
    TOTAL_REQUESTS,
    Intake,
    Memory,
    size_of,
)
from iserblk.nbd.messages import Negotiated

SMALL: Final = 64 << 10  # bytes of a write's data that stays where it was received
MOST_REQUESTS: Final = 1024  # of a client, not answered
MOST_REFUSALS: Final = 256  # of a client, not sent
_MOST_IDLE: Final = 128  # requests that a client keeps to use them again
LEAST_MOVED: Final = 1 << 20  # bytes, from one call of ``hoards`` to the next
_STEP: Final = 4096  # bytes received behind the data of a large write: all of them are copied
_ROOM: Final = 8192  # with less room in an intake the next one is taken
_MOST_STATUS_PAYLOAD: Final = 256  # bytes
STATUS_COST: Final = nbd.MOST_EXTENTS * nbd.EXTENDED_EXTENT.size  # bytes of a large answer

# Transmission flags without which a flag of a command is refused.
_FLAG_OFFERS: Final = (
    (nbd.FLAG_FUA, nbd.SEND_FUA),
    (nbd.FLAG_DF, nbd.SEND_DF),
    (nbd.FLAG_FAST_ZERO, nbd.SEND_FAST_ZERO),
)

# In place of a command that has data which it should not have.
_NO_DATA: Final = -1
_NO_CONTEXT: Final = -2


class Answered(Protocol):
    """Hears of requests whose command has ended."""

    def answered(self, request: Request) -> None: ...

    def told(self, losses: int) -> None:
        """The answer to a flush that failed with so many losses has been sent."""
        ...


class Request:
    """One request, and at once the waiter of its command. ``owner``: see ``owner_of``.

    ``data``: for a READ the memory to be filled, for a WRITE what was received. ``buffer``: the
    request's own memory, with HEADROOM in front of the data; a small WRITE has its data in
    ``intake`` instead. ``reply``: of a READ the data, and room for the header in front of it.
    ``slot``: of its command, while that is under way. ``cost``: bytes of memory that it is counted
    with. ``losses``: of which the answer to a FLUSH tells.
    """

    __slots__ = (
        "buffer",
        "command",
        "cookie",
        "cost",
        "data",
        "flags",
        "intake",
        "length",
        "losses",
        "offset",
        "owner",
        "pending",
        "reply",
        "slot",
    )

    def __init__(self, owner: Answered) -> None:
        self.owner = owner
        self.command = nbd.READ
        self.flags = 0
        self.cookie = 0
        self.offset = 0
        self.length = 0
        self.cost = 0
        self.losses = 0
        self.data: memoryview = _NOTHING
        self.buffer: bytearray | None = None
        self.reply: memoryview = _NOTHING
        self.intake: Intake | None = None
        self.pending = 0
        self.slot: Command | None = None

    def task_done(self) -> None:
        """Implements Waiter, for one command."""
        self.pending -= 1
        if not self.pending:
            self.owner.answered(self)


_NOTHING: Final = memoryview(b"")


class _Refused:
    """A request that is refused, and answered when all its data has come. ``to_come``: bytes of
    that."""

    def __init__(self, to_come: int, cookie: int, offset: int, error: int, text: str) -> None:
        self.to_come = to_come
        self.cookie = cookie
        self.offset = offset
        self.error = error
        self.text = text


class _Progress:
    """``moved``: bytes that have moved from and to the client."""

    def __init__(self) -> None:
        self.moved = 0
        self._before = 0  # at the last call of ``is_slow``
        self._slow = 0  # calls in a row

    def is_slow(self, could_move: bool) -> bool:
        """Between the last two calls, and before, less than LEAST_MOVED has moved, though more
        could."""
        moved, self._before = self.moved - self._before, self.moved
        if moved < LEAST_MOVED and could_move:
            self._slow += 1  # the first time its turn may have come a moment ago
        else:
            self._slow = 0
        return self._slow > 1


class Transmission:
    """Of one connection. ``owner`` hears of its requests.

    ``out``: buffers to be sent, in order, ``out_size`` bytes. ``ended``: the client has said
    DISC, and nothing more is received. ``open``: requests that were handed to the caller, and whose
    replies have not been sent yet. ``held``: there is no room for the next request; ``starved``:
    because other clients have the memory. ``paused``: set by the caller, for as long as no request
    is to begin; one that has begun to come (``midway``) is received to its end.
    """

    def __init__(
        self, negotiated: Negotiated, owner: Answered, memory: Memory, first: bytes = b""
    ) -> None:
        """``first``: what came behind the handshake, for ``resume``. Raises RemoteProtocolError."""
        if len(first) > INTAKE:
            raise RemoteProtocolError("NBD", "requests before the handshake was over")
        self.negotiated = negotiated
        self.out: list[bytes | memoryview] = []
        self.out_size = 0
        self.ended = False
        self.held = self.starved = False
        self.paused = False
        self.open = 0
        self._owner = owner
        self._memory = memory
        self._used = 0  # bytes
        self._leaving: list[Request | None] = []  # whose memory the buffers of ``out`` are
        self._refusals = 0  # answers in ``out`` that belong to no request
        self._lost = False  # nothing is sent any more
        self._progress = _Progress()
        self._extended = negotiated.extended
        header = nbd.EXTENDED_REQUEST if self._extended else nbd.REQUEST
        self._unpack: Callable[..., Any] = (
            nbd.unpack_extended_request if self._extended else nbd.unpack_request
        )
        self._size = header.size
        self._magic = nbd.EXTENDED_REQUEST_MAGIC if self._extended else nbd.REQUEST_MAGIC
        # Where the header of a read's reply begins in its buffer.
        reply = (
            nbd.EXTENDED_DATA_CHUNK.size
            if self._extended
            else nbd.DATA_CHUNK.size
            if negotiated.structured
            else nbd.SIMPLE_REPLY.size
        )
        self._reply_at = HEADROOM - reply
        self._flags = _offered(negotiated)
        self._idle: list[Request] = []
        self._idle_reads: dict[int, list[Request]] = {}  # with their memory, by length
        self._intake = memory.intake()
        self._start = 0  # of what is not parsed yet
        self._end = 0
        self._large: Request | None = None  # a WRITE whose data is being received
        self._filled = 0  # bytes of it
        self._refused: _Refused | None = None  # the rest of its data is to come
        self._expect_large = False
        self._intake.view[: len(first)] = first
        self._end = len(first)

    # -- receiving --------------------------------------------------------------------------------

    def get_buffers(self) -> list[memoryview]:
        """Where the next bytes must land, in order: none while nothing more is to be received. They
        are valid until ``received``."""
        if self.held or self.ended:
            return []
        intake = self._intake
        if self._start == self._end and not intake.users:
            self._start = self._end = 0
        end = self._end
        large = self._large
        if large is not None:
            rest = large.data[self._filled :]
            return [rest, intake.view[end : end + _STEP]] if end < INTAKE else [rest]
        if self._start == end:
            enough = INTAKE - end >= _ROOM
        else:  # the request that has begun may be larger than what is left
            enough = INTAKE - self._start >= SMALL + nbd.EXTENDED_REQUEST.size
        if not enough:
            if not self._next_intake():
                return []
            intake, end = self._intake, self._end
        return [intake.view[end : end + (_STEP if self._expect_large else INTAKE)]]

    def _next_intake(self) -> bool:
        """The rest of what was received moves to the beginning of an intake that has room. False:
        there is no memory for another one."""
        before, rest = self._intake, self._end - self._start
        if before.users:
            # It stays as long as the writes in it, and is counted from now on.
            if not self._fits(INTAKE):
                return False
            self._intake = self._memory.intake()  # it may fail: first
            self._used += INTAKE
            self._memory.used += INTAKE
        self._intake.view[:rest] = before.view[self._start : self._end]
        self._start, self._end = 0, rest
        return True

    def received(self, count: int) -> list[Request]:
        """So many bytes are in the buffers, at least one. Returns the requests that are complete,
        with the memory that they need; refused ones have been answered. Raises RemoteProtocolError:
        what came with the breach is dropped, and nothing more is received."""
        self._progress.moved += count
        large = self._large
        if large is not None:
            into = min(count, large.length - self._filled)
            self._filled += into
            count -= into
        self._end += count
        return self.resume()

    def resume(self) -> list[Request]:
        """As ``received``, when memory has been given back."""
        found: list[Request] = []
        try:
            self._parse(found)
        except Exception:
            # Of a breach, or of a bug, or for want of memory: no caller will have heard of them.
            for request in found:
                self._release(request)
            self.ended = True
            raise
        return found

    def _parse(self, found: list[Request]) -> None:
        self.held = self.starved = False
        if self._large is not None and not self._end_large(found):
            return
        if self._refused is not None:
            self._pass_over(self._refused)
        if self.paused:
            return
        unpack, size, magic, data = self._unpack, self._size, self._magic, self._intake.data
        while not self.ended and self._end - self._start >= size:
            fields: nbd.RequestFields = unpack(data, self._start)
            got, flags, command, cookie, offset, length = fields
            if got != magic:
                raise RemoteProtocolError("NBD", f"a request begins with {got:#x}")
            # An extended WRITE has data also where it lacks the flag that it must have: a client
            # that forgets the flag does not forget the data.
            payload = length if command == nbd.WRITE else 0
            behind = 0  # bytes behind the header that go with it
            if self._extended and flags & nbd.FLAG_PAYLOAD_LEN:
                flags &= ~nbd.FLAG_PAYLOAD_LEN
                payload = length
                if command == nbd.BLOCK_STATUS and length <= _MOST_STATUS_PAYLOAD:
                    if self._end - self._start - size < length:
                        break  # it has not come yet
                    behind = length
                    length = self._status_length(self._start + size, behind)
                    if length < 0:
                        command = _NO_CONTEXT
                elif command not in (nbd.WRITE, nbd.DISC):
                    command = _NO_DATA
            if payload > nbd.MOST_PAYLOAD:
                raise RemoteProtocolError("NBD", f"a request with {payload} bytes of data")
            allowed = self._flags.get(command)
            if allowed is None or flags & ~allowed:
                if command == nbd.DISC:  # whatever its flags are, it has no answer
                    self.ended = True
                    break
                if not self._refuse_early(command, flags, cookie, offset, payload):
                    break
                continue
            if command == nbd.READ:
                if length > nbd.MOST_PAYLOAD:
                    if not self._refuse_long_read(cookie, offset):
                        break
                    continue
                cost = LEAST if length <= LEAST else size_of(length)
                if not self._fits(cost):
                    break
                idle = self._idle_reads.get(length)
                if idle:
                    request = idle.pop()
                    request.flags = flags
                    request.cookie = cookie
                    request.offset = offset
                    memory = self._memory
                    memory.kept -= cost
                    memory.open += 1
                    memory.used += cost
                    self.open += 1
                    self._used += cost
                else:
                    request = self._first_read(flags, cookie, offset, length, cost)
                self._start += size
                self._expect_large = False
            elif command == nbd.WRITE:
                written = self._begin_write(flags, cookie, offset, length)
                if written is None:
                    break  # there is no room, or the rest of its data comes next
                request = written
            elif command == nbd.DISC:
                self.ended = True
                break
            else:
                cost = STATUS_COST if command == nbd.BLOCK_STATUS else 0
                if not self._fits(cost):
                    break
                self._start += size + behind
                request = self._take(command, flags, cookie, offset, length, cost)
            found.append(request)

    def _end_large(self, found: list[Request]) -> bool:
        """Whether all data of the large WRITE has come."""
        large = self._large
        if large is None or self._filled < large.length:
            return False
        self._large = None
        self.open += 1
        found.append(large)
        return True

    def _refuse_long_read(self, cookie: int, offset: int) -> bool:
        """False: there is no room for an answer."""
        if not self._may_refuse():
            return False
        error = nbd.EOVERFLOW if self.negotiated.structured else nbd.EINVAL
        self._start += self._size
        self._answer_error(cookie, offset, error, f"at most {nbd.MOST_PAYLOAD} bytes")
        return True

    def _first_read(self, flags: int, cookie: int, offset: int, length: int, cost: int) -> Request:
        """A READ of a length of which no earlier READ has left its memory."""
        buffer = self._memory.buffer(cost)  # it may fail: first
        request = self._take(nbd.READ, flags, cookie, offset, length, cost)
        request.buffer = buffer
        request.data = memoryview(buffer)[HEADROOM : HEADROOM + length]
        request.reply = memoryview(buffer)[self._reply_at : HEADROOM + length]
        return request

    def _begin_write(self, flags: int, cookie: int, offset: int, length: int) -> Request | None:
        """Begin a WRITE whose header has come. None: it, or the rest of its data, comes later."""
        if length > SMALL:
            cost = size_of(length)
            if not self._fits(cost):
                return None
            buffer = self._memory.buffer(cost)
            request = self._take(nbd.WRITE, flags, cookie, offset, length, cost)
            return request if self._begin_large(request, buffer) else None
        begin = self._start + self._size
        if not self._fits(0) or self._end - begin < length:
            return None
        request = self._take(nbd.WRITE, flags, cookie, offset, length, 0)
        self._intake.users += 1
        request.intake = self._intake
        request.data = self._intake.view[begin : begin + length]
        self._start = begin + length
        self._expect_large = False
        return request

    @property
    def midway(self) -> bool:
        """The data of a WRITE is on its way into memory of its own, or is being passed over."""
        return self._large is not None or self._refused is not None

    def unparsed(self) -> bytes:
        """What has been received of requests that have not begun: at most INTAKE bytes, as
        ``first`` of another Transmission."""
        return bytes(self._intake.view[self._start : self._end])

    def _fits(self, cost: int) -> bool:
        """There is memory for a request of that cost; else ``held`` is set."""
        used = self._used + cost
        memory = self._memory
        if (used > memory.of_one and self._used) or self.open >= MOST_REQUESTS:
            self.held = True
        elif (used > memory.guaranteed and not memory.fits(cost)) or (
            memory.open >= TOTAL_REQUESTS and self.open >= GUARANTEED_REQUESTS
        ):
            self.held = self.starved = True
        return not self.held

    def _may_refuse(self) -> bool:
        """There is room for the answer to a request that is not carried out; else ``held`` is
        set."""
        if self._refusals >= MOST_REFUSALS:
            self.held = True
        return not self.held

    def _take(
        self, command: int, flags: int, cookie: int, offset: int, length: int, cost: int
    ) -> Request:
        request = self._idle.pop() if self._idle else Request(self._owner)
        request.command = command
        request.flags = flags
        request.cookie = cookie
        request.offset = offset
        request.length = length
        request.cost = cost
        self.open += 1
        self._used += cost
        memory = self._memory
        memory.open += 1
        memory.used += cost
        return request

    def _begin_large(self, request: Request, buffer: bytearray) -> bool:
        """Its data lands in a buffer of its own; what has come of it is moved there. Whether that
        is all."""
        length = request.length
        request.buffer = buffer
        request.data = memoryview(buffer)[HEADROOM : HEADROOM + length]
        begin = self._start + self._size
        here = min(self._end - begin, length)
        request.data[:here] = self._intake.view[begin : begin + here]
        self._start = begin + here
        self._expect_large = True
        if here == length:
            return True
        self._large, self._filled = request, here
        self.open -= 1  # until it is whole
        return False

    def _refuse_early(
        self, command: int, flags: int, cookie: int, offset: int, payload: int
    ) -> bool:
        """Pass over the data of a request that cannot be carried out, and answer it. False: no more
        may be answered now."""
        if not self._may_refuse():
            return False
        read_only = command in nbd.CHANGES and self.negotiated.flags & nbd.READ_ONLY
        if read_only:
            error, text = nbd.EPERM, "the export is read-only"
        elif command == nbd.BLOCK_STATUS and not self.negotiated.contexts:
            error, text = nbd.EINVAL, "no metadata context was selected"
        elif command == _NO_CONTEXT:
            error, text = nbd.EINVAL, "a metadata context that was not selected, or none"
        elif command == _NO_DATA:
            error, text = nbd.EINVAL, "data that does not go with the command"
        elif command not in nbd.FLAGS:
            error, text = nbd.EINVAL, f"unknown command {command}"
        elif command not in self._flags:
            error, text = nbd.EINVAL, f"the export has no command {command}"
        else:
            error, text = nbd.EINVAL, f"flags {flags:#x} do not go with command {command}"
        self._start += self._size
        # Not before the data has come: clients (libnbd) look for the request of an answer only
        # among those that they have sent whole.
        self._pass_over(_Refused(payload, cookie, offset, error, text))
        return True

    def _pass_over(self, refused: _Refused) -> None:
        count = min(refused.to_come, self._end - self._start)
        self._start += count
        refused.to_come -= count
        self._refused = refused if refused.to_come else None
        if not refused.to_come:
            self._answer_error(refused.cookie, refused.offset, refused.error, refused.text)

    def _status_length(self, begin: int, count: int) -> int:
        """The length that a BLOCK_STATUS with data asks for: it names the contexts that it wants.
        -1: it does not name the one that there is, once."""
        data = bytes(self._intake.view[begin : begin + count])
        wanted, rest = data[: nbd.STATUS_PAYLOAD.size], data[nbd.STATUS_PAYLOAD.size :]
        numbers = [rest[at : at + 4] for at in range(0, len(rest), 4)]
        if numbers != [nbd.CONTEXT_ID.pack(nbd.ALLOCATION_ID)]:
            return -1
        return int(nbd.STATUS_PAYLOAD.unpack(wanted)[0])

    # -- replying ---------------------------------------------------------------------------------

    def reply(self, request: Request) -> None:
        """It has succeeded. The request, and its memory, are not the caller's any more."""
        if self._lost:
            self._release(request)
            return
        length = request.length
        buffer = request.buffer
        if request.command == nbd.READ and length and buffer is not None:
            at = self._reply_at
            cookie = request.cookie
            if self._extended:
                nbd.pack_extended_data_chunk(
                    buffer,
                    at,
                    nbd.EXTENDED_CHUNK_MAGIC,
                    nbd.REPLY_DONE,
                    nbd.TYPE_OFFSET_DATA,
                    cookie,
                    request.offset,
                    length + nbd.DATA_OFFSET,
                    request.offset,
                )
            elif self.negotiated.structured:
                nbd.pack_data_chunk(
                    buffer,
                    at,
                    nbd.CHUNK_MAGIC,
                    nbd.REPLY_DONE,
                    nbd.TYPE_OFFSET_DATA,
                    cookie,
                    length + nbd.DATA_OFFSET,
                    request.offset,
                )
            else:
                nbd.pack_simple_reply(buffer, at, nbd.SIMPLE_REPLY_MAGIC, 0, cookie)
            self.out.append(request.reply)
            self.out_size += HEADROOM - at + length
            self._leaving.append(request)
            return
        if self.negotiated.structured:
            header = self._chunk_header(request.cookie, request.offset, nbd.TYPE_NONE, 0)
        else:
            header = nbd.SIMPLE_REPLY.pack(nbd.SIMPLE_REPLY_MAGIC, 0, request.cookie)
        self._put(header, request)

    def reply_status(self, request: Request, extents: list[Extent]) -> None:
        """A BLOCK_STATUS has succeeded. ``extents``: as the disk tells of them, from the offset of
        the request on, at least one."""
        end = request.offset + request.length
        told: list[tuple[int, int]] = []
        most = 1 if request.flags & nbd.FLAG_REQ_ONE else nbd.MOST_EXTENTS
        for offset, length, flags in extents[:most]:
            stop = min(offset + length, end)
            if stop > offset:
                told.append((stop - offset, flags))
        if self._extended:
            data = nbd.EXTENDED_CONTEXT.pack(nbd.ALLOCATION_ID, len(told))
            data += b"".join([nbd.EXTENDED_EXTENT.pack(*extent) for extent in told])
            kind = nbd.TYPE_BLOCK_STATUS_EXT
        else:
            data = nbd.CONTEXT_ID.pack(nbd.ALLOCATION_ID)
            data += b"".join([nbd.EXTENT.pack(*extent) for extent in told])
            kind = nbd.TYPE_BLOCK_STATUS
        header = self._chunk_header(request.cookie, request.offset, kind, len(data))
        self._put(header + data, request)

    def refuse(self, request: Request, error: int, text: str) -> None:
        """It has failed. The request, and its memory, are not the caller's any more."""
        self._answer_error(request.cookie, request.offset, error, text, request)

    def _answer_error(
        self, cookie: int, offset: int, error: int, text: str, request: Request | None = None
    ) -> None:
        if not self.negotiated.structured:
            self._put(nbd.SIMPLE_REPLY.pack(nbd.SIMPLE_REPLY_MAGIC, error, cookie), request)
            return
        words = nbd.string(text)
        data = nbd.ERROR_DATA.pack(error, len(words)) + words
        self._put(self._chunk_header(cookie, offset, nbd.TYPE_ERROR, len(data)) + data, request)

    def _chunk_header(self, cookie: int, offset: int, kind: int, length: int) -> bytes:
        """Of the one chunk of a reply."""
        if self._extended:
            return nbd.EXTENDED_CHUNK.pack(
                nbd.EXTENDED_CHUNK_MAGIC, nbd.REPLY_DONE, kind, cookie, offset, length
            )
        return nbd.CHUNK.pack(nbd.CHUNK_MAGIC, nbd.REPLY_DONE, kind, cookie, length)

    def _put(self, message: bytes, request: Request | None) -> None:
        """``request``: to be released when ``message`` has left."""
        if self._lost:
            if request is not None:
                self._release(request)
            return
        if request is None:
            self._refusals += 1
        self.out.append(message)
        self.out_size += len(message)
        self._leaving.append(request)

    def sent(self, count: int) -> None:
        """So many bytes of ``out`` have left."""
        self._progress.moved += count
        self.out_size -= count
        leaving = self._leaving
        if not self.out_size:
            self.out.clear()
            for request in leaving:
                if request is not None:
                    self._release(request)
            leaving.clear()
            self._refusals = 0
            return
        whole = 0
        while count >= len(self.out[whole]):
            count -= len(self.out[whole])
            request = leaving[whole]
            whole += 1
            if request is None:
                self._refusals -= 1
            else:
                self._release(request)
        del self.out[:whole]
        del leaving[:whole]
        if count:
            self.out[0] = memoryview(self.out[0])[count:]

    @property
    def has_begun(self) -> bool:
        """The client has sent something since the handshake."""
        return self._progress.moved > 0 or self._end > 0

    def hoards(self) -> bool:
        """Between the last two calls, and before, less than LEAST_MOVED has moved, though it was
        the client's turn: it owes the rest of a write, or does not take replies. And it has more
        memory than it is guaranteed."""
        its_turn = self._large is not None or self.out_size > 0
        return self._progress.is_slow(its_turn and self._used > self._memory.guaranteed)

    def discard(self) -> None:
        """Nothing more is sent, and nothing received: the connection is over. What is open ends as
        it would, but is not answered."""
        self.ended = self._lost = True
        self.held = self.starved = False
        self.out_size = 0
        self.sent(0)
        self._drop_large()
        self._memory.share_out()

    def _drop_large(self) -> None:
        """The rest of its data does not come."""
        if self._large is not None:
            self.open += 1
            self._release(self._large)
            self._large = None

    # -- memory -----------------------------------------------------------------------------------

    def _release(self, request: Request) -> None:
        """It is answered, or cannot be any more, and its memory is free."""
        memory = self._memory
        self.open -= 1
        cost = request.cost
        self._used -= cost
        memory.open -= 1
        memory.used -= cost
        memory.given_back = True
        if request.command == nbd.READ:
            length = request.length
            if memory.kept + cost <= KEPT_BYTES or self._forget_others(length, cost):
                # With its buffer and views: most clients ask for the same length again.
                memory.kept += cost
                self._idle_reads.setdefault(length, []).append(request)
                return
        if request.command <= nbd.WRITE:
            request.data = request.reply = _NOTHING
            buffer, intake = request.buffer, request.intake
            if buffer is not None:
                request.buffer = None
                memory.keep(buffer)
            if intake is not None:
                request.intake = None
                intake.users -= 1
                if not intake.users and intake is not self._intake:
                    self._used -= INTAKE
                    memory.give_back(INTAKE)
                    memory.keep_intake(intake)
        elif request.losses:
            if not self._lost:
                self._owner.told(request.losses)
            request.losses = 0
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(request)

    def _forget_others(self, length: int, cost: int) -> bool:
        """Keep no memory for reads of other lengths. Whether there is room for this one now."""
        for other in [each for each in self._idle_reads if each != length]:
            self._memory.kept -= size_of(other) * len(self._idle_reads.pop(other))
        return self._memory.keeps(cost)

    def close(self) -> None:
        """Nothing more is received, and no request is open: give all memory back."""
        self.ended = True
        self._drop_large()
        self._forget_others(-1, 0)
        if not self._intake.users:
            self._memory.keep_intake(self._intake)
        self._memory.share_out()


def _offered(negotiated: Negotiated) -> dict[int, int]:
    """The commands that an export takes, and the flags of each."""
    told = negotiated.flags
    refused = sum(flag for flag, offer in _FLAG_OFFERS if not told & offer)
    offered = {
        command: flags & ~refused
        for command, flags in nbd.FLAGS.items()
        if command not in nbd.OFFERS or told & nbd.OFFERS[command]
    }
    if told & nbd.READ_ONLY:
        for command in nbd.CHANGES:
            offered.pop(command, None)
    if not negotiated.contexts:
        del offered[nbd.BLOCK_STATUS]
    return offered
