"""The target's registration with an iSNS server, which is written here over memory streams."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import trio
import trio.testing

from iserblk.discovery import isns
from iserblk.discovery.isns import Attribute
from iserblk.iscsi.send_targets import Portal
from iserblk.target.announcing import isns as announcing
from iserblk.target.announcing.announced import Announced
from iserblk.target.announcing.isns import FIRST_RETRY_S, PERIOD_S, Registration

TARGET = "iqn.2026-11.example:disk"
PORTALS = (Portal("127.0.0.1", 3260, 1), Portal("::1", 3260, 2))
ANNOUNCED = Announced(TARGET, PORTALS, lambda: None)
NOT_AUTHORIZED = 8
INVALID_UPDATE = 14


class Server:
    """``heard``: time, function, flags and attributes of each request. ``answer``: status and
    attributes of a response. ``down``: nothing listens. ``silent``: it takes connections, and no
    more. ``here``: our address of a connection."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, int, int, list[Attribute]]] = []
        self.answer: Callable[[int, int], tuple[int, list[Attribute]]] = lambda *_: (0, [])
        self.down = self.silent = False
        self.here = "192.0.2.1"
        self.nursery: trio.Nursery

    async def connect(self, host: str, port: int) -> Stream:
        assert (host, port) == ("server", 3205)
        await trio.lowlevel.checkpoint()
        if self.down:
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = trio.testing.memory_stream_pair()
        if not self.silent:
            self.nursery.start_soon(self._serve, theirs)
        return Stream(ours, self.here)

    async def _serve(self, stream: trio.abc.Stream) -> None:
        data = b""
        while len(data) < isns.HEADER.size:
            data += await stream.receive_some()
        _, function, length, flags, transaction, _ = isns.HEADER.unpack_from(data)
        while len(data) < isns.HEADER.size + length:
            data += await stream.receive_some()
        attributes = isns.attributes_untrusted(data[isns.HEADER.size :])
        self.heard.append((trio.current_time(), function, flags & isns.REPLACE, attributes))
        status, answer = self.answer(function, flags & isns.REPLACE)
        payload = status.to_bytes(4, "big") + isns.encode_attributes(answer)
        header = isns.HEADER.pack(1, function | isns.RESPONSE, len(payload), 0x4C00, transaction, 0)
        await stream.send_all(header + payload)

    @property
    def said(self) -> list[tuple[int, int]]:
        """Function and REPLACE of each request."""
        return [(function, flags) for _, function, flags, _ in self.heard]


class Stream:
    """A memory stream with the address of a socket."""

    def __init__(self, stream: trio.abc.Stream, here: str) -> None:
        self._stream = stream
        self.socket = self
        self._here = here

    def getsockname(self) -> tuple[str, int]:
        return self._here, 5

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.aclose()

    async def send_all(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive_some(self, size: int) -> bytes:
        return bytes(await self._stream.receive_some(size))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(announcing, "connect", made.connect)
    return made


async def registered(server: Server, seconds: float, *portals: Portal) -> None:
    """Be registered for so long, then end."""
    async with trio.open_nursery() as server.nursery:
        with trio.move_on_after(seconds):
            await Registration(
                ("server", 3205), Announced(TARGET, portals or PORTALS, lambda: None)
            ).run()


REGISTER, AGAIN, LEAVE = (
    (isns.DEV_ATTR_REG, isns.REPLACE),
    (isns.DEV_ATTR_REG, 0),
    (isns.DEV_DEREG, 0),
)


async def test_a_registration_is_repeated_until_it_ends(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    """The first replaces what was there; the last message removes the entity."""
    await registered(server, PERIOD_S)
    assert server.said == [REGISTER, AGAIN, AGAIN, LEAVE]
    times = [at - server.heard[0][0] for at, *_ in server.heard]
    assert times == pytest.approx([0, PERIOD_S / 3, 2 * PERIOD_S / 3, PERIOD_S])
    assert server.heard[-1][3][-1] == isns.text(isns.ENTITY_IDENTIFIER, TARGET)


@pytest.mark.parametrize(("says", "period"), [(30, 30), (1, 10), (0, PERIOD_S), (7200, PERIOD_S)])
async def test_the_period_is_the_servers(
    says: int, period: int, server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    """But a longer one does not make the target silent for longer, nor a short one a nuisance."""
    server.answer = lambda *_: (
        0,
        [Attribute(isns.DELIMITER, b""), isns.number(isns.REGISTRATION_PERIOD, says)],
    )
    await registered(server, period * 0.5)
    assert server.said == [REGISTER, AGAIN, LEAVE]


async def test_portals_of_all_addresses(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    """They are registered as the address from which the server is reached, in its family."""
    for here, expected in (
        ("192.0.2.1", [("192.0.2.1", 1), ("192.0.2.1", 3), ("10.0.0.1", 4)]),
        ("fe80::1%eth0", [("fe80::1", 3), ("10.0.0.1", 4)]),
    ):
        server.here = here
        server.heard.clear()
        await registered(
            server, 1, Portal("0.0.0.0", 1, 1), Portal("::", 3, 1), Portal("10.0.0.1", 4, 2)
        )
        attributes = server.heard[0][3]
        found = isns.portals_untrusted(attributes, TARGET, [])
        assert [(each.host, each.port) for each in found] == expected
        assert found[-1].tag == 2


@pytest.mark.logs(
    "not registered with iSNS: isns://server:3205: cannot connect: Connection refused"
)
async def test_a_server_that_is_down_is_asked_again(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    server.down = True
    async with trio.open_nursery() as server.nursery:
        with trio.move_on_after(3.5 * FIRST_RETRY_S):
            await Registration(("server", 3205), ANNOUNCED).run()
        assert not server.heard  # and nothing is said at the end
        with trio.move_on_after(10 * FIRST_RETRY_S):
            server.nursery.start_soon(_up_after, server, 2 * FIRST_RETRY_S)
            await Registration(("server", 3205), ANNOUNCED).run()
    assert server.said == [REGISTER, LEAVE]


async def _up_after(server: Server, seconds: float) -> None:
    await trio.sleep(seconds)
    server.down = False


async def test_a_server_that_has_forgotten_the_target(
    server: Server, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What refuses an update gets a new registration at once."""
    server.answer = lambda function, flags: (0 if flags else INVALID_UPDATE, [])
    with caplog.at_level(logging.INFO):
        await registered(server, PERIOD_S * 0.5)
    assert server.said == [REGISTER, AGAIN, REGISTER, LEAVE]
    assert caplog.text.count("registered as an iSNS entity") == 2


async def test_a_server_that_refuses(
    server: Server, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The same refusal is logged once."""
    server.answer = lambda *_: (NOT_AUTHORIZED, [])
    await registered(server, 10 * FIRST_RETRY_S)
    assert server.said == [REGISTER] * 4
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "the source is not authorized; admit this node's name" in line


async def test_a_server_that_says_nothing(
    server: Server, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither at the start, nor at the end, which takes two seconds then."""
    server.silent = True
    await registered(server, announcing.ANSWER_S + 1)
    assert "no answer within 20 s" in caplog.text
    server.silent = False
    async with trio.open_nursery() as server.nursery:
        began = trio.current_time()
        with trio.move_on_after(1):
            server.nursery.start_soon(_fall_silent, server)
            await Registration(("server", 3205), ANNOUNCED).run()
        assert trio.current_time() - began == pytest.approx(1 + announcing.DEREGISTER_S)
    assert server.said == [REGISTER]


async def _fall_silent(server: Server) -> None:
    await trio.sleep(0.5)
    server.silent = True
