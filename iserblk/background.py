"""A process in the background: it has no terminal, and its log goes to syslog."""

from __future__ import annotations

import logging
import logging.handlers
import os

from iserblk.printable import PrintableFormatter

SYSLOG = "/dev/log"


def log_to_syslog(name: str) -> None:
    """From now on, log to syslog as ``name`` instead of anywhere else; nowhere on a machine without
    syslog."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    if os.path.exists(SYSLOG):
        syslog = logging.handlers.SysLogHandler(SYSLOG, logging.handlers.SysLogHandler.LOG_DAEMON)
        syslog.setFormatter(PrintableFormatter(f"{name}[{os.getpid()}]: %(message)s"))
        root.addHandler(syslog)
    else:
        root.addHandler(logging.NullHandler())  # else Python prints warnings on stderr


def release_streams() -> None:
    """Replace the standard streams by /dev/null, so that their readers see the end."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
