"""Answerers of metrics, right ones and wrong ones."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from iserblk.metrics.address import Address
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.scraping import scrape
from iserblk.metrics.serving import Listener, serve
from tests.metrics.test_exposition import EXAMPLE


@asynccontextmanager
async def served(address: Address) -> AsyncIterator[None]:
    listener = Listener(address)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, lambda: EXAMPLE)
        yield
        nursery.cancel_scope.cancel()


async def scraped(address: Address) -> ProcessReading:
    return await trio.to_thread.run_sync(scrape, address)


async def connected(address: Address) -> trio.SocketStream:
    if isinstance(address, Path):
        return await trio.open_unix_socket(address)
    return await trio.open_tcp_stream(*address)


async def said(address: Address, *parts: bytes, to_end: bool = False) -> bytes:
    """Send ``parts``; returns the answer, up to where the other side closes."""
    async with await connected(address) as stream:
        for part in parts:
            await stream.send_all(part)
            await trio.testing.wait_all_tasks_blocked()
        if to_end:
            await stream.send_eof()
        return b"".join([part async for part in stream])


@asynccontextmanager
async def answering(path: Path, answer: bytes) -> AsyncIterator[None]:
    async def attend(stream: trio.SocketStream) -> None:
        await stream.receive_some(100)
        await stream.send_all(answer)
        await stream.aclose()

    with trio.socket.socket(socket.AF_UNIX) as sock:
        await sock.bind(str(path))
        sock.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, attend, [trio.SocketListener(sock)])
            yield
            nursery.cancel_scope.cancel()
