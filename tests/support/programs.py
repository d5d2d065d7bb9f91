"""Programs that end by themselves, and how long they may take where the machine is emulated."""

from __future__ import annotations

import subprocess

SLOW_S = 300.0  # for one command


def ended(*words: object, timeout: float = SLOW_S) -> subprocess.CompletedProcess[str]:
    """Run a program, whatever its status. Raises TimeoutExpired when it was killed for that."""
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
    )


def run(*words: object, timeout: float = SLOW_S) -> str:
    """Run a program that must succeed; its stdout."""
    done = ended(*words, timeout=timeout)
    assert done.returncode == 0, done
    return done.stdout
