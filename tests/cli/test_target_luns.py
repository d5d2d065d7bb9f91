"""``iserblk target --luns``: LUNs that come and go while the target runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.cli.commands import bad, good_json, serving
from tests.support.target import IQN
from tests.support.until import until_blocking


def test_luns_come_and_go(tmp_path: Path) -> None:
    luns, log = tmp_path / "luns", tmp_path / "log"
    luns.write_text(f"3 {tmp_path}/three:size=1M\n")
    arguments = ["-v", "target", "--listen", "127.0.0.1:0", "--iqn", IQN]
    arguments += ["--lun", f"{tmp_path}/zero:size=1M", "--luns", str(luns)]
    with serving(*arguments, log=log) as server:

        def seen() -> list[tuple[int, int]]:
            return [(disk["lun"], disk["size"]) for disk in good_json("info", server.url)["disks"]]

        def write(text: str, words: str) -> None:
            before = log.read_text().count(words)
            luns.write_text(text)
            os.kill(server.process.pid, signal.SIGHUP)
            until_blocking(lambda: log.read_text().count(words) > before)

        assert seen() == [(0, 1 << 20), (3, 1 << 20)]
        write(f"3 {tmp_path}/three:size=2M\n7 {tmp_path}/seven:size=1M\n", "was read again")
        assert seen() == [(0, 1 << 20), (3, 2 << 20), (7, 1 << 20)]
        write("3 /x:block=9\n", "is left as it is")
        assert len(seen()) == 3
        write(f"7 {tmp_path}/seven\n8 {tmp_path}/zero\n", "LUN 8 is left out")
        until_blocking(lambda: "LUNs gone: [3, 7]; new: [7]" in log.read_text())
        assert seen() == [(0, 1 << 20), (7, 1 << 20)]


def test_a_target_without_any_lun() -> None:
    assert "--luns FILE" in bad(7, "target", "--listen", "127.0.0.1:0", "--iqn", IQN)


def test_a_number_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "luns").write_text("0 /srv/a\n")
    words = ["target", "--iqn", IQN, "--lun", f"{tmp_path}/zero:size=1M", "--luns"]
    assert "LUN 0 is a --lun already" in bad(7, *words, tmp_path / "luns")
