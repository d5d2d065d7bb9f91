"""In the guest: programs that must succeed."""

from __future__ import annotations

import subprocess

_PROGRAM_S = 900


def run(*words: object) -> str:
    """Its stdout. Raises RuntimeError with its last line."""
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=_PROGRAM_S,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{' '.join(map(str, words))}: {said[-1] if said else done.returncode}")
    return done.stdout
