"""The server's side of the NBD handshake: fixed newstyle negotiation, without I/O.

    client            server
                      NBDMAGIC, IHAVEOPT, handshake flags
    client flags
    option            replies, the last one an acknowledgement or an error
    …
    GO, EXPORT_NAME   the export; both ends go on to the transmission

The caller feeds bytes and sends what ``data_to_send`` returns. Two things it has to do itself,
and is asked for by an event: look at an export (its size is asked of the target), and start TLS.
No option is looked at before it has.

What comes is untrusted: only RemoteProtocolError is raised, and then the connection is to be closed
without another word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError
from iserblk.nbd import messages as nbd
from iserblk.nbd.exports import Export
from iserblk.nbd.messages import Negotiated, Option
from iserblk.state_tables import step

MOST_OPTION = 32 << 10  # bytes of the data of an option; what is longer is refused, and passed over
MOST_PASSED_OVER = 1 << 20  # bytes of that in a handshake
MOST_OPTIONS = 256  # in a handshake, and
MOST_OPTIONS_EACH = 8  # for each export: `nbdinfo --list` asks about all of them
MOST_QUERIES = 1024  # for metadata contexts, in one option
MOST_UNREAD = 256 << 10  # bytes of replies beside one list of the exports, after which no more
# options are looked at


class Tls(Enum):
    """Whether a server has TLS, and whether clients have to use it."""

    OFF = "off"
    ON = "on"
    REQUIRE = "require"


class State(StrEnum):
    GREETED = "greeted"  # the client has not said its flags
    OPTIONS = "options"  # the client's turn: an option
    LOOKING = "looking at an export"  # the server's turn
    SECURING = "starting TLS"
    TRANSMISSION = "transmission"  # the handshake is over
    ENDED = "ended"


class Event(StrEnum):
    FLAGS = "client flags"
    LOOK = "INFO, GO or EXPORT_NAME of an export that there is"
    TELL = "INFO is answered"
    GO = "GO or EXPORT_NAME is answered"
    STARTTLS = "STARTTLS is acknowledged"
    SECURED = "TLS has begun"
    ABORT = "ABORT"
    BREACH = "a breach of the protocol"


TABLE: Mapping[tuple[State, Event], State] = {
    (State.GREETED, Event.FLAGS): State.OPTIONS,
    (State.OPTIONS, Event.LOOK): State.LOOKING,
    (State.LOOKING, Event.TELL): State.OPTIONS,
    (State.LOOKING, Event.GO): State.TRANSMISSION,
    (State.OPTIONS, Event.STARTTLS): State.SECURING,
    (State.SECURING, Event.SECURED): State.OPTIONS,
    (State.OPTIONS, Event.ABORT): State.ENDED,
    (State.GREETED, Event.BREACH): State.ENDED,
    (State.OPTIONS, Event.BREACH): State.ENDED,
}


class Look(NamedTuple):
    """The caller asks the target for the size of the export, and calls ``looked``."""

    export: Export


class StartTls(NamedTuple):
    """The caller sends what there is to send, starts TLS, and calls ``secured``."""


class _Breach(Exception):
    """What the client did; becomes RemoteProtocolError."""


class _Refused(Exception):
    """An option that is answered with an error, after which the handshake goes on."""

    def __init__(self, reply: int, text: str) -> None:
        super().__init__(text)
        self.reply = reply


class Handshake:
    """One connection's. ``exports``: by name. ``default``: what an empty name means.

    ``negotiated``: what holds for the transmission; None until it has begun.
    """

    def __init__(self, exports: Mapping[str, Export], default: str, tls: Tls = Tls.OFF) -> None:
        self.state = State.GREETED
        self.negotiated: Negotiated | None = None
        self._exports = exports
        self._default = default
        self._tls = tls
        self._secure = False
        self._in = bytearray()
        self._out = bytearray(
            nbd.GREETING.pack(nbd.MAGIC, nbd.OPTION_MAGIC, nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES)
        )
        self._client_flags = 0
        self._options = 0
        self._most_options = MOST_OPTIONS + MOST_OPTIONS_EACH * len(exports)
        self._listed = 0  # bytes of the reply to LIST
        self._to_pass_over = 0  # bytes of an option's data that are still to come
        self._passed_over = 0
        self._forget()
        # While an export is looked at: the option that asked, and what it wants to know.
        self._option = 0
        self._wanted: list[int] = []
        self._chosen: Export | None = None

    def _forget(self) -> None:
        """What has been negotiated does not hold any more, or never did."""
        self._structured = False
        self._extended = False
        self._contexts_of: str | None = None  # the export for which base:allocation was selected

    def enter(self, event: Event) -> None:
        """The one writer of ``state``. Raises LocalProtocolError, and has changed nothing then."""
        self.state = step(TABLE, "an NBD handshake", self.state, event)

    def data_to_send(self) -> bytes:
        """What has to be sent, in order; it is the caller's now."""
        out = bytes(self._out)
        self._out.clear()
        return out

    def rest(self) -> bytes:
        """In TRANSMISSION: bytes that came behind the handshake. They are the caller's now."""
        rest = bytes(self._in)
        self._in.clear()
        return rest

    def receive_data(self, data: bytes) -> Look | StartTls | None:
        """Take what has come, b"" to go on after an event. Returns what the caller has to do before
        the next option. Raises RemoteProtocolError; the state is ENDED then."""
        if self.state is State.ENDED:
            return None
        self._in += data
        try:
            while True:
                if self.state is State.GREETED:
                    if not self._take_flags():
                        return None
                elif self.state is State.OPTIONS:
                    taken = self._take_option()
                    if taken is None:
                        return None
                    event = self._obey(*taken)
                    if event is not None:
                        return event
                else:
                    return None
        except _Breach as breach:
            self.enter(Event.BREACH)
            raise RemoteProtocolError("NBD", str(breach)) from None

    # -- what came --------------------------------------------------------------------------------

    def _take_flags(self) -> bool:
        if len(self._in) < nbd.CLIENT_FLAGS.size:
            return False
        (flags,) = nbd.CLIENT_FLAGS.unpack_from(self._in)
        del self._in[: nbd.CLIENT_FLAGS.size]
        if flags & ~(nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES):
            raise _Breach(f"unknown client flags {flags:#x}")
        self._client_flags = flags
        self.enter(Event.FLAGS)
        return True

    def _take_option(self) -> tuple[int, bytes] | None:
        """The next option that is here whole. One with too much data is answered at once, and its
        data passed over as it comes."""
        while True:
            if self._to_pass_over:
                count = min(self._to_pass_over, len(self._in))
                del self._in[:count]
                self._to_pass_over -= count
                if self._to_pass_over:
                    return None
            if len(self._in) < nbd.OPTION.size:
                return None
            magic, option, length = nbd.OPTION.unpack_from(self._in)
            if magic != nbd.OPTION_MAGIC:
                raise _Breach("an option does not begin with IHAVEOPT")
            if length <= MOST_OPTION:
                break
            self._count_option()
            self._pass_over(option, length)
            if self.state is State.ENDED:
                return None
        if len(self._in) < nbd.OPTION.size + length:
            return None
        data = bytes(self._in[nbd.OPTION.size : nbd.OPTION.size + length])
        del self._in[: nbd.OPTION.size + length]
        self._count_option()
        return option, data

    def _pass_over(self, option: int, length: int) -> None:
        """Answer an option with too much data, before the data has come."""
        self._passed_over += length
        if option == Option.EXPORT_NAME or self._passed_over > MOST_PASSED_OVER:
            raise _Breach(f"an option with {length} bytes of data")
        del self._in[: nbd.OPTION.size]
        self._to_pass_over = length
        try:
            self._check(option)
            if option == Option.ABORT:  # whose data is ignored
                self._abort(option, b"")
                return
            if option == Option.SET_META_CONTEXT:
                self._contexts_of = None  # as by any that fails
            raise _Refused(nbd.REP_ERR_TOO_BIG, f"at most {MOST_OPTION} bytes")
        except _Refused as refused:
            self._refuse(option, refused)

    def _count_option(self) -> None:
        self._options += 1
        if self._options > self._most_options:
            raise _Breach(f"more than {self._most_options} options, and no export was chosen")
        if len(self._out) > MOST_UNREAD + self._listed:
            raise _Breach("an option before the replies to others were read")

    def _check(self, option: int) -> Obey:
        """The function of ``option``. Raises _Refused where it may not be used now."""
        if not self._client_flags & nbd.FIXED_NEWSTYLE and option != Option.EXPORT_NAME:
            raise _Refused(nbd.REP_ERR_INVALID, "the client did not ask for fixed newstyle")
        if (
            self._tls is Tls.REQUIRE
            and not self._secure
            and option not in (Option.ABORT, Option.STARTTLS)
        ):
            raise _Refused(nbd.REP_ERR_TLS_REQD, "this server wants TLS")
        obey = _OBEY.get(option)
        if obey is None:
            raise _Refused(nbd.REP_ERR_UNSUP, f"unknown option {option}")
        return obey

    def _obey(self, option: int, data: bytes) -> Look | StartTls | None:
        try:
            return self._check(option)(self, option, data)
        except _Refused as refused:
            self._refuse(option, refused)
            return None

    def _refuse(self, option: int, refused: _Refused) -> None:
        if option == Option.EXPORT_NAME:  # which knows no error
            raise _Breach(f"EXPORT_NAME: {refused}") from None
        self._reply(option, refused.reply, nbd.string(str(refused)))

    # -- options ----------------------------------------------------------------------------------

    def _export_name(self, option: int, data: bytes) -> Look:
        if self._extended:
            raise _Refused(nbd.REP_ERR_INVALID, "it does not go with extended headers")
        return self._look(option, _string(data), [])

    def _info(self, option: int, data: bytes) -> Look:
        reader = _Reader(data)
        name = reader.string()
        count = reader.number(2)
        reader.expect(count, 2)
        wanted = [reader.number(2) for _ in range(count)]
        reader.end()
        return self._look(option, name, wanted)

    def _look(self, option: int, name: str, wanted: list[int]) -> Look:
        self._chosen = self._find(name)
        self._option = option
        self._wanted = wanted
        self.enter(Event.LOOK)
        return Look(self._chosen)

    def _find(self, name: str) -> Export:
        export = self._exports.get(name or self._default)
        if export is None:
            raise _Refused(nbd.REP_ERR_UNKNOWN, f"no export {name[:80]!r}")
        return export

    def _abort(self, option: int, _data: bytes) -> None:
        self._reply(option, nbd.REP_ACK)
        self.enter(Event.ABORT)

    def _list(self, option: int, data: bytes) -> None:
        _Reader(data).end()
        before = len(self._out)
        for export in self._exports.values():
            name = export.name.encode()
            told = len(name).to_bytes(4) + name + nbd.string(export.description)
            self._reply(option, nbd.REP_SERVER, told)
        self._reply(option, nbd.REP_ACK)
        self._listed = len(self._out) - before

    def _starttls(self, option: int, data: bytes) -> StartTls:
        _Reader(data).end()
        if self._tls is Tls.OFF:
            raise _Refused(nbd.REP_ERR_POLICY, "this server has no TLS")
        if self._secure:
            raise _Refused(nbd.REP_ERR_INVALID, "TLS is in use already")
        if self._in:
            # They would be taken for what came by TLS.
            raise _Breach("bytes behind STARTTLS that are not encrypted")
        self._reply(option, nbd.REP_ACK)
        self.enter(Event.STARTTLS)
        return StartTls()

    def _structured_reply(self, option: int, data: bytes) -> None:
        _Reader(data).end()
        if self._extended:
            raise _Refused(nbd.REP_ERR_EXT_HEADER_REQD, "extended headers are in use already")
        if self._structured:
            raise _Refused(nbd.REP_ERR_INVALID, "structured replies are in use already")
        self._structured = True
        self._reply(option, nbd.REP_ACK)

    def _extended_headers(self, option: int, data: bytes) -> None:
        _Reader(data).end()
        if self._extended:
            raise _Refused(nbd.REP_ERR_INVALID, "extended headers are in use already")
        self._extended = self._structured = True
        self._reply(option, nbd.REP_ACK)

    def _meta_context(self, option: int, data: bytes) -> None:
        setting = option == Option.SET_META_CONTEXT
        if setting:
            self._contexts_of = None  # also where this one fails
        if not self._structured:
            raise _Refused(nbd.REP_ERR_INVALID, "structured replies have to be asked for first")
        reader = _Reader(data)
        name = reader.string()
        count = reader.number(4)
        reader.expect(count, 4)
        if count > MOST_QUERIES:
            raise _Refused(nbd.REP_ERR_TOO_BIG, f"at most {MOST_QUERIES} queries")
        queries = [reader.string() for _ in range(count)]
        reader.end()
        export = self._find(name)
        found = nbd.BASE_ALLOCATION in queries
        if not setting:
            found = found or not queries or nbd.BASE in queries
        if found:
            if setting:
                self._contexts_of = export.name
            number = nbd.ALLOCATION_ID if setting else 0
            told = nbd.CONTEXT_ID.pack(number) + nbd.BASE_ALLOCATION.encode()
            self._reply(option, nbd.REP_META_CONTEXT, told)
        self._reply(option, nbd.REP_ACK)

    # -- what the caller has done -----------------------------------------------------------------

    def secured(self) -> None:
        """TLS has begun: all that came before is forgotten. Raises LocalProtocolError in any state
        but SECURING."""
        self.enter(Event.SECURED)
        self._secure = True
        self._forget()

    def looked(self) -> None:
        """The size of the export is known. Then ``receive_data(b"")`` goes on. Raises
        LocalProtocolError in any state but LOOKING."""
        option, export = self._option, self._chosen
        self.enter(Event.TELL if option == Option.INFO else Event.GO)
        assert export is not None  # as in every LOOKING state
        flags = export.flags(self._structured)
        contexts = self._contexts_of == export.name
        if self._extended and contexts:
            flags |= nbd.BLOCK_STATUS_PAYLOAD
        if option == Option.EXPORT_NAME:
            self._out += nbd.EXPORT_NAME_REPLY.pack(export.size, flags)
            if not self._client_flags & nbd.NO_ZEROES:
                self._out += bytes(nbd.EXPORT_NAME_ZEROES)
        else:
            told = nbd.INFO_EXPORT_DATA.pack(nbd.INFO_EXPORT, export.size, flags)
            self._reply(option, nbd.REP_INFO, told)
            self._tell(option, export)
            self._reply(option, nbd.REP_ACK)
        self._chosen = None
        if self.state is State.TRANSMISSION:
            self.negotiated = Negotiated(
                export.name, self._structured, self._extended, contexts, flags
            )

    def _tell(self, option: int, export: Export) -> None:
        for wanted in dict.fromkeys(self._wanted):
            if wanted == nbd.INFO_NAME:
                told = nbd.INFO.pack(wanted) + export.name.encode()
            elif wanted == nbd.INFO_DESCRIPTION:
                told = nbd.INFO.pack(wanted) + nbd.string(export.description)
            elif wanted == nbd.INFO_BLOCK_SIZE:
                told = nbd.INFO_BLOCK_SIZE_DATA.pack(
                    wanted, export.minimum, export.preferred, nbd.MOST_PAYLOAD
                )
            else:  # what is not known is not answered
                continue
            self._reply(option, nbd.REP_INFO, told)

    def _reply(self, option: int, kind: int, data: bytes = b"") -> None:
        self._out += nbd.OPTION_REPLY.pack(nbd.OPTION_REPLY_MAGIC, option, kind, len(data))
        self._out += data


