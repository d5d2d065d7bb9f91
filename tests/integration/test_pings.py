"""Pings (NOP-In) of our target, answered by libiscsi, in QEMU."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest
import trio

from iserblk.iscsi import bhs, pdu
from iserblk.target.iscsi.control import ControlAnswers
from iserblk.target.lunspec import open_lun, parse_lun_spec
from tests.support.interop import Record, package
from tests.support.target_here import serve

IQN = "iqn.2026-11.example:pings"
PATIENCE_S = 60
ENOUGH = 2  # answers: the session went on after the first


async def test_libiscsi_answers(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle session stays, and goes on. (QEMU pings by itself, but less often than the target
    does here.) proves: ISER-7.3.6-20"""
    monkeypatch.setattr("iserblk.target.attending.PING_S", 1.0)
    answered: list[int] = []
    enough = trio.Event()
    heard = ControlAnswers.heard

    def spy(answers: ControlAnswers, message: memoryview, at: int) -> None:
        header = pdu.NopOut.unpack_from(message, at)
        if header.opcode & bhs.OPCODE_MASK == bhs.NOP_OUT and header.itt == bhs.NO_TAG:
            answered.append(header.ttt)
            if len(answered) >= ENOUGH:
                enough.set()
        heard(answers, message, at)

    monkeypatch.setattr(ControlAnswers, "heard", spy)
    unit = open_lun(parse_lun_spec(f"{tmp_path / 'disk'}:size=8M"), "pings")
    send, receive = trio.open_memory_channel[str](1)
    said = b""
    try:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(serve, "127.0.0.1:0", IQN, {0: unit}, send.send_nowait))
                url = (await receive.receive()).replace("iser:", "iscsi:")
                process = await trio.lowlevel.open_process(
                    ["qemu-io", "-f", "raw", f"{url}/0"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                assert process.stdin is not None and process.stdout is not None
                try:
                    await process.stdin.send_all(b"write -P 7 0 64k\n")
                    await enough.wait()
                    await process.stdin.send_all(b"read -P 7 0 64k\n")
                    await process.stdin.aclose()  # which ends it
                    async for part in process.stdout:
                        said += part
                finally:
                    process.kill()
                    await process.stdout.aclose()
                    with trio.CancelScope(shield=True):  # it is gone already
                        await process.wait()
                nursery.cancel_scope.cancel()
    finally:
        unit.close()
    assert b"wrote 65536/65536" in said and b"read 65536/65536" in said, said
    assert b"failed" not in said and len(set(answered)) == len(answered)
    record(
        ours="target",
        peer="libiscsi, in QEMU",
        version=package("qemu-block-extra"),
        transport="TCP",
        ran="qemu-io: a write and a read; pings of the target in between are answered",
    )
