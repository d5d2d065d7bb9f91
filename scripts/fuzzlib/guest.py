"""``python -m fuzzlib.guest``: targets under atheris, one after the other.

A line of standard input is JSON: the name of a target, the file that its output goes to, and
options of libFuzzer, which ends the process that it is in. So each target has a process of its own,
forked from this one, which has imported and instrumented all modules once. The answer is a line
with the status of that process.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys

import atheris


def _run(name: str, log: str, words: list[str]) -> None:
    """Ends the process, in most cases. An exception has to reach its end: then libFuzzer writes the
    input into a file."""
    from tests.fuzz import guided, table  # noqa: PLC0415 (instrumented before)

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    row = table.ROWS.get(name, table.PLANTED)

    def one(data: bytes) -> None:
        guided.run_input(row, data)

    atheris.Setup([sys.argv[0], *words], one)
    atheris.Fuzz()


def main() -> None:
    # First the package alone, which chooses the form of its modules: its finder has to come behind
    # that of atheris.
    importlib.import_module("iserblk")
    with atheris.instrument_imports(include=["iserblk"]):
        from tests.fuzz import table  # noqa: PLC0415
    atheris.instrument_func(table.planted)  # which is in no module of iserblk
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        name, log, words = json.loads(line)
        pid = os.fork()
        if not pid:
            _run(name, log, words)
            sys.exit(1)  # by way of libFuzzer, which looks whether it was to end
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
