"""Errors of a store. They stand here because the store is compiled: no class there can inherit from
an error that Python has built in."""

from __future__ import annotations


class StatusError(OSError):
    """Of a store that is a LUN itself: a command has ended there, with ``status`` (SAM) and
    ``sense`` (SPC, b"" if none).

    ``errno`` EBUSY: nothing is lost, and the initiator may send the command again. EIO: what was
    written before may be lost, as after any other OSError of a flush.
    """

    def __init__(self, number: int, text: str, status: int, sense: bytes = b"") -> None:
        super().__init__(number, text)
        self.status = status
        self.sense = sense


class LostError(StatusError):
    """A flush was carried out, but writes before it are lost."""


class WritebackError(OSError):
    """Data that a flush or a durable write was to bring to stable storage may be lost, and so may
    be what other writes before it have left; ``Store.on_loss`` was told of that."""
