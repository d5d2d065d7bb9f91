"""The server of one device, as a process of its own:

    python -P -m iserblk.nbd.kernel.serving SOCKET FD uri=URL… NAME=VALUE…

It listens at SOCKET, and serves until its last client has gone: the kernel. To the descriptor FD it
writes that it is ready, or why it cannot serve (module ``orders``). It logs to syslog.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from iserblk.background import log_to_syslog, release_streams
from iserblk.errors import IserblkError
from iserblk.nbd.kernel import client
from iserblk.nbd.kernel.device import Device, Places
from iserblk.nbd.kernel.orders import READY, from_words, refusal
from iserblk.nbd.kernel.state import Home
from iserblk.nbd.listening import listen_unix
from iserblk.nbd.serving import serve

log = logging.getLogger(__name__)


def _serve(path: str, pipe: int, words: Sequence[str]) -> None:
    urls, options = from_words(words)
    run = Path(path).parent
    home = Home(Device(run.name, Places(run=run.parent)))

    def ready() -> None:
        release_streams()
        os.write(pipe, READY)
        os.close(pipe)

    def resized(_name: str, size: int) -> None:
        try:
            client.resize(home, size)
        except IserblkError as error:
            log.warning("%s", error)

    with listen_unix(path) as (sockets, _uri):
        serve(urls, options, sockets, ready, lambda: None, until_unused=True, resized=resized)


def main(arguments: Sequence[str]) -> int:
    """The body of the process; returns its exit status."""
    path, descriptor, *words = arguments
    pipe = int(descriptor)
    os.set_inheritable(pipe, False)
    log_to_syslog(f"iserblk-{Path(path).parent.name}")
    try:
        _serve(path, pipe, words)
    except IserblkError as error:
        said, status = str(error), error.exit_status
    except OSError as error:
        said, status = error.strerror or str(error), IserblkError.exit_status
    except Exception:
        log.exception("internal error")
        said, status = "the server: internal error; syslog has more", IserblkError.exit_status
    else:
        return 0
    try:
        os.write(pipe, refusal(said, status))
    except OSError:  # ready() has closed it
        log.error("%s", said)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
