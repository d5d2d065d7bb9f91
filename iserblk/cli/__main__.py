"""The entry of ``python3 -m iserblk.cli``."""

import os
import signal
import sys
from types import FrameType


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


# Until ``main`` handles SIGINT: a ^C during the imports must not print a traceback. If SIGINT is
# ignored, as in a shell's background job, it stays ignored.
_HEARD = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _HEARD:
    signal.signal(signal.SIGINT, _end)

# Its modules take a while to load, and the last of them says what SIGHUP does to it; a signal that
# comes before is kept until then. No option before the command has a value of its own.
if next((word for word in sys.argv[1:] if not word.startswith("-")), "") == "target":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

try:
    from iserblk.cli.main import main
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("iserblk"):
        raise
    from iserblk.installation import HERE

    remedy = HERE.python_package(missing.name or "")
    sys.exit(f"iserblk: the Python package {missing.name} is missing: {remedy}")


def run() -> None:
    """The program ``iserblk`` of a wheel."""
    if _HEARD:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    run()
