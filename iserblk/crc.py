"""CRC32C, of MPA (RFC 5044 section 4.4) and of iSCSI's digests (RFC 7143 section 13.1).

``crc32c(data, value=0)``: of contiguous bytes; with ``value``, the CRC of what came before them,
of both together. It is compiled by scripts/setup on top of ISA-L, which takes half the time of the
package that stands in where that is missing. Raises TypeError or BufferError for what is not bytes.
"""

from __future__ import annotations

try:
    from iserblk._crc import crc32c
except ImportError:
    from crc32c import crc32c

__all__ = ["crc32c"]
