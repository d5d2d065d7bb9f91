"""What follows the last Login Response: the greeting, against a target that the test plays."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import pytest
import trio

from iserblk.datamover.iser import HELLO, MINIMUM_LENGTH
from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.initiator.connecting.login import Login, over_rdma
from iserblk.initiator.session.session import Session
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.options import Options
from iserblk.rcap import seam
from iserblk.rcap.inprocess import MemoryQueuePair, memory_pair
from iserblk.url import parse_url
from tests.support.descriptors import descriptors, descriptors_to_begin_with
from tests.support.golden import golden

IQN = "iqn.2026-11.example:disk"
HEAD = b"\x10".ljust(28, b"\0")
PING = pdu.NopIn(itt=bhs.NO_TAG, ttt=7, stat_sn=1, exp_cmd_sn=1, max_cmd_sn=9)


class Target:
    """``greeted`` is called for the Hello. ``heard``: messages behind the login, oldest first.
    ``stat_sn``: of the next answer."""

    def __init__(self, greeted: Callable[[Target], None], level: int = 0) -> None:
        self.ours, self.theirs = memory_pair(ird=9, ord=9)
        self._greeted = greeted
        self._login = LoginTarget(LoginTargetConfig(IQN, 1, error_recovery_level=level))
        self.heard: list[bytes] = []
        self.theirs.post_receive(100)

    @property
    def stat_sn(self) -> int:
        return self._login.stat_sn

    @property
    def is_logged_in(self) -> bool:
        return self._login.done

    def say(self, message: bytes) -> None:
        request = seam.WorkRequest(seam.SEND_SE)
        request.data = memoryview(message)
        self.theirs.post([request])

    async def run(self) -> None:
        while self.theirs.fileno() >= 0:
            await trio.lowlevel.wait_readable(self.theirs.fileno())
            for done in self.theirs.progress(monotonic()):
                assert done.data is not None
                self._take(bytes(done.data))

    def _take(self, message: bytes) -> None:
        if self._login.done:
            self.heard.append(message)
            if message[0] == HELLO:
                self._greeted(self)
            return
        size = int.from_bytes(message[33:36], "big")
        data = message[MINIMUM_LENGTH : MINIMUM_LENGTH + size]
        for header, text in self._login.receive(message[28:MINIMUM_LENGTH], data):
            self.say(HEAD + header + text)


async def log_in(target: Target, options: Options) -> Session:
    url = parse_url(f"iser://10.0.0.1/{IQN}/0")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(target.run)
            session = await Login(over_rdma(target.ours), url, options, "portal:3260").run()
            nursery.cancel_scope.cancel()
    return session


def close(*pairs: MemoryQueuePair) -> None:
    for each in pairs:
        each.close()


async def test_the_session_begins_when_the_hello_is_answered() -> None:
    """The first message behind the login is the Hello; no command can come before its answer.

    proves: ISER-5.1.1-16, ISER-5.1.3-1, ISER-5.1.1-7, ISER-7145-6.10-2, ISER-GEN-2.1.7-1
    proves: ISER-IB00-2.1.8-1
    """
    target = Target(lambda each: each.say(golden("iser/hello-reply-28")))
    session = await log_in(target, Options(hello=True))
    expected = bytearray(golden("iser/hello-28"))
    expected[3] = 9  # the IRD of this connection
    assert target.heard == [bytes(expected)]
    assert session.queue.connection.datamover.greeted and target.ours.ird == 4
    close(target.ours, target.theirs)


# shows: SYSTEM-32
async def test_a_ping_right_behind_the_reply_is_answered() -> None:
    def greeted(target: Target) -> None:
        target.say(golden("iser/hello-reply-28"))
        target.say(HEAD + PING.pack())

    target = Target(greeted)
    session = await log_in(target, Options(hello=True))
    assert session.error is None
    for done in target.theirs.progress(0.0):
        assert done.data is not None
        target.heard.append(bytes(done.data))
    assert target.heard[-1][28] & bhs.OPCODE_MASK == bhs.NOP_OUT
    close(target.ours, target.theirs)


@pytest.mark.parametrize(
    ("greeted", "kind", "words"),
    [
        (
            lambda target: target.say(golden("iser/hello-reply-rej-28")),
            RemoteProtocolError,
            "^iSER: portal:3260: the target rejects this connection",
        ),
        (
            lambda target: target.say(HEAD + PING.pack()),
            RemoteProtocolError,
            "portal:3260: the target's first message is no HelloReply",
        ),
        (
            lambda target: target.say(golden("iser/hello-reply-28")[:12]),
            RemoteProtocolError,
            "portal:3260: a HelloReply of 12 bytes",
        ),
        (lambda target: target.theirs.close(), ConnectionLost, "portal:3260: after the Hello: "),
    ],
    ids=["rejected", "a-pdu", "short", "closed"],
)
async def test_what_comes_instead_fails_the_login(
    greeted: Callable[[Target], None], kind: type[Exception], words: str
) -> None:
    """proves: ISER-10.1.3.2-3, ISER-10.1.3.4-2, ISER-10.1.3.3-1"""
    target = Target(greeted)
    with pytest.RaisesGroup(pytest.RaisesExc(kind, match=words)):
        await log_in(target, Options(hello=True))
    close(target.ours, target.theirs)


async def test_a_connection_that_ends_with_its_login_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a session that may outlive it, and has a descriptor of its own."""
    before = descriptors_to_begin_with()
    target = Target(lambda _each: None, level=2)
    alloc = target.ours.alloc_headers

    def alloc_headers(count: int, size: int) -> list[seam.HeaderSlot]:
        if target.is_logged_in:
            raise ConnectionLost("reset by the peer")
        return alloc(count, size)

    monkeypatch.setattr(target.ours, "alloc_headers", alloc_headers)
    with pytest.RaisesGroup(pytest.RaisesExc(ConnectionLost, match="reset by the peer")):
        await log_in(target, Options(hello=True, error_recovery_level=2))
    close(target.ours, target.theirs)
    assert descriptors() == before
