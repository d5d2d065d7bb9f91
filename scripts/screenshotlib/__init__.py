"""The modules of scripts/screenshots.

demonstration.py  targets, NBD servers and an exporter, in namespaces of their own
load.py           NBD clients that keep the servers busy
terminal.py       what a command shows in a terminal, by tmux, as SVG
browser.py        what a page shows, by Chromium, as PNG
png.py            the same picture in fewer colours, and so in fewer bytes
"""

from __future__ import annotations

import sys


class LeftOut(Exception):
    """A picture cannot be made; the text says why, and what to do."""


def say(text: str) -> None:
    """Print one line on stderr, marked with the command's name."""
    print(f"screenshots: {text}", file=sys.stderr, flush=True)
