"""Golden bytes: messages written down by hand from a specification's text, field by field."""

from __future__ import annotations

from pathlib import Path

VECTORS = Path(__file__).resolve().parents[1] / "vectors"


def golden(name: str) -> bytes:
    """The bytes of ``tests/vectors/NAME.txt``: hexadecimal digits, and behind each # the field and
    its section."""
    lines = (VECTORS / f"{name}.txt").read_text().splitlines()
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines))
