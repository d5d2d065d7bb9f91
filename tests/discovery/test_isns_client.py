"""A server of iSNS that tells not everything: what it does tell counts. (Debian's server:
tests/integration/test_isns_server.py.)"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from iserblk.discovery import isns, isns_client
from iserblk.discovery.isns_client import ask_isns
from iserblk.errors import IserblkError, RemoteProtocolError
from iserblk.iscsi.send_targets import Portal, TargetRecord
from iserblk.options import Options
from iserblk.url import parse_place
from tests.discovery.test_isns import END, OTHER, TARGET, US, group

REFUSED, INTERNAL = 9, 11  # no such entry; internal error
OPTIONS = Options(initiator_name=US)


def answer(message: isns.Message, portals: dict[str, bytes]) -> bytes:
    """The payload of a response. ``portals``: by target, the payload about its portals."""
    asked = isns.attributes_untrusted(message.payload)
    key = asked[1] if len(asked) > 1 else END
    if message.function != isns.DEV_ATTR_QRY:
        return bytes(4)
    if key.tag == isns.ISCSI_NODE_TYPE:
        nodes = [
            attribute
            for name in portals
            for attribute in (
                isns.text(isns.ISCSI_NAME, name),
                isns.number(isns.ISCSI_NODE_TYPE, 1),
            )
        ]
        return bytes(4) + isns.encode_attributes([END, *nodes])
    if key.tag == isns.GROUP_ISCSI_NAME:
        return portals[isns.text_untrusted(key)]
    return struct.pack(">I", REFUSED)  # we are not registered


@asynccontextmanager
async def serving(portals: dict[str, bytes]) -> AsyncIterator[str]:
    """Yields the URL of the server."""

    async def serve(stream: trio.SocketStream) -> None:
        reader = isns.MessageReader()
        async for data in stream:
            for message in reader.feed(bytes(data)):
                said = answer(message, portals)
                flags = isns.SERVER | isns.FIRST | isns.LAST
                function = message.function | isns.RESPONSE
                header = isns.HEADER.pack(1, function, len(said), flags, message.transaction, 0)
                await stream.send_all(header + said)

    async with trio.open_nursery() as nursery:
        listen = partial(trio.serve_tcp, serve, 0, host="127.0.0.1")
        (listener,) = await nursery.start(listen)
        yield f"isns://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


def about(*attributes: isns.Attribute) -> bytes:
    return bytes(4) + isns.encode_attributes([END, *attributes])


async def test_one_target_of_which_it_does_not_tell() -> None:
    """It is named. Asked for alone, it is an error."""
    good = Portal("192.0.2.2", 3260, 1)
    known = {
        TARGET: struct.pack(">I", INTERNAL),
        OTHER: about(*group(OTHER, good.host, 3260, 1)),
    }
    async with serving(known) as url:
        told = await ask_isns(parse_place(url), OPTIONS)
        assert told.targets == [TargetRecord(OTHER, (good,))]
        (words,) = told.left_out
        assert words.startswith(f"{TARGET}: ") and "internal error" in words
        with pytest.raises(IserblkError, match="internal error"):
            await ask_isns(parse_place(f"{url}/{TARGET}"), OPTIONS)


async def test_one_portal_that_cannot_be_read() -> None:
    good = Portal("192.0.2.2", 3260, 1)
    short = isns.Attribute(isns.GROUP_ADDRESS, bytes(4))
    odd = [short if each.tag == short.tag else each for each in group(TARGET, "::", 3260, 1)]
    known = {TARGET: about(*odd, *group(TARGET, good.host, 3260, 1))}
    async with serving(known) as url:
        told = await ask_isns(parse_place(url), OPTIONS)
        assert told.targets == [TargetRecord(TARGET, (good,))]
        (words,) = told.left_out
        assert words.startswith(f"a portal of {TARGET}: ") and "no IP address" in words


async def test_more_than_it_may_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isns_client, "MAXIMUM_RECORDS", 3)
    portals = [part for port in range(1, 5) for part in group(TARGET, "192.0.2.2", port, 1)]
    async with serving({TARGET: about(*portals)}) as url:
        with pytest.raises(RemoteProtocolError, match="more than 3 portals"):
            await ask_isns(parse_place(url), OPTIONS)
