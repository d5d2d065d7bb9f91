"""Layouts that are written or read often, and what a buffer is, in one quick call each.

scripts/setup compiles them (``_octets.pyx``). What is here does the same where that was not
possible. ``struct`` looks at a value for a while before it writes it, and a memoryview makes an
object of each of its attributes: to write a BHS takes half of the instructions here, to read a BHS
two thirds, and to look at a buffer a third.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any


def packer(layout: Struct) -> Callable[..., None]:
    """``layout.pack_into``, with positions alone, and an offset that is not negative. The layout
    has big-endian numbers (B, H, I, Q), bytes and pads only. Bind the result once, as a constant.
    """
    try:
        from iserblk._octets import Layout  # noqa: PLC0415 (may be missing)
    except ImportError:
        return layout.pack_into
    return Layout(layout.format).pack_into


def unpacker(layout: Struct) -> Callable[..., Any]:
    """``layout.unpack_from``, with a buffer and an offset that is not negative, both by position.
    The layout is as for ``packer``; so is what to do with the result."""
    try:
        from iserblk._octets import Layout  # noqa: PLC0415 (may be missing)
    except ImportError:
        return layout.unpack_from
    return Layout(layout.format).unpack_from


def _is_flat(buffer: memoryview, writable: bool) -> bool:
    """Whether the buffer is a memoryview of contiguous bytes ("B", one dimension), and with
    ``writable`` may be written to."""
    return (
        isinstance(buffer, memoryview)
        and buffer.format == "B"
        and buffer.ndim == 1
        and buffer.c_contiguous
        and not (writable and buffer.readonly)
    )


try:
    from iserblk._octets import is_flat
except ImportError:
    is_flat = _is_flat

__all__ = ["is_flat", "packer", "unpacker"]
