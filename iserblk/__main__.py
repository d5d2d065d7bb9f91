"""The entry of ``python3 -m iserblk``."""

from iserblk.cli.__main__ import run

if __name__ == "__main__":
    run()
