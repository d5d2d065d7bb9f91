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

try:
    from iserblk.cli.main import main
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("iserblk"):
        raise
    sys.exit(f"iserblk: the Python package {missing.name} is missing: run scripts/setup")

if __name__ == "__main__":
    if _HEARD:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
