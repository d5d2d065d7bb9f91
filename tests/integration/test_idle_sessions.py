"""What an idle session costs the target: memory, which is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from iserblk.errors import TransportError
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.options import Options
from iserblk.url import parse_url
from tests.integration.conftest import StartTarget
from tests.support.sessions import Host

FIRST, MORE = 8, 32
MOST = 128 << 10  # bytes of the target for each session
PATIENCE_S = 120.0  # only a test that fails ever waits that long


@pytest.mark.parametrize(
    ("scheme", "style"),
    [("iser", "cm"), ("iser", "stream"), ("iscsi", "auto")],
    ids=["iser", "stream", "tcp"],
)
async def test_an_idle_session_takes_little_memory(
    scheme: str, style: str, start_target: StartTarget, tmp_path: Path
) -> None:
    """Each has read once. The first sessions take the memory that all share."""
    (tmp_path / "lun").write_bytes(bytes(1 << 20))
    target = start_target("lun")
    url = parse_url(f"{target.url.replace('iser', scheme, 1)}/0")
    hosts: list[Host] = []
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            before = 0
            for number in range(FIRST + MORE):
                if number == FIRST:
                    before = target.memory
                driver = TrioDriver(await connect(url, Options(style=style)))
                await nursery.start(driver.run)
                hosts.append(Host(driver))
                assert await hosts[-1].read() == bytes(512)
            taken = (target.memory - before) // MORE
            for host in hosts:
                host.session.fail(TransportError("end of test"))
            nursery.cancel_scope.cancel()
    assert taken <= MOST
