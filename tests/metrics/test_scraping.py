"""Asking a process for its metrics: what answers, and what does not."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import trio

from iserblk.errors import BadArgument, ConnectFailed, ConnectTimeout, RemoteProtocolError
from iserblk.metrics import scraping
from tests.metrics.answerers import answering, scraped, served
from tests.metrics.test_exposition import EXAMPLE
from tests.support.ports import free_port


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-something\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe",
        b"HTTP/1.0 200 OK\r\n\r\nup 1\n",
        b"HTTP/1.0 200 OK\r\ncontent-length: 9\r\n\r\nnot whole",
        b"HTTP/1.0 200 OK\r\nContent-Length: 10\r\n\r\nnot whole",
        b"HTTP/1.0 200 OK\r\nContent-Length: x\r\n\r\nnot whole",
    ],
)
async def test_somebody_else_answers(answer: bytes, tmp_path: Path) -> None:
    async with answering(tmp_path / "socket", answer):
        with pytest.raises(RemoteProtocolError, match="socket: "):
            await scraped(tmp_path / "socket")


async def test_an_answer_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "ANSWER_BYTES", 10_000)
    async with answering(tmp_path / "socket", b"x" * 20_000):
        with pytest.raises(RemoteProtocolError, match="too long"):
            await scraped(tmp_path / "socket")


async def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "TIMEOUT_S", 0.05)
    path = tmp_path / "socket"
    with pytest.raises(BadArgument, match="no such socket"):
        await scraped(path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        with pytest.raises(ConnectFailed, match="no process serves"):
            await scraped(path)
        other.listen()
        with pytest.raises(ConnectTimeout, match="no answer"):
            await scraped(path)
    with pytest.raises(ConnectFailed, match="no process serves"):
        await scraped(("127.0.0.1", free_port()))


async def test_only_a_socket_of_its_owner_is_asked(tmp_path: Path) -> None:
    """Another user could put a link there, to a server that has nothing to do with iserblk."""
    path, link = tmp_path / "socket", tmp_path / "link"
    link.symlink_to(path)
    me = os.geteuid()

    def ask(place: Path, owner: int) -> object:
        return scraping.scrape(place, owner=owner)

    async with served(path):
        assert await trio.to_thread.run_sync(ask, path, me) == EXAMPLE
        for place, owner in ((link, me), (path, me + 1)):
            with pytest.raises(RemoteProtocolError, match="not a socket of its owner"):
                await trio.to_thread.run_sync(ask, place, owner)
    with pytest.raises(BadArgument, match="no such socket"):
        await trio.to_thread.run_sync(ask, path, me)
