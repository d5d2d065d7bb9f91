"""What is read from /proc, of texts and of this process itself."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys

import pytest
from benchlib import proc

# proc(5): name with the worst characters; utime 250, stime 50 in ticks of 10 ms.
STAT = "77 (a) b (c) S 1 77 55 0 -1 4194304 9 8 7 6 250 50 3 2 20 0 9 0 123 1 2"
TCP = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout"
    " inode\n"
    "   0: 0100007F:0CBC 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0"
    " 4711 1 0 100 0 0 10 0\n"
    "   1: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0"
    " 4712 1 0 100 0 0 10 0\n"
    "   2: 0100007F:0CBC 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0"
    " 4713 1 0 100 0 0 10 0\n"
)


def test_cpu_time_is_found_behind_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "TICKS_PER_S", 100)
    assert proc.parse_cpu_seconds(STAT) == 3.0


def test_peak_rss_is_vmhwm_in_bytes() -> None:
    assert proc.parse_peak_rss("Name:\tx\nVmPeak:\t  99 kB\nVmHWM:\t  12 kB\n") == 12 * 1024
    with pytest.raises(proc.NoSuchProcess):
        proc.parse_peak_rss("Name:\tx\nState:\tZ (zombie)\n")


def test_pss_is_in_bytes() -> None:
    text = "55d0-7ffc ---p 00000000 00:00 0  [rollup]\nRss:  99 kB\nPss:  12 kB\nPss_Anon:  7 kB\n"
    assert proc.parse_pss(text) == 12 * 1024
    with pytest.raises(proc.NoSuchProcess):
        proc.parse_pss("")
    before = proc.pss([os.getpid()])
    with mmap.mmap(-1, 64 << 20) as held:  # no allocator can have had it before
        held.write(os.urandom(len(held)))
        assert proc.pss([os.getpid()]) > before + len(held) // 2


@pytest.mark.skipif(sys.byteorder != "little", reason="the table above is of a little-endian host")
def test_listeners_are_those_in_state_listen() -> None:
    assert proc.parse_listeners(TCP) == {"4711": ("127.0.0.1", 3260), "4712": ("0.0.0.0", 8080)}


def test_own_listeners_are_found() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert sock.getsockname() in proc.listening(os.getpid())
        bound = sock.getsockname()
    assert bound not in proc.listening(os.getpid())


def test_own_use_is_read_and_peaks_are_reset() -> None:
    me = [os.getpid()]
    assert proc.cpu_seconds(me) > 0
    proc.reset_peak_rss(me)
    with mmap.mmap(-1, 64 << 20) as block:  # what malloc gets back, the process may keep
        block.write(bytes(len(block)))
        high = proc.peak_rss(me)
    proc.reset_peak_rss(me)
    assert proc.peak_rss(me) <= high - (32 << 20)


def test_family_is_the_process_and_what_it_started() -> None:
    program = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert proc.family(parent.pid) == [parent.pid, child]
            assert proc.lives_in(parent.pid, child)
            assert not proc.lives_in(os.getpid(), child)
        finally:
            os.kill(child, 9)
    assert not proc.lives_in(parent.pid, parent.pid)
    with pytest.raises(proc.NoSuchProcess):
        proc.cpu_seconds([parent.pid])


def test_processor_time_of_the_machine_is_what_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """proc_stat(5): user, nice, system, idle, iowait, … Ticks that a guest has missed are in none
    of these: two processors had 10 s each, and 17.5 s of that were idle."""
    monkeypatch.setattr(proc, "TICKS_PER_S", 100)
    text = "cpu  {} 0 30 {} {} 7 40 3 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\ncpu1 1 1 1 1 1\nintr 5\n\n"
    before = proc.parse_busy_seconds(text.format(100, 9000, 800), 50.0)
    after = proc.parse_busy_seconds(text.format(120, 10700, 850), 60.0)
    assert after - before == pytest.approx(2.5)
    assert proc.busy_seconds() != 0


def test_bytes_of_a_disk_are_sectors_of_512() -> None:
    """Documentation/block/stat.rst: the third and the seventh field, whatever the block size is."""
    text = "  10  1  2048  5  20  2  4096  7  0  9  12  0 0 0 0 3 1\n"
    assert proc.parse_disk_bytes(text, writes=False) == 1 << 20
    assert proc.parse_disk_bytes(text, writes=True) == 2 << 20
