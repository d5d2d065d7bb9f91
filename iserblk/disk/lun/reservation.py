"""``reserve=exclusive``: reserves a LUN for one host, by a persistent reservation of type 6
(Exclusive Access, Registrants Only).

The key identifies the holder. Two attaches with the same key look the same to the target, so the
key alone cannot tell a crashed attach from a living one. A lock on this machine can (``HostLock``):
the process that gets it knows that a dead process left a reservation under its key, and takes it
over. A process without the lock is refused. Sources: SPC-4, Persistent reservations.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from typing import NamedTuple

from iserblk.commands.command import Command, Operation
from iserblk.commands.listeners import LunListener
from iserblk.commands.running import ask, command
from iserblk.commands.session import CommandSession
from iserblk.errors import (
    Busy,
    IserblkError,
    NotSupported,
    ReservationConflict,
    ReservationLost,
    ScsiError,
)
from iserblk.names import machine_id
from iserblk.scsi import reservations as pr
from iserblk.scsi import sense as sense_data
from iserblk.scsi.reservations import OutParameters
from iserblk.scsi.sense import Sense

log = logging.getLogger(__name__)

TYPE = pr.EXCLUSIVE_ACCESS_REGISTRANTS

_GENERATIONS = 1 << 32  # PRGENERATION wraps to 0 there
_ALLOCATION = 4096  # of READ KEYS: 511 registrations
# Unit attentions after which another initiator may have the reservation. (And, where it does not
# outlive a loss of power, those of ``sense_data.POWER_LOST``.)
_TAKEN = (
    sense_data.RESERVATIONS_PREEMPTED,
    sense_data.RESERVATIONS_RELEASED,
    sense_data.REGISTRATIONS_PREEMPTED,
)


def host_key(initiator: str) -> int:
    """The reservation key of an initiator name on this machine: the same after a restart of either.
    It depends on the machine's ID and name, too, because initiator names are copied along with
    machines."""
    text = "\0".join(("iserblk reservation", initiator.lower(), machine_id(), socket.gethostname()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") or 1


def _unknown(error: ScsiError) -> bool:
    """Whether the LUN lacks the command, or the service action."""
    return isinstance(error.sense, sense_data.Sense) and error.sense.code in (
        sense_data.INVALID_OPERATION_CODE,
        sense_data.INVALID_FIELD_IN_CDB,
    )


class HostLock:
    """A lock with at most one holder on this machine (in this network namespace, to be exact), in
    any process. It is released when its process ends in any way. It is a name in Linux's abstract
    socket namespace: no file is left behind, and no directory has to be writable."""

    def __init__(self, what: str) -> None:
        """Take the lock. Raises Busy when it is taken."""
        digest = hashlib.sha256(what.encode()).hexdigest()[:32]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(f"\0iserblk-reservation-{digest}")
        except OSError:
            self._socket.close()
            raise Busy(
                "in use on this machine already, with reserve=exclusive: end that use first"
                " (`iserblk status` shows it)"
            ) from None

    def close(self) -> None:
        self._socket.close()


class _Present(NamedTuple):
    """What the target reports: PRGENERATION, the key of every registration, and the reservation
    (None: there is none)."""

    generation: int
    keys: list[int]
    held: pr.Reservation | None


class Reservation(LunListener):
    """The reservation of one LUN by this host, from ``acquire`` to ``release``. Each operation
    takes the session that it runs on, which may be another session each time. No two operations may
    run at the same time.

    ``name``: for messages. ``identity``: identifies the LUN over any path. ``initiator``: the
    initiator name of all its sessions.
    """

    def __init__(self, name: str, identity: str, key: int, initiator: str) -> None:
        self.name = name
        self.key = key
        self._identity = identity
        self._initiator = initiator.lower()
        self._lock: HostLock | None = None
        self._registered = False
        self._persists = False  # registrations outlive a loss of power
        # PRGENERATION when we last knew that the LUN was ours, and its values after commands of
        # ours whose answers may be lost.
        self._generations: set[int] = set()
        # Where it was acquired, for the logout; and the session that ``watch`` was called for.
        self._acquired: tuple[CommandSession, bytes] | None = None
        self._watched: CommandSession | None = None

    # -- opening ----------------------------------------------------------------------------------

    def acquire(self, session: CommandSession, lun: bytes) -> Operation[None]:
        """Reserve a free LUN, or take over a reservation that was left behind under our key; its
        tasks then have ended. Raises Busy when another initiator has the LUN, or another attach on
        this machine, and NotSupported where it has no persistent reservations; then nothing of ours
        is left."""
        self._acquired = session, lun
        try:
            self._lock = HostLock(f"{self.key:#x} {self._identity}")
        except Busy as error:
            raise Busy(f"{self.name}: {error}") from None
        try:
            self._persists = yield from self._can_persist(session, lun)
            present = yield from self._look(session, lun)
            left_behind = present.held is not None and present.held.key == self.key
            if not left_behind:
                yield from self._check_free(session, lun, present)
            yield from self._take(session, lun, present, left_behind)
        except BaseException:
            self._unlock()
            raise
        log.info("%s: reserved for this host alone, key %#x", self.name, self.key)

    def _can_persist(self, session: CommandSession, lun: bytes) -> Operation[bool]:
        try:
            answer = yield from self._ask(session, lun, pr.REPORT_CAPABILITIES)
        except ReservationConflict:
            return False
        except ScsiError as error:
            log.info("%s: REPORT CAPABILITIES: %s", self.name, error)
            return False
        return pr.decode_capabilities(answer).persists

    def _check_free(
        self, session: CommandSession, lun: bytes, present: _Present
    ) -> Operation[None]:
        """Raises Busy when another key holds the LUN, or is registered: a registered initiator may
        write, also while another initiator holds a reservation of our type."""
        if present.held is not None:
            yield from self._refuse(session, lun, present.held)
        others = [key for key in present.keys if key != self.key]
        if others:
            raise Busy(
                f"{self.name}: other initiators are registered at the LUN (key {others[0]:#x}) and "
                "would have access, too; unregister them, or leave out reserve=exclusive"
            )

    def _refuse(self, session: CommandSession, lun: bytes, held: pr.Reservation) -> Operation[None]:
        who = yield from self._holder(session, lun)
        remedy = "detach it there"
        if held.key:
            remedy += (
                f"; if that host is gone for good, reserve-key={held.key:#x} takes over from it"
            )
        raise Busy(
            f"{self.name}: reserved by {who} (key {held.key:#x}, {pr.type_words(held.type)}): "
            f"{remedy}"
        )

    def _holder(self, session: CommandSession, lun: bytes) -> Operation[str]:
        """The name of the initiator that holds the LUN, for messages; not every target tells it."""
        try:
            _, found = pr.decode_full_status(
                (yield from self._ask(session, lun, pr.READ_FULL_STATUS))
            )
        except ScsiError as error:
            log.info("%s: READ FULL STATUS: %s", self.name, error)
            found = []
        for each in found:
            if each.holder and each.initiator is not None:
                return each.initiator.name
        return "another initiator"

    # -- a new session ----------------------------------------------------------------------------

    def resume(self, session: CommandSession, lun: bytes) -> Operation[None]:
        """On a fresh session, before anything is written: register again, and check that the
        reservation is still ours. Raises ReservationLost when it is not, or when another initiator
        may have held it meanwhile (also one that has our key): then nothing may be written any
        more."""
        present = yield from self._look(session, lun)
        if present.held is not None and present.held.key != self.key:
            raise ReservationLost(
                f"{self.name}: another initiator has taken over the reservation "
                f"(key {present.held.key:#x}); nothing more is written; detach"
            )
        # ``intact``: we are registered as before, and no initiator has changed anything. (A target
        # that loses its power counts generations from 0 again, also where it keeps registrations:
        # so a generation that we know does not prove it.)
        # ``begun_anew``: the target lost all reservations together with its power, and counts
        # from 0 again.
        intact = (
            self.key in present.keys
            and present.generation in self._generations
            and (yield from self._only_ours(session, lun))
        )
        begun_anew = not (present.keys or present.generation or present.held)
        if begun_anew:
            log.warning("%s: the target has lost our reservation; it is taken again", self.name)
        elif not intact and not (yield from self._still_registered(session, lun)):
            raise ReservationLost(
                f"{self.name}: our reservation was removed while the connection was down; "
                "nothing more is written; detach"
            )
        try:
            yield from self._take(session, lun, present, None)
        except Busy as error:
            raise ReservationLost(f"{error}; nothing more is written; detach") from None

    def _only_ours(self, session: CommandSession, lun: bytes) -> Operation[bool]:
        """Whether our key is registered by no other initiator: one that has taken the LUN over from
        us may use it. Where the target does not tell, nothing speaks against it."""
        try:
            answer = yield from self._ask(session, lun, pr.READ_FULL_STATUS)
        except ScsiError as error:
            log.info("%s: READ FULL STATUS: %s", self.name, error)
            return True
        _, found = pr.decode_full_status(answer)
        names = [each.initiator.name for each in found if each.key == self.key and each.initiator]
        return all(name.lower() == self._initiator for name in names)

    def _still_registered(self, session: CommandSession, lun: bytes) -> Operation[bool]:
        """Whether our key is registered on the nexus of this session: a REGISTER that changes
        nothing tells that."""
        try:
            yield from self._out(session, lun, pr.REGISTER, self.key)
        except ReservationConflict:
            return False
        return True

    def watch(self, session: CommandSession) -> None:
        """From now on a unit attention that puts the reservation in doubt ends the connection of
        ``session``: on the next connection ``resume`` checks. (Until then the target itself refuses
        an initiator that is not registered any more.)"""
        self._watched = session

    def hear(self, slot: Command) -> None:
        """Implements LunListener."""
        session = self._watched
        sense = sense_data.decode(slot.sense)
        if session is None or session.suspended is not None:
            return  # on the next connection ``resume`` checks in any case
        if self.is_doubted_by(sense):
            log.error(
                "%s: the reservation may be lost (%s): the connection is cut", self.name, sense
            )
            session.disconnect()

    def is_doubted_by(self, sense: Sense) -> bool:
        """Whether another initiator may have the reservation since a report."""
        return sense.is_unit_attention and (
            sense.code in _TAKEN or (sense.code in sense_data.POWER_LOST and not self._persists)
        )

    def before_logout(self) -> Operation[None]:
        """Implements LunListener: gives the LUN back."""
        if self._acquired is not None:
            yield from self.release(*self._acquired)

    # -- both -------------------------------------------------------------------------------------

    def _take(
        self, session: CommandSession, lun: bytes, present: _Present, left_behind: bool | None
    ) -> Operation[None]:
        """Register, reserve, and remove our key, with all tasks, from other nexuses. Raises Busy
        when another initiator was faster; then we are not registered any more. ``left_behind``:
        whether the key was there before; None: it was ours, and another initiator that has it is
        one that takes the LUN over from us."""
        self._expect_after(present)
        yield from self._register(session, lun)
        try:
            if present.held is None:
                yield from self._out(session, lun, pr.RESERVE)
            present = yield from self._look(session, lun)
            several = present.keys.count(self.key) > 1
            if several and left_behind is None and not (yield from self._only_ours(session, lun)):
                yield from self._unregister(session, lun)
                raise ReservationLost(
                    f"{self.name}: another initiator has taken over the reservation, with our key; "
                    "nothing more is written; detach"
                )
            if left_behind or several:
                self._expect_after(present)
                yield from self._preempt(session, lun)
        except ReservationConflict as error:
            log.info("%s", error)
        after = yield from self._look(session, lun)
        if self.key in after.keys and after.held == (self.key, TYPE, 0):
            self._generations = {after.generation}
            return
        if self.key in after.keys:
            yield from self._unregister(session, lun)
        if after.held is not None and after.held.key != self.key:
            yield from self._refuse(session, lun, after.held)
        raise Busy(f"{self.name}: another initiator changes the LUN's reservations; try again")

    def _expect_after(self, present: _Present) -> None:
        """A command of ours is about to change the registrations: the generation before and the
        generation after it are both ours."""
        self._generations |= {present.generation, (present.generation + 1) % _GENERATIONS}

    def _preempt(self, session: CommandSession, lun: bytes) -> Operation[None]:
        """Remove our own key from all other nexuses. tgtd has no PREEMPT AND ABORT: it may still
        carry out commands of a dead process that it has already, but no later ones."""
        try:
            yield from self._out(session, lun, pr.PREEMPT_AND_ABORT, self.key)
        except ScsiError as error:
            if not _unknown(error):
                raise
            log.warning("%s: no PREEMPT AND ABORT: old commands are not waited for", self.name)
            yield from self._out(session, lun, pr.PREEMPT, self.key)

    def _register(self, session: CommandSession, lun: bytes) -> Operation[None]:
        """Send REGISTER AND IGNORE EXISTING KEY, with APTPL so that it lasts, if the target can."""
        self._registered = True
        if self._persists:
            try:
                yield from self._out(session, lun, pr.REGISTER_AND_IGNORE, self.key, pr.APTPL, 0)
                return
            except ReservationConflict:
                raise
            except ScsiError as error:
                log.info("%s: registering with APTPL: %s", self.name, error)
                self._persists = False
        try:
            yield from self._out(session, lun, pr.REGISTER_AND_IGNORE, self.key, 0, 0)
        except ReservationConflict:  # an initiator holds an SPC-2 RESERVE
            raise
        except ScsiError as error:
            raise NotSupported(f"{error}; the LUN cannot be reserved") from error

    def _unregister(self, session: CommandSession, lun: bytes) -> Operation[None]:
        yield from self._out(session, lun, pr.REGISTER)
        self._registered = False

    def release(self, session: CommandSession, lun: bytes) -> Operation[None]:
        """Give the LUN back, at a clean end. Raises nothing: what cannot be done is logged, and the
        next attach of this machine takes over."""
        try:
            if self._registered and session.error is None and session.suspended is None:
                yield from self._out(session, lun, pr.RELEASE)
                yield from self._unregister(session, lun)
        except ReservationConflict:
            log.warning("%s: the reservation was another's already", self.name)
        except IserblkError as error:
            log.warning("%s: the reservation stays: %s", self.name, error)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- commands ---------------------------------------------------------------------------------

    def _look(self, session: CommandSession, lun: bytes) -> Operation[_Present]:
        try:
            answer = yield from self._ask(session, lun, pr.READ_RESERVATION)
            _, held = pr.decode_reservation(answer)
            generation, keys = pr.decode_keys((yield from self._ask(session, lun, pr.READ_KEYS)))
        except ScsiError as error:
            if _unknown(error):
                raise NotSupported(
                    f"{self.name}: the LUN has no persistent reservations; "
                    "leave out reserve=exclusive"
                ) from error
            raise
        return _Present(generation, keys, held)

    def _ask(self, session: CommandSession, lun: bytes, action: int) -> Operation[memoryview]:
        reserve_in = pr.reserve_in(action, _ALLOCATION)
        return (yield from ask(session, lun, reserve_in, _ALLOCATION, self.name))

    def _out(
        self,
        session: CommandSession,
        lun: bytes,
        action: int,
        action_key: int = 0,
        flags: int = 0,
        key: int | None = None,
    ) -> Operation[None]:
        data = pr.encode_parameters(
            OutParameters(self.key if key is None else key, action_key, flags)
        )
        yield from command(
            session, lun, pr.reserve_out(action, TYPE), self.name, data_out=memoryview(data)
        )