Obey = Callable[[Handshake, int, bytes], Look | StartTls | None]
_OBEY: dict[int, Obey] = {
    Option.EXPORT_NAME: Handshake._export_name,
    Option.ABORT: Handshake._abort,
    Option.LIST: Handshake._list,
    Option.STARTTLS: Handshake._starttls,
    Option.INFO: Handshake._info,
    Option.GO: Handshake._info,
    Option.STRUCTURED_REPLY: Handshake._structured_reply,
    Option.LIST_META_CONTEXT: Handshake._meta_context,
    Option.SET_META_CONTEXT: Handshake._meta_context,
    Option.EXTENDED_HEADERS: Handshake._extended_headers,
}


class _Reader:
    """Reads the data of an option. Raises _Refused where it is shorter, or longer, than it says."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, width: int) -> int:
        return int.from_bytes(self._take(width))

    def string(self) -> str:
        return _string(self._take(self.number(4)))

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise _Refused(nbd.REP_ERR_INVALID, "the option's data is too short")
        self._at += count
        return self._data[self._at - count : self._at]

    def expect(self, count: int, width: int) -> None:
        """``count`` items of at least ``width`` bytes follow."""
        if count * width > len(self._data) - self._at:
            raise _Refused(nbd.REP_ERR_INVALID, "the option's data is too short")

    def end(self) -> None:
        if self._at != len(self._data):
            raise _Refused(nbd.REP_ERR_INVALID, "the option has more data than it should")


def _string(data: bytes) -> str:
    if len(data) > nbd.MOST_STRING:
        raise _Refused(nbd.REP_ERR_INVALID, "a string is too long")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise _Refused(nbd.REP_ERR_INVALID, "a string is not UTF-8") from None
    if "\0" in text:
        raise _Refused(nbd.REP_ERR_INVALID, "a string has a NUL")
    return text
