"""To whom the losses of a LUN are told: each client of the LUN hears of each loss once, as Linux's
errseq_t has it.

A LUN counts its losses: the times at which writes that it had acknowledged were lost for good. A
**client** knows how many of them it was told of. Its next flush fails where the count has grown
since, whether or not the client has written anything: a flush covers what other clients wrote. No
client's flush takes a loss from another client.

A client is *told* when the answer to the flush has reached it. So a flush that fails leaves the
client as it was, and who delivers the answer calls ``Client.told``.

A **new client** knows of the losses that some client was told of. Of those that no client was told
of it hears. So it does of those that a client did not know when it ended (``Client.ended``):
that client may come back as the new one, and repeat the flush whose answer it never got. This is
over when a client that began behind that end was told.
"""

from __future__ import annotations

from collections.abc import Callable

from iserblk.disk.seam import LossCount


class Losses:
    """Losses of one LUN. ``count``: how many there were. ``changed``: called when there is one
    more, or a client was told; it must not raise, nor take long."""

    def __init__(self) -> None:
        self.count = 0
        self.changed: Callable[[], None] = _nothing
        self._told = 0  # a client was told of so many
        self._left: int | None = None  # so many were known to a client that has ended
        self._left_at = 0  # when the last such client ended
        self._clock = 0  # clients that have begun or ended

    def add(self) -> None:
        """There is one more."""
        self.count += 1
        self.changed()

    @property
    def untold(self) -> bool:
        """A client that begins now would hear of a loss."""
        return self._known() < self.count

    def new_client(self) -> Client:
        self._clock += 1
        return Client(self, self._known(), self._clock)

    def only_client(self, before: LossCount, changed: Callable[[], None]) -> Client:
        """See ``DirectDisk.only_client``."""
        self.count += before.losses
        self._told += before.losses
        self._clock += 1
        client = Client(self, before.told, self._clock)
        self.changed = changed
        return client

    def _known(self) -> int:
        left = self._left  # read once: another thread may ask whether a flush is wanted
        return self._told if left is None else min(self._told, left)

    def tell(self, client: Client, count: int) -> None:
        """See ``FlushClient.told``."""
        client.known = max(client.known, count)
        self._told = max(self._told, count)
        if self._left is not None and client.began > self._left_at:
            self._left = None
        self.changed()

    def leave(self, client: Client) -> None:
        """See ``FlushClient.ended``."""
        if client.known < self.count:
            self._clock += 1
            self._left_at = self._clock
            known = client.known
            self._left = known if self._left is None else min(self._left, known)


def _nothing() -> None:
    pass


class Client:
    """Implements FlushClient. ``known``: losses that it was told of. ``began``: when, by the clock
    of ``Losses``."""

    __slots__ = ("_before", "_losses", "began", "known")

    def __init__(self, losses: Losses, known: int, began: int) -> None:
        self.known = known
        self.began = began
        self._losses = losses
        self._before = known

    @property
    def owed(self) -> bool:
        return self._losses.count > self.known

    @property
    def count(self) -> LossCount:
        return LossCount(self._losses.count, self.known)

    def told(self, losses: int) -> None:
        if losses > self.known:
            self._before = self.known
            self._losses.tell(self, losses)

    def unheard(self) -> None:
        self.known = self._before
        self._losses.changed()

    def lost_elsewhere(self, losses: int) -> None:
        self._losses.count += losses
        self._losses.changed()

    def ended(self) -> None:
        self._losses.leave(self)
