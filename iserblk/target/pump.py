"""What comes on a connection of the target, and what is to leave: plain calls, in no task."""

from __future__ import annotations

from collections.abc import Callable

from iserblk.errors import TransportError
from iserblk.loop.busy_polling import pace_of
from iserblk.loop.clock import monotonic
from iserblk.loop.here import loop_here
from iserblk.loop.seam import Watch
from iserblk.target.iscsi.connection import TargetConnection


class Pump:
    """Calls ``progress`` of a connection whenever data comes, and when a socket that was full takes
    more.

    ``logged_in`` is called once, at the end of login, and ``over`` when the connection has ended;
    then ``problem`` is what ``progress`` has raised, if anything. Implements ConnectionDriver.
    """

    def __init__(
        self,
        connection: TargetConnection,
        busy_poll_us: int,
        logged_in: Callable[[], None],
        over: Callable[[], None],
    ) -> None:
        self.problem: BaseException | None = None
        self._connection = connection
        self._fd = connection.fileno()
        self._pace = pace_of(busy_poll_us)
        self._loop = loop_here()
        self._watch: Watch | None = None
        self._full = False  # the socket takes no more: output waits
        self._in_login = True
        self._stopped = False
        self._logged_in = logged_in
        self._over = over

    def begin(self) -> None:
        """Raises TransportError when the system cannot wait for the descriptor."""
        try:
            self._watch = self._loop.watch(self._fd, self._come)
        except OSError as error:
            raise TransportError(f"cannot wait for the initiator: {error.strerror}") from None
        self._connection.driver = self

    def end(self) -> None:
        """To be called before the descriptor is closed."""
        self._stopped = True
        if self._watch is not None:
            self._watch.close()

    def ended(self) -> None:
        """Implements ConnectionDriver."""
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        self._over()

    def _come(self) -> None:
        """Data has come, or the end of the connection; or the socket takes more."""
        if self._stopped:
            return
        try:
            self._turn()
        except BaseException as error:
            self.problem = error
            self._stop()

    def _turn(self) -> None:
        connection = self._connection
        connection.silent = 0
        pace = self._pace
        connection.progress(monotonic() if pace is None else pace.work())
        if connection.done:
            self._stop()
            return
        self.output_waits()
        awake = pace is not None and pace.rest(connection.answered)
        if self._in_login:
            if connection.parameters is None:
                return
            self._in_login = False
            self._logged_in()
        if awake and pace is not None and self._watch is not None:
            self._watch.expect(pace.until)

    def unfinished(self) -> None:
        """Implements ConnectionDriver. The rest of what has come is for another turn of the loop:
        other connections, and all that waits in trio, go first. No descriptor may show it."""
        self._loop.call_soon(self._come)

    def output_waits(self) -> None:
        """Implements ConnectionDriver."""
        full = self._connection.wants_write()
        if full is not self._full and not self._stopped:
            self._full = full
            if self._watch is not None:
                self._watch.want(readable=True, writable=full)
