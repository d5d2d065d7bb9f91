"""Listeners: objects that follow the commands of one LUN, and clean up before the logout."""

from __future__ import annotations

from typing import Protocol

from iserblk.commands.command import Command, Operation


class LunListener(Protocol):
    """Follows one LUN of a session. A subclass leaves out what it does not need.

    ``hear``, ``doubt``, ``retried`` and ``tick`` raise nothing. A LUN may have several listeners;
    none depends on what another does.
    """

    def hear(self, slot: Command) -> None:
        """A command ended with a status other than GOOD and ``slot.sense``. Runs inside
        ``Session.progress``, before the waiter of the slot is told."""

    def doubt(self) -> None:
        """Another LUN of the target has told that the list of LUNs has changed. Runs as ``hear``
        does."""
        return

    def reassure(self, deadline: float) -> Operation[None]:
        """Return when it is certain that the LUN is the one in use. Raises why nothing may be sent
        to it, or CommandTimeout."""
        yield from ()

    def retried(self) -> None:
        """A command is sent again."""
        return

    def tick(self) -> None:
        """About a second has passed since the last call. Runs where ``Session.progress`` does."""
        return

    def unflushed(self) -> bool:
        """Whether something that was acknowledged is not on stable storage, so that a report of the
        target that nobody hears might hide a loss. Runs where ``Session.progress`` does."""
        return False

    def before_logout(self) -> Operation[None]:
        """The operation that the driver runs before it logs out. Raises nothing."""
        yield from ()


class LunListeners:
    """The listeners of one session, by LUN field."""

    def __init__(self) -> None:
        self._of: dict[bytes, list[LunListener]] = {}

    def add(self, lun: bytes, listener: LunListener) -> None:
        """From now on ``listener`` follows that LUN, if it did not before."""
        listeners = self._of.setdefault(lun, [])
        if listener not in listeners:
            listeners.append(listener)

    def remove(self, lun: bytes, listener: LunListener) -> None:
        self._of[lun].remove(listener)

    def hear(self, slot: Command) -> None:
        """See LunListener."""
        for listener in self._of.get(slot.lun, ()):
            listener.hear(slot)

    def doubt(self) -> None:
        """See LunListener; of all LUNs."""
        for listeners in list(self._of.values()):
            for listener in listeners:
                listener.doubt()

    def reassure(self, lun: bytes, deadline: float) -> Operation[None]:
        """See LunListener."""
        for listener in self._of.get(lun, ()):
            yield from listener.reassure(deadline)

    def retried(self, lun: bytes) -> None:
        """See LunListener."""
        for listener in self._of.get(lun, ()):
            listener.retried()

    def tick(self) -> None:
        """See LunListener."""
        for listeners in list(self._of.values()):  # other threads add LUNs
            for listener in listeners:
                listener.tick()

    def unflushed(self, lun: bytes) -> bool:
        """See LunListener."""
        return any(listener.unflushed() for listener in self._of.get(lun, ()))

    def any_unflushed(self) -> bool:
        """Whether that is so of any LUN."""
        return any(self.unflushed(lun) for lun in list(self._of))

    def before_logout(self) -> Operation[None]:
        """Run what the listeners of all LUNs want done before the logout."""
        for listeners in self._of.values():
            for listener in listeners:
                yield from listener.before_logout()
