"""CRC32C, as MPA (RFC 5044 section 4.4) and iSCSI's digests (RFC 7143 section 13.1) use it.

``crc32c(data, value=0)``: the CRC of contiguous bytes. ``value`` is the CRC of the bytes before
them; the result is then that of both together. scripts/setup compiles it on top of ISA-L. Without
ISA-L the package crc32c is used, which takes twice the time. Raises TypeError or BufferError if
``data`` is not bytes.
"""

from __future__ import annotations

try:
    from iserblk._crc import crc32c
except ImportError:
    from crc32c import crc32c  # type: ignore[no-redef, unused-ignore] # where mypy does not find it

__all__ = ["crc32c"]
