"""The end of threads that wait at sockets of a test.

A thread that is about to wait at a descriptor takes what has its number by then: where the test has
closed it meanwhile, that may be a socket of the next test, whose connection the thread takes. So
sockets are shut down, which ends what waits at them, and closed when no thread has them any more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

_AGAIN_S = 0.05  # a thread may just have made another socket


def end_threads(threads: Sequence[threading.Thread], sockets: Sequence[socket.socket]) -> None:
    """Shut the sockets down, wait until the threads have ended, and close the sockets. The threads
    may add to both meanwhile."""
    while alive := [thread for thread in [*threads] if thread.is_alive()]:
        for each in [*sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        alive[0].join(_AGAIN_S)
    for each in sockets:
        each.close()
