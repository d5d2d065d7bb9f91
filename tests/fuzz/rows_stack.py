"""Framing, RDMA and the layers that keep state: a case is a connection, fed with many frames."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from time import monotonic

from crc32c import crc32c

from iserblk.datamover import hello, iser
from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.iscsi import bhs, pdu, text
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.iwarp import ddp, mpa, rdmap
from tests.contract.datamovers import Ends
from tests.contract.test_datamover_tcp import Liar
from tests.datamover.test_iser_initiator import End as InitiatorEnd
from tests.datamover.test_iser_target import End as TargetEnd
from tests.datamover.test_stream_initiator import Initiator as StreamingInitiator
from tests.datamover.test_stream_target import Target as StreamingTarget
from tests.datamover.test_tcp_stream import Taker, on_the_wire
from tests.fuzz.engine import Case, Row, decoder
from tests.initiator.fake import CountingWaiter, command, itt_of, response, session
from tests.rcap.fpdu import decode_fpdu
from tests.rcap.iwarp import test_receive as frames
from tests.rcap.iwarp.test_receive import Receiver
from tests.support.golden import golden
from tests.target.iscsi.several import HOSTS, Host, IserPeer, Peer, TcpPeer
from tests.target.iscsi.test_connection import Client
from tests.target.iser_client import IserClient, rw10
from tests.vectors import streaming_login as streaming

_GONE = (RemoteProtocolError, ConnectionLost, BrokenPipeError)
_MPA = (
    mpa.MpaInitiator(private_data=b"\x40\0\0\0").data_to_send(),
    mpa.HEADER.pack(mpa.REPLY_KEY, 0x40, 1, 4) + b"\x40\0\0\0",
    mpa.HEADER.pack(mpa.REPLY_KEY, 0x50, 2, 8) + b"\x80\x10\xc0\x10abcd",
    mpa.HEADER.pack(mpa.REQUEST_KEY, 0x50, 2, 8) + b"\x80\x10\xc0\x10abcd",
    mpa.HEADER.pack(mpa.REPLY_KEY, 0x50, 2, 4) + b"\x80\x10\x00\x10",
    mpa.HEADER.pack(mpa.REPLY_KEY, 0x50, 2, 4) + b"\x00\x10\x3f\x00",
    mpa.HEADER.pack(mpa.REPLY_KEY, 0x60, 1, 0),
)
_READ_REQUEST = rdmap.ReadRequest(0x100, 0, 100, 0x200, 0).pack()
_TERMINATES = (
    bytes((0x11, 0, 0xC0, 0)) + bytes(16),
    bytes((0x01, 2, 0xE0, 0, 0, 16)) + bytes(14 + 28),
)
_FPDUS = (
    frames.tagged(frames.WRITE, 0x100, 0, b"written"),
    frames.untagged(frames.SEND, 1, b"sent"),
    frames.read_request(1, (1, 0), 10, (0x100, 0)),
)


def _mpa(make: Callable[[], mpa.MpaInitiator | mpa.MpaResponder]) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        side = make()
        data, at = case.data, case.chance.randrange(40)
        for piece in (data[:at], data[at:]):
            if piece and (result := side.receive_data(piece)) is not None:
                assert len(result.private_data) <= 512 and result.ord <= mpa.DEFAULT_DEPTH
                return

    return run


def _corrected(case: Case, frame: bytes) -> bytes:
    """Mostly with a right CRC, so that what is behind it is looked at."""
    if len(frame) > 8 and case.chance.random() < 0.8:
        size = case.chance.random() < 0.8  # and a right length
        body = bytearray(frame[:-4])
        body += bytes(-len(body) & 3)
        if size:
            body[:2] = (len(body) - 2 & 0xFFFF).to_bytes(2, "big")
        return bytes(body) + ddp.CRC.pack(crc32c(body))
    return frame


def _receive(case: Case) -> None:
    """Frames for the receive core; their STags and MSNs are those that it knows."""
    chance = case.chance
    receiver = Receiver(crc=chance.random() < 0.7)
    before = bytes(receiver.read_only)
    stags = (receiver.stag, receiver.stag_read, receiver.stag_write, 9)
    try:
        for turn in range(8):
            stag, payload = chance.choice(stags), chance.randbytes(chance.randrange(40))
            made = chance.choice(
                (
                    frames.tagged(frames.WRITE, stag, chance.randrange(4000), payload),
                    frames.tagged(frames.RESPONSE_MORE, 9, 0, payload),
                    frames.untagged(frames.SEND, turn + 1, payload),
                    frames.untagged(frames.SEND_INVALIDATE, turn + 1, payload, stag=stag),
                    frames.read_request(turn + 1, (1, 0), 10, (stag, 0)),
                )
            )
            if chance.random() < 0.4:
                made = _corrected(case, case.mutated(made))
            receiver.feed(made, chance.choice((7, 64, 4096)))
    finally:
        assert receiver.read_only == before
        assert len(receiver.core.responses) <= 2 and len(receiver.events) <= 9


_PDUS = (
    on_the_wire([(0, 0, b"ping"), (5, 0, b"data" * 20), (1, 1, b"")], False, False),
    on_the_wire([(5, 0, b"data" * 20), (0, 0, b"ping"), (1, 1, b"x")], True, True),
)


def _pdu_stream(case: Case) -> None:
    taker = Taker(512, case.chance.random() < 0.5, case.chance.random() < 0.5)
    for _ in range(4):
        data = case.data
        if data:
            taker.feed(data, [case.chance.choice((3, 50, 4096))])


_SENSE = response(0, status=2, sense=bytes((0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x29, 0)))
_ANSWERS: tuple[bytes, ...] = (
    response(0),
    response(0, flags=0x8A, residual=512, bidi_residual=7),
    _SENSE,
    pdu.NopIn(itt=bhs.NO_TAG, ttt=7, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32).pack(),
    pdu.TaskManagementResponse(response=0, itt=0, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32).pack(),
    pdu.Reject(reason=4, data_length=48, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32).pack()
    + bytes(48),
    bytes((bhs.ASYNC_MESSAGE, 0x80)) + bytes(46),
    pdu.LogoutResponse(response=0, itt=0, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32).pack(),
)


def _session(case: Case) -> None:
    """Answers to commands in flight, mutated; in any case each command ends."""
    made, dm = session()
    waiters = [CountingWaiter() for _ in range(3)]
    for waiter in waiters:
        command(made, waiter)
    for turn in range(6):
        data = bytearray(case.chance.choice(_ANSWERS))
        if case.chance.random() < 0.7:
            which = dm.sent[case.chance.randrange(len(dm.sent))]
            data[16:20] = itt_of(which).to_bytes(4, "big")
        if case.chance.random() < 0.7:
            data[24:28] = (100 + turn).to_bytes(4, "big")
        message = case.mutated(bytes(data)) if case.chance.random() < 0.7 else bytes(data)
        bhs.data_segment_untrusted(memoryview(message))  # what every datamover has seen to
        dm.inbox.append(message)
        made.progress(monotonic())
        if made.error is not None:
            assert isinstance(made.error, RemoteProtocolError | ConnectionLost), made.error
            assert all(waiter.woken == 1 for waiter in waiters)
            return


def _unit(chance: random.Random, opcodes: Sequence[int], data: bytes) -> bytes:
    """A PDU with small numbers nearly everywhere; its length is mostly right."""
    head = bytearray((chance.choice(opcodes), chance.choice((0, 0x80, 0x81, 0xA0, 0xC0)), 0, 0))
    for _ in range(11):
        value = chance.choice((0, 0, 1, 2, 512, 8192, 19999, bhs.NO_TAG, chance.getrandbits(32)))
        head += value.to_bytes(4, "big")
    if chance.random() < 0.9:
        head[4:8] = len(data).to_bytes(4, "big")
    if chance.random() < 0.6:
        head[8:16] = bytes(8)
    return bytes(head) + data + bytes(-len(data) & 3)


_FROM_TARGET = (bhs.DATA_IN, bhs.DATA_IN, bhs.R2T, bhs.SCSI_RESPONSE, bhs.NOP_IN, bhs.REJECT, 0x3E)
_FROM_INITIATOR = (0, 1, 1, 2, 4, 5, 5, 6, 16, 0x40, 0x41, 0x42, 0x43, 0x44)


def _tcp_initiator(case: Case) -> None:
    plain = Ends()
    lying = Liar(plain)
    try:
        at = 0
        for turn in range(8):
            data = case.chance.randbytes(case.chance.choice((0, 0, 8, 512)))
            unit = bytearray(_unit(case.chance, _FROM_TARGET, data))
            if case.chance.random() < 0.5:  # the next piece of the read, or nearly that
                unit[0], unit[1] = bhs.DATA_IN, case.chance.choice((0, 0, 0, 0x80, 0x81))
                unit[4:8] = len(data).to_bytes(4, "big")
                unit[16:20], unit[20:24] = bytes(4), b"\xff\xff\xff\xff"
                unit[36:40] = case.chance.choice((turn, turn, 0)).to_bytes(4, "big")
                unit[40:44] = case.chance.choice((at, at, 19996)).to_bytes(4, "big")
                at += len(data)
            lying.socket.sendall(bytes(unit))
            lying.dm.progress(0.0)
    finally:
        assert len(lying.read) == 20000
        lying.socket.close()
        plain.close()


def _tcp_target(case: Case) -> None:
    client = Client(("MaxBurstLength", "1024"))
    try:
        client.write(8)
        for _ in range(8):
            data = case.chance.randbytes(case.chance.choice((0, 0, 8, 512)))
            client.say(_unit(case.chance, _FROM_INITIATOR, data))
    finally:
        client.close()


def _target_session(case: Case) -> None:
    """A session with several connections at ErrorRecoveryLevel 2: they come, go and come back, and
    say anything on any of them. In the end nothing is left of it."""
    chance = case.chance
    kind = chance.choice((TcpPeer, IserPeer))
    host = Host(max_connections=3, threads=True)
    try:
        for cid in (0, 1):
            kind(host, cid).log_in()
        for _ in range(8):
            peers = [peer for peer in host.peers if not peer.connection.done]
            if not peers or chance.random() < 0.2:
                kind(host, chance.randrange(3)).log_in(tsih=host.tsih)
            elif chance.random() < 0.2:
                chance.choice(peers).lose()
            else:
                _say_anything(host, chance.choice(peers), chance)
            for peer in [each for each in host.peers if each.connection.done]:
                peer.close()
            if host.session.done:
                return
    finally:
        HOSTS.remove(host)
        host.end()


def _say_anything(host: Host, peer: Peer, chance: random.Random) -> None:
    near = host.cmd_sn + chance.choice((-1, 0, 0, 0, 1, 2)) & 0xFFFFFFFF
    what = chance.randrange(4)
    if what == 0:
        data = chance.randbytes(chance.choice((0, 8, 512)))
        unit = _unit(chance, _FROM_INITIATOR, data)
        peer.put((bytes((0x10, *bytes(27))) if isinstance(peer, IserPeer) else b"") + unit)
        host.run()
    elif what == 1:
        header = None
        if isinstance(peer, IserPeer):
            header = chance.choice((peer.reads_into(bytearray(512)), peer.writes_from(bytes(512))))
        code, flags = chance.choice(((0x28, 0xC1), (0x2A, 0xA1), (0x2A, 0x21), (0x35, 0x81)))
        peer.command(
            rw10(code, 512).ljust(16, b"\0"),
            flags,
            512,
            itt=chance.randrange(4),
            cmd_sn=near,
            header=header,
        )
        host.cmd_sn = host.session.exp_cmd_sn
    elif what == 2:
        peer.manage(
            chance.choice((1, 2, 5, 8, 8, 8)),
            chance.randrange(4),
            ref_cmd_sn=near,
            exp_data_sn=chance.choice((0, 1, 2, chance.getrandbits(32))),
            cmd_sn=chance.choice((None, near)),
        )
    else:
        peer.log_out(chance.choice((1, 2, 2, 3)), chance.randrange(3))
    if host.running and chance.random() < 0.5:
        host.finish()


def _iser_target(case: Case) -> None:
    """Messages of an initiator that has logged in (or has not)."""
    client = IserClient(at_once=False)
    try:
        _talk(client, case)
    finally:  # each has a descriptor, which would stay open until a garbage collection
        client.ours.close()
        client.target_pair.close()


def _talk(client: IserClient, case: Case) -> None:
    chance = case.chance
    if chance.random() < 0.8:
        client.logged_in([("InitialR2T", "No")] if chance.random() < 0.5 else [])
    ours = [client.ours.advertise(memoryview(bytearray(4096)), rights)[0] for rights in (1, 2)]
    for _ in range(6):
        data = chance.randbytes(chance.choice((0, 0, 8, 512)))
        head = bytearray(28)
        stags = [chance.choice((0, 0x100, *ours, chance.getrandbits(32))) for _ in range(2)]
        flags = chance.choice((0x10, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x30, 0))
        iser.ControlHeader(flags, stags[0], 0, stags[1], 0).pack_into(memoryview(head))
        if chance.random() < 0.1:
            client.send(case.data)
        elif chance.random() < 0.5:
            code, read = chance.choice(((0x28, 0xC0), (0x2A, 0xA0), (0x2A, 0x20), (0x2A, 0x20)))
            edtl = chance.choice((0, 512, 1024, 2048))
            unit = client.scsi(rw10(code, 1024), read, edtl, chance.randrange(9), len(data))
            client.send(bytes(head) + unit + data)
            if read == 0x20:  # W without F: more of its data comes unasked
                more = pdu.DataOut(
                    flags=chance.choice((0, 0x80)),
                    data_length=len(data),
                    lun=bytes(8),
                    itt=int.from_bytes(unit[16:20], "big"),
                    ttt=bhs.NO_TAG,
                    exp_stat_sn=1,
                    data_sn=chance.choice((0, 0, 1)),
                    buffer_offset=len(data) if chance.random() < 0.8 else 512,
                )
                client.send(bytes((0x10,)) + bytes(27) + more.pack() + data)
        else:
            client.send(bytes(head) + _unit(chance, _FROM_INITIATOR, data))
        client.run()
        if client.connection.done:
            return


_MESSAGES = (
    bytes((0x10,)) + bytes(27) + bytes((0x21, 0x80)) + bytes(46),
    bytes((0x18,)) + bytes(27) + bytes((1, 0xA0, 0, 0, 0, 0, 0, 8)) + bytes(40) + bytes(8),
    bytes((0x10,)) + bytes(27) + bytes((4, 0x80, 0, 0, 0, 0, 0, 16)) + bytes(40)
    + text.encode([("SendTargets", "All")]),
)  # fmt: skip

_HELLOS = tuple(
    golden(f"iser/{name}")
    for name in ("hello-28", "hello-12", "hello-reply-28", "hello-reply-12", "hello-reply-rej-28")
)


def _hello_reply(data: bytes) -> None:
    reply = hello.HelloReply.unpack_untrusted(data, 28)
    hello.check_reply_untrusted(hello.RFC_7145, hello.greeting(hello.RFC_7145, 4), reply)


def _first_messages(case: Case, greeted: Callable[[], bool], say: Callable[[bytes], None]) -> None:
    """What an end may hear first, mutated or not, and messages behind it."""
    for _ in range(4):
        which = case.chance.choice((*_HELLOS, *_MESSAGES))
        say(case.mutated(which) if case.chance.random() < 0.5 else which)
    assert greeted()  # or one of them has raised


def _form(case: Case) -> hello.Form:
    return case.chance.choice((hello.RFC_7145, hello.RFC_5046))


def _agreed(case: Case) -> SessionParameters:
    required = case.chance.choice((True, True, None))
    return SessionParameters(rdma_extensions=True, iser_hello_required=required)


def _greeted_initiator(case: Case) -> None:
    end = InitiatorEnd(_form(case), _agreed(case))

    def say(message: bytes) -> None:
        end.say(message)
        end.take()

    try:
        _first_messages(case, lambda: end.dm.greeted, say)
        assert 0 <= end.pair.ird <= 4
    finally:
        end.dm.connection_terminate()
        end.theirs.close()


def _greeted_target(case: Case) -> None:
    end = TargetEnd(_form(case), _agreed(case))

    def say(message: bytes) -> None:
        end.say(message)
        end.take()

    try:
        _first_messages(case, lambda: end.dm.greeted, say)
        assert 0 <= end.pair.ord <= 4
    finally:
        end.dm.connection_terminate()
        end.theirs.close()


_STREAM = streaming.INITIATOR_SENDS, (streaming.LOGIN_RESPONSE, streaming.ENHANCED_REPLY)


def _pieces(case: Case, sent: Sequence[bytes]) -> list[bytes]:
    """What a peer sends, in order, one part of it mutated or none, cut anywhere."""
    chance = case.chance
    wrong = chance.randrange(len(sent) + 1)
    whole = b"".join(case.mutated(each) if at == wrong else each for at, each in enumerate(sent))
    cuts = sorted(chance.randrange(len(whole) + 1) for _ in range(3))
    return [whole[a:b] for a, b in zip((0, *cuts), (*cuts, len(whole)), strict=True) if a < b]


def _streaming_target(case: Case) -> None:
    """Login on a byte stream, MPA start-up, and the first PDU."""
    end = StreamingTarget()
    try:
        for piece in _pieces(case, _STREAM[0]):
            end.say(piece)
    finally:
        end.close()


def _streaming_initiator(case: Case) -> None:
    """MPA start-up behind the login, and a PDU that answers nothing."""
    end = StreamingInitiator()
    try:
        end.ask()
        end.peer.sendall(_STREAM[1][0])
        end.first.progress(0.0)
        end.enable()
        for piece in _pieces(case, (_STREAM[1][1], streaming.UNASKED)):
            end.peer.sendall(piece)
            end.end.progress(0.0)
    finally:
        end.close()


ROWS = (
    Row("MPA initiator", _mpa(mpa.MpaInitiator), _MPA),
    Row("MPA responder", _mpa(mpa.MpaResponder), _MPA),
    Row(
        "FPDU",
        lambda case: (
            decode_fpdu(_corrected(case, case.data), crc=case.chance.random() < 0.5),
            None,
        )[1],
        _FPDUS,
    ),
    decoder("Read Request", rdmap.ReadRequest.unpack_untrusted, _READ_REQUEST),
    decoder("Terminate", rdmap.Terminate.unpack_untrusted, *_TERMINATES),
    Row("receive core", _receive, _FPDUS, each=8),
    decoder("iSER header", iser.ControlHeader.unpack_from, *_MESSAGES),
    decoder(
        "iSER message", lambda data: iser.check_message_untrusted(memoryview(data)), *_MESSAGES
    ),
    decoder(
        "iSER message, 12 bytes",
        lambda data: iser.check_zero_based_untrusted(memoryview(data)),
        *(message[:1] + message[17:] for message in _MESSAGES),
    ),
    decoder("Hello", lambda data: hello.Hello.unpack_untrusted(data, 28), *_HELLOS[:1]),
    decoder("HelloReply", _hello_reply, *_HELLOS[2:]),
    Row("greeting at the initiator", _greeted_initiator, _HELLOS, each=4),
    Row("greeting at the target", _greeted_target, _HELLOS, each=4),
    decoder("iSER flags", iser.ConnectionFlags.unpack, b"\x40\0\0\0", allowed=()),
    Row("byte stream to iSER, target", _streaming_target, _STREAM[0], _GONE, 4),
    Row("byte stream to iSER, initiator", _streaming_initiator, _STREAM[1], _GONE, 4),
    Row("PDU stream", _pdu_stream, _PDUS, each=4),
    Row("session", _session, _ANSWERS, each=6),
    Row("tcp initiator", _tcp_initiator, (), _GONE, 8),
    Row("tcp target", _tcp_target, (), _GONE, 8),
    Row("iser target", _iser_target, _MESSAGES, _GONE, 6),
    Row("session of a target", _target_session, (), _GONE, 8),
)
