"""Runs its argument, statements of Python, as a program: for tests of what starts programs."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
