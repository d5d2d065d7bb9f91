"""The device goes away under connections that are at work."""

from __future__ import annotations

import subprocess
import sys
from time import monotonic

from tests.rcap.verbs.suite import lab_address

LAB_OWN_GUEST = True
PATIENCE_S = 60

# In a process of its own: rxe waits with its end until every process has let go of it.
WORKER = """
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
while None in driver.errors:
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
        driver.events[1].clear()
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


def test_the_device_is_removed_in_mid_transfer() -> None:
    for mode in ("region", "window"):
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, lab_address(), mode], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        assert worker.stdout.readline() == "working\n"
        removal = subprocess.Popen(["rdma", "link", "delete", "rxe0"])
        started = monotonic()
        output, _ = worker.communicate(timeout=PATIENCE_S)
        assert monotonic() - started < PATIENCE_S
        removal.wait(PATIENCE_S)
        assert "the RDMA device was removed" in output, output
        assert worker.returncode == 0
        link = ["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "dummy0"]
        subprocess.check_call(link)
