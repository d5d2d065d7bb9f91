"""The error of a store that is a LUN itself: it has a SCSI status, and perhaps sense data."""

from __future__ import annotations


class StatusError(OSError):
    """A command has ended with ``status`` (SAM) and ``sense`` (SPC, b"" if none) at the store.

    ``errno`` EBUSY: nothing is lost, and the initiator may send the command again. EIO: what was
    written before may be lost, as after any other OSError of a flush.
    """

    def __init__(self, number: int, text: str, status: int, sense: bytes = b"") -> None:
        super().__init__(number, text)
        self.status = status
        self.sense = sense


class LostError(StatusError):
    """A flush was carried out, but writes before it are lost."""
