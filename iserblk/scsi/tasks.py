"""What belongs to a task beside its CDB (SAM-5): its attribute, and where its data goes."""

from __future__ import annotations

from typing import Final

# Task attributes. Their numbers are those of a SCSI Command PDU (RFC 7143 section 11.3.1). UNTAGGED
# and reserved values count as SIMPLE. ACA cannot occur: there is no ACA condition (NORMACA 0).
UNTAGGED: Final = 0
SIMPLE: Final = 1
ORDERED: Final = 2
HEAD_OF_QUEUE: Final = 3
ACA: Final = 4

# Where the data goes. The numbers between these are those of ``iserblk.datamover.seam``.
NO_DATA: Final = 0
READ: Final = 2  # Data-In
WRITE: Final = 3  # Data-Out
BIDIRECTIONAL: Final = 5
