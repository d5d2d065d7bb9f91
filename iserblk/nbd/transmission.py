"""The server's side of the NBD transmission phase, without I/O.

Requests are parsed where they arrived, and the data of small writes stays there; that of large ones
lands in a buffer of its own. Replies are lists of buffers, of which that of a read is one: the
header is packed directly in front of the data.

    get_buffers()   where the next bytes must land
    received(n)     the requests that are complete now
    reply(…)        one of them is done
    out, sent(n)    what is to be sent

The memory that requests take is bounded, by ``buffers``. Where there is none for the next one,
``get_buffers`` answers with none, and the client waits; ``resume`` goes on.

What comes is untrusted: ``received`` and ``resume`` raise RemoteProtocolError and nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from iserblk.disk.seam import Extent
from iserblk.errors import RemoteProtocolError
from iserblk.initiator.session.slots import TaskSlot
from iserblk.nbd import messages as nbd
from iserblk.nbd.buffers import CHUNK, CLIENT_BYTES, GUARANTEED, HEADROOM, Chunk, Memory
from iserblk.nbd.messages import Negotiated

SMALL = 64 << 10  # bytes of a write's data that stays where it was received
MOST_REQUESTS = 1024  # of a client, not answered
_MOST_CHUNKS = CLIENT_BYTES // CHUNK  # with data of requests
_STEP = 4096  # bytes received behind the data of a large write: all of them are copied
_ROOM = 8192  # with less room in a chunk the next one is taken
_MOST_STATUS_PAYLOAD = 256

_CHANGES = (nbd.WRITE, nbd.TRIM, nbd.WRITE_ZEROES)


class Answered(Protocol):
    """Hears of requests whose command has ended."""

    def answered(self, request: Request) -> None: ...


class Request:
    """One request, and at once the waiter of its command.

    ``data``: for a READ the memory to be filled, for a WRITE what was received. ``buffer``: the
    request's own memory, with HEADROOM in front of the data; a small WRITE has its data in
    ``chunk`` instead. ``reply``: of a READ the data, and room for the header in front of it.
    ``slot``: of its command, while that is under way.
    """

    __slots__ = (
        "buffer",
        "chunk",
        "command",
        "cookie",
        "data",
        "flags",
        "length",
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
        self.data: memoryview = _NOTHING
        self.buffer: bytearray | None = None
        self.reply: memoryview = _NOTHING
        self.chunk: Chunk | None = None
        self.pending = 0
        self.slot: TaskSlot | None = None

    def task_done(self) -> None:
        """Implements Waiter, for one command."""
        self.pending -= 1
        if not self.pending:
            self.owner.answered(self)


_NOTHING = memoryview(b"")


class Transmission:
    """Of one connection. ``owner`` hears of its requests.

    ``out``: buffers to be sent, in order, ``out_size`` bytes. ``ended``: the client has said
    DISC, and nothing more is received. ``open``: requests that are not answered yet. ``held``:
    there is no room for the next request; ``starved``: because other clients have the memory.
    """

    def __init__(
        self, negotiated: Negotiated, owner: Answered, memory: Memory, first: bytes = b""
    ) -> None:
        """``first``: what came behind the handshake, for ``resume``."""
        self.negotiated = negotiated
        self.out: list[bytes | memoryview] = []
        self.out_size = 0
        self.ended = False
        self.held = self.starved = False
        self.open = 0
        self._owner = owner
        self._memory = memory
        self._used = 0  # bytes
        self._leaving: deque[Request | None] = deque()  # whose memory the buffers of ``out`` are
        self._sent = 0  # bytes of the first of them
        self._extended = negotiated.extended
        self._header = nbd.EXTENDED_REQUEST if self._extended else nbd.REQUEST
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
        # Commands that this export takes, and their flags.
        self._flags = {command: nbd.FLAGS[command] for command in nbd.FLAGS if self._takes(command)}
        if not negotiated.flags & nbd.SEND_DF:
            self._flags[nbd.READ] &= ~nbd.FLAG_DF
        self._idle: list[Request] = []
        self._idle_reads: dict[int, list[Request]] = {}  # with their memory, by length
        self._chunk = memory.chunk()
        self._chunks = 1
        self._start = 0  # of what is not parsed yet
        self._end = 0
        self._large: Request | None = None  # a WRITE whose data is being received
        self._filled = 0  # bytes of it
        self._to_pass_over = 0  # bytes of the data of a WRITE that was refused
        self._expect_large = False
        if first:
            if len(first) > CHUNK:
                raise RemoteProtocolError("NBD", "requests before the handshake was over")
            self._chunk.view[: len(first)] = first
            self._end = len(first)

    # -- receiving --------------------------------------------------------------------------------

    def get_buffers(self) -> list[memoryview]:
        """Where the next bytes must land, in order: none while nothing more is to be received. They
        are valid until ``received``."""
        if self.held or self.ended:
            return []
        large = self._large
        if large is not None:
            return [large.data[self._filled :], self._tail(_STEP)]
        return [self._tail(_STEP if self._expect_large else CHUNK)]

    def _tail(self, most: int) -> memoryview:
        """Room of the chunk for up to ``most`` bytes; never none."""
        if self._start == self._end:
            if not self._chunk.users:
                self._start = self._end = 0
            elif CHUNK - self._end < _ROOM:
                self._next_chunk()
        elif CHUNK - self._start < SMALL + nbd.EXTENDED_REQUEST.size:
            self._next_chunk()  # a request that has begun may be larger than what is left
        return self._chunk.view[self._end : min(CHUNK, self._end + most)]

    def _next_chunk(self) -> None:
        """The rest of what was received moves to the beginning of another one."""
        before, rest = self._chunk, self._end - self._start
        self._chunk = self._memory.chunk()
        self._chunks += 1
        self._chunk.view[:rest] = before.view[self._start : self._end]
        self._start, self._end = 0, rest
        if not before.users:
            self._drop_chunk(before)

    def _drop_chunk(self, chunk: Chunk) -> None:
        self._chunks -= 1
        self._memory.keep_chunk(chunk)

    def received(self, count: int) -> list[Request]:
        """So many bytes are in the buffers, at least one. Returns the requests that are complete,
        with the memory that they need; refused ones have been answered."""
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
        self.held = self.starved = False
        large = self._large
        if large is not None:
            if self._filled < large.length:
                return found
            self._large = None
            found.append(large)
        if self._to_pass_over:
            self._pass_over()
        header, magic, data = self._header, self._magic, self._chunk.data
        size = header.size
        extended = self._extended
        most_flags = self._flags
        while not self.ended and self._end - self._start >= size:
            got, flags, command, cookie, offset, length = header.unpack_from(data, self._start)
            if got != magic:
                raise RemoteProtocolError("NBD", f"a request begins with {got:#x}")
            payload = length if command == nbd.WRITE else 0
            behind = 0  # bytes behind the header that go with it
            if extended and flags & nbd.FLAG_PAYLOAD_LEN:
                flags &= ~nbd.FLAG_PAYLOAD_LEN
                payload = length
                if command == nbd.BLOCK_STATUS:
                    if length > _MOST_STATUS_PAYLOAD:
                        raise RemoteProtocolError(
                            "NBD", f"BLOCK_STATUS with {length} bytes of data"
                        )
                    if self._end - self._start - size < length:
                        break  # it has not come yet
                    behind = length
                    length = self._status_length(self._start + size, behind)
                elif command != nbd.WRITE:
                    command = -1  # nothing else has data: refused below
            if payload > nbd.MOST_PAYLOAD:
                raise RemoteProtocolError("NBD", f"a request with {payload} bytes of data")
            allowed = most_flags.get(command)
            if allowed is None or flags & ~allowed:
                if not self._refuse_early(command, flags, cookie, offset, payload):
                    break
                continue
            if command == nbd.READ:
                if length > nbd.MOST_PAYLOAD:
                    error = nbd.EOVERFLOW if self.negotiated.structured else nbd.EINVAL
                    self._start += size
                    self._answer_error(cookie, offset, error, f"at most {nbd.MOST_PAYLOAD} bytes")
                    continue
                if not self._fits(length):
                    break
                idle = self._idle_reads.get(length)
                if idle:
                    request = idle.pop()
                    request.flags = flags
                    request.cookie = cookie
                    request.offset = offset
                    self._memory.kept -= length
                    self.open += 1
                    self._used += length
                    self._memory.used += length
                else:
                    request = self._take(command, flags, cookie, offset, length)
                    buffer = self._memory.buffer(length)
                    request.buffer = buffer
                    request.data = memoryview(buffer)[HEADROOM : HEADROOM + length]
                    request.reply = memoryview(buffer)[self._reply_at : HEADROOM + length]
                self._start += size
                self._expect_large = False
            elif command == nbd.WRITE:
                if not self._fits(length):
                    break
                if length <= SMALL:
                    begin = self._start + size
                    if self._end - begin < length:
                        break  # the rest of its data comes next
                    request = self._take(command, flags, cookie, offset, length)
                    self._chunk.users += 1
                    request.chunk = self._chunk
                    request.data = self._chunk.view[begin : begin + length]
                    self._start = begin + length
                    self._expect_large = False
                else:
                    request = self._take(command, flags, cookie, offset, length)
                    if not self._begin_large(request):
                        break
            else:
                if not self._fits(0):
                    break
                self._start += size + behind
                if command == nbd.DISC:
                    self.ended = True
                    break
                request = self._take(command, flags, cookie, offset, length)
            found.append(request)
        return found

    def _fits(self, length: int) -> bool:
        """There is memory for a request with so many bytes of data; else ``held`` is set."""
        used = self._used + length
        if (
            (used > CLIENT_BYTES and self._used)
            or self.open >= MOST_REQUESTS
            or self._chunks > _MOST_CHUNKS
        ):
            self.held = True
        elif used > GUARANTEED and not self._memory.fits(length):
            self.held = self.starved = True
        return not self.held

    def _take(self, command: int, flags: int, cookie: int, offset: int, length: int) -> Request:
        request = self._idle.pop() if self._idle else Request(self._owner)
        request.command = command
        request.flags = flags
        request.cookie = cookie
        request.offset = offset
        request.length = length
        self.open += 1
        if command <= nbd.WRITE:
            self._used += length
            self._memory.used += length
        return request

    def _begin_large(self, request: Request) -> bool:
        """Its data lands in a buffer of its own; what has come of it is moved there. Whether that
        is all."""
        length = request.length
        buffer = self._memory.buffer(length)
        request.buffer = buffer
        request.data = memoryview(buffer)[HEADROOM : HEADROOM + length]
        begin = self._start + self._header.size
        here = min(self._end - begin, length)
        request.data[:here] = self._chunk.view[begin : begin + here]
        self._start = begin + here
        self._expect_large = True
        if here == length:
            return True
        self._large, self._filled = request, here
        return False

    def _takes(self, command: int) -> bool:
        flags = self.negotiated.flags
        if command in _CHANGES and flags & nbd.READ_ONLY:
            return False
        if command == nbd.TRIM:
            return bool(flags & nbd.SEND_TRIM)
        return command != nbd.BLOCK_STATUS or self.negotiated.contexts

    def _refuse_early(
        self, command: int, flags: int, cookie: int, offset: int, payload: int
    ) -> bool:
        """Answer a request that cannot be carried out, and pass over its data. False: no more may
        be answered now."""
        if not self._fits(0):
            return False
        read_only = command in _CHANGES and self.negotiated.flags & nbd.READ_ONLY
        if read_only:
            error, text = nbd.EPERM, "the export is read-only"
        elif command == nbd.BLOCK_STATUS and not self.negotiated.contexts:
            error, text = nbd.EINVAL, "no metadata context was selected"
        elif command not in nbd.FLAGS:
            error, text = nbd.EINVAL, "unknown command, or one that has no data"
        elif flags & ~self._flags.get(command, flags):
            error, text = nbd.EINVAL, f"flags {flags:#x} do not go with command {command}"
        else:
            error, text = nbd.EINVAL, f"the export has no command {command}"
        self._start += self._header.size
        self._answer_error(cookie, offset, error, text)
        self._to_pass_over = payload
        self._pass_over()
        return True

    def _pass_over(self) -> None:
        count = min(self._to_pass_over, self._end - self._start)
        self._start += count
        self._to_pass_over -= count

    def _status_length(self, begin: int, count: int) -> int:
        """The length that a BLOCK_STATUS with data asks for: it names the contexts that it wants.
        0, which is refused: the data makes no sense."""
        data = bytes(self._chunk.view[begin : begin + count])
        wanted, rest = data[: nbd.STATUS_PAYLOAD.size], data[nbd.STATUS_PAYLOAD.size :]
        numbers = [rest[at : at + 4] for at in range(0, len(rest), 4)]
        if numbers != [nbd.CONTEXT_ID.pack(nbd.ALLOCATION_ID)]:
            return 0
        return int(nbd.STATUS_PAYLOAD.unpack(wanted)[0])

    # -- replying ---------------------------------------------------------------------------------

    def reply(self, request: Request) -> None:
        """It has succeeded. The request, and its memory, are not the caller's any more."""
        length = request.length
        buffer = request.buffer
        if request.command == nbd.READ and length and buffer is not None:
            at = self._reply_at
            cookie = request.cookie
            if self._extended:
                nbd.EXTENDED_DATA_CHUNK.pack_into(
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
                nbd.DATA_CHUNK.pack_into(
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
                nbd.SIMPLE_REPLY.pack_into(buffer, at, nbd.SIMPLE_REPLY_MAGIC, 0, cookie)
            self.out.append(request.reply)
            self.out_size += HEADROOM - at + length
            self._leaving.append(request)
            return
        if self.negotiated.structured:
            header = self._chunk_header(request.cookie, request.offset, nbd.TYPE_NONE, 0)
        else:
            header = nbd.SIMPLE_REPLY.pack(nbd.SIMPLE_REPLY_MAGIC, 0, request.cookie)
        self._put(header)
        self._release(request)

    def reply_status(self, request: Request, extents: list[Extent]) -> None:
        """A BLOCK_STATUS has succeeded. ``extents``: as the disk tells of them, from the offset of
        the request on."""
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
        self._put(self._chunk_header(request.cookie, request.offset, kind, len(data)) + data)
        self._release(request)

    def refuse(self, request: Request, error: int, text: str) -> None:
        """It has failed. The request, and its memory, are not the caller's any more."""
        self._answer_error(request.cookie, request.offset, error, text)
        self._release(request)

    def _answer_error(self, cookie: int, offset: int, error: int, text: str) -> None:
        if not self.negotiated.structured:
            self._put(nbd.SIMPLE_REPLY.pack(nbd.SIMPLE_REPLY_MAGIC, error, cookie))
            return
        words = text.encode(errors="replace")[: nbd.MOST_STRING]
        data = nbd.ERROR_DATA.pack(error, len(words)) + words
        self._put(self._chunk_header(cookie, offset, nbd.TYPE_ERROR, len(data)) + data)

    def _chunk_header(self, cookie: int, offset: int, kind: int, length: int) -> bytes:
        """Of the one chunk of a reply."""
        if self._extended:
            return nbd.EXTENDED_CHUNK.pack(
                nbd.EXTENDED_CHUNK_MAGIC, nbd.REPLY_DONE, kind, cookie, offset, length
            )
        return nbd.CHUNK.pack(nbd.CHUNK_MAGIC, nbd.REPLY_DONE, kind, cookie, length)

    def _put(self, message: bytes) -> None:
        self.out.append(message)
        self.out_size += len(message)
        self._leaving.append(None)

    def sent(self, count: int) -> None:
        """So many bytes of ``out`` have left."""
        self.out_size -= count
        leaving = self._leaving
        if not self.out_size:
            self.out.clear()
            for request in leaving:
                if request is not None:
                    self._release(request)
            leaving.clear()
            return
        whole = 0
        while count >= len(self.out[whole]):
            count -= len(self.out[whole])
            whole += 1
            request = leaving.popleft()
            if request is not None:
                self._release(request)
        del self.out[:whole]
        if count:
            self.out[0] = self.out[0][count:]

    def discard(self) -> None:
        """Nothing more is sent, and nothing received: the connection is over. What is open ends as
        it would, but is not answered."""
        self.ended = True
        self.held = self.starved = False
        self.out_size = 0
        self.sent(0)
        if self._large is not None:
            self._release(self._large)
            self._large = None

    # -- memory -----------------------------------------------------------------------------------

    def _release(self, request: Request) -> None:
        """It is answered, and its memory is free."""
        self.open -= 1
        if request.command <= nbd.WRITE:
            length = request.length
            self._used -= length
            self._memory.give_back(length)
            if request.command == nbd.READ and (
                self._memory.keeps(length) or self._forget_others(length)
            ):
                # With its buffer and views: most clients ask for the same length again.
                self._memory.kept += length
                self._idle_reads.setdefault(length, []).append(request)
                return
            request.data = request.reply = _NOTHING
            buffer, chunk = request.buffer, request.chunk
            if buffer is not None:
                request.buffer = None
                self._memory.keep(buffer)
            if chunk is not None:
                request.chunk = None
                chunk.users -= 1
                if not chunk.users and chunk is not self._chunk:
                    self._drop_chunk(chunk)
        self._idle.append(request)

    def _forget_others(self, length: int) -> bool:
        """Keep no memory for reads of other lengths. Whether there is room for this one now."""
        for other in [each for each in self._idle_reads if each != length]:
            self._memory.kept -= other * len(self._idle_reads.pop(other))
        return self._memory.keeps(length)

    def close(self) -> None:
        """After ``discard``, when no request is open."""
        self._forget_others(0)
        self._memory.keep_chunk(self._chunk)
