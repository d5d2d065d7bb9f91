"""The exporter's page in a browser: its policy lets its style and script work, and the numbers are
replaced by newer ones."""

from __future__ import annotations

import shutil
import socket
import subprocess
from functools import partial
from pathlib import Path

import pytest
import trio

from iserblk.cli.watch.page import POLICY, page
from iserblk.metrics.serving import Page, serve_document
from tests.support.target import END_S
from tests.support.watched import example

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--virtual-time-budget=10000", "--dump-dom",
)  # fmt: skip


async def _metrics() -> tuple[str, bytes]:
    return "text/plain", b""


async def test_it_updates_by_itself(tmp_path: Path) -> None:
    """The first answer is replaced, in the place of the document that shows it."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    history = example(20)
    answers = 0

    async def made(query: bytes) -> bytes:
        nonlocal answers
        answers += 1
        return page(history, query, "first" if answers == 1 else "later")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_document, listening, _metrics, None, Page(made, POLICY))
            done = await trio.to_thread.run_sync(
                partial(
                    subprocess.run,
                    [chromium, *_OPTIONS, f"--user-data-dir={tmp_path}", url],
                    capture_output=True,
                    text=True,
                    timeout=END_S * 4,
                    check=True,
                )
            )
            nursery.cancel_scope.cancel()
    assert answers > 1
    assert "<title>iserblk: first</title>" in done.stdout
    assert "<h1>iserblk: later</h1>" in done.stdout
    assert "Content Security Policy" not in done.stderr
