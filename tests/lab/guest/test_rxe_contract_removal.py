"""The device is removed while connections work.

rxe cannot take a device away from a process. Where the kernel tells rdma_cm's clients first, the
queue pair gets the event and ends. Where the kernel first waits for the process's verbs context
(that depends on the order in which the modules were loaded) no event comes: the connection goes on
working, and the removal ends with the process, as librdmacm keeps its context until then.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from time import monotonic

from tests.rcap.verbs.suite import lab_address

LAB_FIRST = True  # what other tests open in their process stays open, and the removal would wait
PATIENCE_S = 60
TOLD_S = 10

# In a process of its own: rxe is not removed before every process has given it up.
WORKER = """
import os
import select
import sys
from time import monotonic
from iserblk.errors import ConnectionLost
from iserblk.rcap import seam
from iserblk.rcap.verbs.connecting import VerbsConnector
from tests.rcap.verbs.pairs import verbs_pair
from tests.rcap.wire import Driver, pattern, rdma_request

driver = Driver(*verbs_pair(sys.argv[1], sys.argv[2]))
a, b = driver.pairs
memory, data = bytearray(1 << 20), pattern(1 << 20)
stag, base = a.advertise(memoryview(memory), seam.REMOTE_WRITE)
requests = [rdma_request(seam.RDMA_WRITE, data, stag, base, n) for n in range(4)]
for request in requests:
    request.signaled = True
print("working", flush=True)
longest = 0.0
done, told = 0, []
while None in driver.errors:
    if select.select([0], [], [], 0)[0]:
        if not os.read(0, 1):
            break
        told.append(done)
    for index in (0, 1):
        before = monotonic()
        if index and driver.errors[1] is None and not driver.events[1]:
            try:
                b.post(requests)
            except ConnectionLost:
                pass
        driver.step(index)
        longest = max(longest, monotonic() - before)
    if len(driver.events[1]) >= len(requests):
        done += len(driver.events[1])
        driver.events[1].clear()
print("transfers meanwhile:", done - told[0] if told else None)
print("ended:", driver.errors, flush=True)
for pair in driver.pairs:
    before = monotonic()
    pair.close()
    longest = max(longest, monotonic() - before)
print(f"longest {longest:.3f}", flush=True)
try:
    connector = VerbsConnector(sys.argv[1], 3260, private_data=b"", receive_size=100, receives=1,
                               ird=1, timeout=5)
except Exception as error:
    print("afterwards:", type(error).__name__, error, flush=True)
else:
    connector.close()
    print("afterwards: a connector", flush=True)
"""


def remove_under(mode: str) -> str:
    """Remove the device under a process at work; what the process reports, and whether it got the
    event or the kernel waited for it."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, lab_address(), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin is not None and worker.stdout is not None
    with worker:
        assert worker.stdout.readline() == b"working\n"
        removal = subprocess.Popen(["rdma", "link", "delete", "rxe0"])
        worker.stdin.write(b"x")
        worker.stdin.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(TOLD_S)
        waits = worker.poll() is None
        if waits:
            assert "ib_uverbs_remove_one" in Path(f"/proc/{removal.pid}/stack").read_text()
        started = monotonic()
        output, _ = worker.communicate(timeout=PATIENCE_S)  # which closes its input
        assert removal.wait(PATIENCE_S) == 0
        assert monotonic() - started < PATIENCE_S
        assert worker.returncode == 0
    return f"{'waited' if waits else 'told'}: {output.decode()}"


def test_the_device_is_removed_in_mid_transfer() -> None:
    for mode in ("region", "window"):
        said = remove_under(mode)
        if said.startswith("told"):
            assert "the RDMA device was removed" in said, said
        else:
            meanwhile = said.partition("transfers meanwhile: ")[2].splitlines()[0]
            assert int(meanwhile) > 0, said
        subprocess.check_call(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "dummy0"])
