"""Where a target takes connections: how many at a time, and that nothing stays open."""

from __future__ import annotations

import socket

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from iserblk.errors import Busy
from iserblk.rcap.seam import QueuePair
from iserblk.target.open_portals import OpenPortals
from iserblk.target.ports import ON_TCP, Listen, TargetPort, TargetPorts

PLACE = Listen("127.0.0.1:0")


class Served:
    """The connections of a target that serves each until it is told."""

    def __init__(self, most: int) -> None:
        self.count = self.ended = 0
        self.go_on = trio.Event()
        ports = TargetPorts([PLACE.group], {PLACE.group: ON_TCP})
        self.portals = OpenPortals(ports, most, self._stream, self._queue_pair)

    async def _stream(self, sock: trio.socket.SocketType, port: TargetPort) -> None:
        self.count += 1
        assert port.transports == ON_TCP
        await self.go_on.wait()
        sock.close()
        self.ended += 1

    async def _queue_pair(self, qp: QueuePair, portal: str, peer: str, port: TargetPort) -> None:
        raise AssertionError


@pytest.mark.parametrize("most", [1, 3])
async def test_no_more_connections_at_a_time_than_there_is_room_for(most: int) -> None:
    served = Served(most)
    (portal,) = await served.portals.open([PLACE])
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery, trio.open_nursery() as sessions:
            served.portals.start(nursery, sessions)
            clients = [await trio.open_tcp_stream(portal.host, portal.port) for _ in range(4)]
            while served.count < most:
                await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()
            assert served.count == most
            served.go_on.set()  # each that ends makes room for another
            while served.ended < 4:
                await trio.lowlevel.checkpoint()
            for client in clients:
                await client.aclose()
            nursery.cancel_scope.cancel()
    served.portals.close()


async def test_nothing_listens_behind_the_end() -> None:
    served = Served(1)
    (portal,) = await served.portals.open([PLACE])
    served.portals.close()
    served.portals.close()
    with pytest.raises(ConnectionRefusedError), socket.socket() as sock:
        sock.connect((portal.host, portal.port))


async def test_what_was_opened_before_an_address_that_is_in_use_is_closed_by_close() -> None:
    served = Served(1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = Listen(f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(Busy):
            await served.portals.open([Listen(f"127.0.0.1:{port}"), taken])
        with socket.create_connection(("127.0.0.1", port)):
            pass
        served.portals.close()
        with pytest.raises(ConnectionRefusedError), socket.socket() as sock:
            sock.connect(("127.0.0.1", port))
