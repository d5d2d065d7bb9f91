"""Active/passive multipath: tries the portals to one LUN whenever its session connects again.

``Paths.connect`` tries the portals in the order of ``disk.multipath.policy.Ways``. ``Paths.look``
comes first on a fresh session: it reads the ALUA state of the port, and gives up a port that would
not carry out commands, so that the next attempt takes another. ``Paths.reset`` comes later: where
the port is in another target portal group than the one before, a LOGICAL UNIT RESET ends what the
lost session may have left at the target. Through the same group session reinstatement has done that
(RFC 7143 section 6.3.5), and only there the login waits for Time2Wait. When the port in use refuses
a command for its access state, the session leaves it (``watch``). ``disk/multipath/failback.py``
goes back to a better portal.

Where no port carries out commands, and the target lets initiators set the states of its ports
(explicit ALUA), ``look`` asks it to make the port that it is looking at active. This takes the LUN
to another port for all hosts. So it is the last resort, and it is asked for rarely: two hosts that
want different ports must not take the LUN from each other again and again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from iserblk.commands.command import Command, Operation
from iserblk.commands.listeners import LunListener
from iserblk.commands.running import PortRefused, ask, command
from iserblk.disk.multipath.policy import Asking, Way, Ways
from iserblk.errors import (
    AuthenticationError,
    BadArgument,
    ConnectFailed,
    ConnectionLost,
    IserblkError,
    ScsiError,
)
from iserblk.initiator.connecting.further import Further
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.session.session import Session
from iserblk.iscsi import pdu, reasons
from iserblk.options import Options
from iserblk.scsi import alua, cdb, inquiry, luns
from iserblk.scsi import sense as sense_data
from iserblk.url import Url, name_portal

log = logging.getLogger(__name__)

_ALLOCATION = 512
_MOST_REPORT = 65536
# States that do not end by themselves, and of which a port can be got out by command.
_ASLEEP = (alua.STANDBY, alua.UNAVAILABLE)
# When a URL is opened: errors that the other portals would bring, too.
_NOT_WORTH_ANOTHER = (AuthenticationError, BadArgument)

Address = tuple[Url, Options]
_Group = tuple[str, int | None]  # a target's name, and the tag of one of its portal groups


class Paths(LunListener):
    """The ways to the LUNs of one session. Belongs to the thread of the reconnector, except that
    ``hear`` runs where ``Session.progress`` does. ``clock``: monotonic seconds."""

    def __init__(self, addresses: Sequence[Address], clock: Callable[[], float]) -> None:
        """``addresses``: the preferred one first, all of one LUN, perhaps of several targets."""
        self._clock = clock
        self.ways = Ways([(each, _name(each)) for each in addresses])
        # Finds ways that are not among these, when none of these leads to the target any more.
        self.find_more: Callable[[], Awaitable[list[Address]]] | None = None
        # Raises where nothing proves that a way leads to the same LUN; see ``proving``.
        self.proof: Callable[[Url, Options], Awaitable[None]] | None = None
        self.given = len(addresses)  # the first ways; others were found
        # Tags of portal groups, by the name of the portal, where SendTargets or a login has told.
        self.groups: dict[str, int] = {}
        self.apart: set[tuple[str, int]] = set()  # see Further
        # By index of the way: why it could not be used, since one was in use. Each has its name.
        self.why: dict[int, str] = {}
        self.states_changed = False  # the target reports it: read the states of all ports again
        self._trying: Way[Address] | None = None
        self._before: Way[Address] | None = None  # was in use last
        self._wanted: Way[Address] | None = None  # to be tried first, once
        self._refusal: int | None = None  # the state for which the port in use refused a command
        self._watched: Session | None = None
        self._group: _Group | None = None  # of the session that was in use last
        # By LUN: the groups through which something may have been left at the target.
        self._used: dict[int, set[_Group]] = {}
        self._asking: dict[int, Asking] = {}  # by LUN
        self._names: dict[int, tuple[str, ...]] = {}  # identifiers, by LUN
        self._first: _Group | None = None  # the group through which all LUNs were used at first

    async def connect(
        self, isid: bytes = b"", respite: Callable[[], Awaitable[None]] | None = None
    ) -> Session:
        """A session by the first way that takes a login. Call ``settled`` when it comes into use.
        ``respite``: waits; it comes before a login that would reinstate a session that was lost.
        Raises the error of the first way that was tried, in whose text are those of all."""
        now = self._clock()
        wanted, self._wanted = self._wanted, None
        self._lost(now, wanted is not None)
        errors: list[IserblkError] = []
        order = self.ways.order(now)
        if wanted is not None:
            order.sort(key=lambda way: way is not wanted)
        session = await self._connect_by(order, isid, respite, errors)
        if session is None and self._before is not None and self.find_more is not None:
            fresh = self.ways.add([(each, _name(each)) for each in await self.find_more()])
            session = await self._connect_by(fresh, isid, respite, errors)
        if session is not None:
            return session
        raise self.tell_all(errors[0])

    def tell_all(self, error: IserblkError) -> IserblkError:
        """``error``, about one of the ways, with the errors of all ways in its text."""
        if len(self.why) > 1:
            error.args = ("; ".join(self.why.values()),)
        return error

    def _note(self, way: Way[Address], error: IserblkError) -> str:
        """Note in ``why`` why ``way`` cannot be used."""
        text = " ".join(str(error).split())
        if place_of(way.address[0]) not in text:
            text = f"{way.name}: {text}"
        self.why[way.index] = text
        return text

    async def _connect_by(
        self,
        ways: Sequence[Way[Address]],
        isid: bytes,
        respite: Callable[[], Awaitable[None]] | None,
        errors: list[IserblkError],
    ) -> Session | None:
        """A session by the first of these ways that takes a login. None: none does; their errors
        are in ``errors`` then."""
        for way in ways:
            if respite is not None and self._may_reinstate(way):
                await respite()
            try:
                url, options = way.address
                if self.proof is not None:
                    await self.proof(url, options)
                session = await connect(url, options, isid or options.isid)
            except IserblkError as error:
                text = self._note(way, error)
                if self._before is None and isinstance(error, _NOT_WORTH_ANOTHER):
                    raise self.tell_all(error) from None
                self.ways.failed(way, text, self._clock())
                errors.append(error)
                continue
            self._trying = way
            if options.connections > 1 and isinstance(session.more, Further):
                session.more.others = self._others
                session.more.apart = self.apart
            if errors and self._before is None:
                log.warning("%s is used: %s", way.name, "; ".join(self.why.values()))
            return session
        return None

    def _may_reinstate(self, way: Way[Address]) -> bool:
        """Whether a session through the portal group of ``way`` was lost. It counts as that group
        where it is not known which it is."""
        left = {self._group}.union(*self._used.values()) if self._group else set()
        url = way.address[0]
        tag = self.groups.get(place_of(url))
        return any(
            group is not None
            and group[0] == url.iqn.lower()
            and (tag is None or group[1] is None or group[1] == tag)
            for group in left
        )

    def _others(self, session: Session) -> list[Address]:
        """Where further connections of ``session`` may go: to portals of its portal group, as far
        as the groups are known, with the same form of the iSER header."""
        way = self._trying or self.ways.current
        if way is None:
            return []
        url, options = way.address
        group = session.parameters.target_portal_group_tag
        return [
            each.address
            for each in self.ways.all
            if each.address[0].scheme == url.scheme
            and each.address[1].header == options.header
            and self.groups.get(place_of(each.address[0]), group) == group
        ]

    def _lost(self, now: float, on_purpose: bool) -> None:
        """Note that the connection that there was is lost: another is asked for."""
        current, refusal = self.ways.current, self._refusal
        self._refusal = None
        if current is not None and on_purpose:
            self.ways.left()
        elif current is not None and refusal is not None:
            self.ways.refused(current, refusal, _state_words(current, refusal), now)
        elif current is not None:
            self.ways.failed(current, "the connection was lost", now)
        if self._trying is not None:
            self.ways.failed(self._trying, "given up", now)
        self._trying = None

    def go_over(self, session: Session, way: Way[Address], patience: float) -> bool:
        """Have ``session``, the one in use, log out in order and go on by ``way``; this begins with
        the next ``progress``. ``patience``: seconds, see ``Session.leave``. False: not possible
        now."""
        self._wanted = way
        if session.log_out(f"to go on by {way.name}", patience):
            return True
        self._wanted = None
        return False

    def settled(self, session: Session) -> None:
        """Note that ``session``, from the last ``connect``, is in use from now on."""
        way = self._trying
        assert way is not None  # ``connect`` came before
        self._trying = None
        self._refusal = None
        self.why.clear()
        self._group = _group_of(way, session)
        self.groups[place_of(way.address[0])] = session.parameters.target_portal_group_tag
        before, self._before = self._before, way
        if before is None:
            self._first = self._group
        if before is not None and before is not way:
            why = f": {before.error}" if before.error else ""
            log.warning("%s is used, not %s any more%s", way.name, before.name, why)
        self.ways.connected(way, self._clock(), way.state)

    @property
    def elsewhere(self) -> bool:
        """Whether the fresh session uses another portal than the one before."""
        return self._trying is not self._before

    def look(self, lun: int, fresh: Session) -> Operation[None]:
        """Read the ALUA state of the port: the first step on a fresh session. Raises ConnectFailed
        when the port would not carry out commands: ``connect`` then begins with another way."""
        way = self._trying
        assert way is not None  # ``connect`` came before
        try:
            yield from self._look(way, lun, fresh)
        except IserblkError as error:
            self._note(way, error)
            raise

    def _look(self, way: Way[Address], lun: int, fresh: Session) -> Operation[None]:
        here = yield from access(fresh, lun, way.name)
        if here is not None and self._should_ask(way, lun, here):
            here = yield from self._activate(way, lun, here, fresh)
        state = None if here is None else here.state
        if state is not None and state not in alua.USABLE:
            words = _state_words(way, state)
            self.ways.refused(way, state, words, self._clock())
            self._trying = None
            raise ConnectFailed(words)
        way.state = state
        if here is not None:
            self._names.setdefault(lun, here.identifiers)

    def _should_ask(self, way: Way[Address], lun: int, here: Access) -> bool:
        if not here.tpgs & alua.TPGS_EXPLICIT or way.address[1].alua != "ask":
            return False
        if self._before is not None and (
            not here.identifiers or self._names.get(lun) != here.identifiers
        ):
            return False  # another LUN may be there now: its states are none of our business
        if here.state == alua.ACTIVE_NON_OPTIMIZED:
            # It works, and only a target that never changes states by itself would leave it so. If
            # another port is optimized, another host may have asked for that.
            wanted = here.tpgs == alua.TPGS_EXPLICIT and not here.any_optimized
        else:
            wanted = here.state in _ASLEEP and self.ways.is_last_resort(way)
        return wanted and self._asking.setdefault(lun, Asking()).may_ask(self._clock())

    def _activate(
        self, way: Way[Address], lun: int, here: Access, fresh: Session
    ) -> Operation[Access | None]:
        """Ask the target to make the group of the port active/optimized. Returns what is so
        then."""
        self._asking[lun].asked(self._clock())
        log.warning(
            "%s: LUN %d: the port is in the state %s, and no portal is better; "
            "the target is asked to activate it",
            way.name,
            lun,
            alua.state_words(here.state),
        )
        data = alua.encode_set({here.group: alua.ACTIVE_OPTIMIZED})
        request = alua.set_target_port_groups(len(data))
        try:
            yield from command(
                fresh, luns.encode(lun), request, way.name, data_out=memoryview(data)
            )
        except ScsiError as error:
            log.warning("%s: LUN %d: the target does not do so: %s", way.name, lun, error)
        return (yield from access(fresh, lun, way.name))

    def reset(self, lun: int, fresh: Session) -> Operation[None]:
        """Reset the LUN where another portal group was used before: the step after the check of the
        LUN's identity, before anything is written."""
        way = self._trying or self._before
        assert way is not None  # ``connect`` came before
        group = _group_of(way, fresh)
        used = self._used.setdefault(lun, set() if self._first is None else {self._first})
        # Also groups of connections that were lost before they were in use: they may have written.
        if others := used - {group}:
            log.info("%s: portal group %d, it was %s", fresh.portal, group, sorted(others))
            yield from reset_lun(fresh, lun)
            used.clear()
        used.add(group)

    def left_nothing(self) -> None:
        """Note that the session that was in use ended by a logout, with no task left at the
        target."""
        if self._group is None:
            return
        if self._first == self._group:
            self._first = None
        for used in self._used.values():
            used.discard(self._group)

    def watch(self, session: Session, lun: bytes) -> None:
        """From now on cut the connection of ``session``, the one in use, when its port refuses a
        command for its access state; the command is sent again on the next connection."""
        self._watched = session
        session.listeners.add(lun, self)

    def hear(self, slot: Command) -> None:
        """Implements LunListener."""
        session = self._watched
        assert session is not None  # ``watch`` came before
        sense = sense_data.decode(slot.sense)
        if alua.is_state_change(sense):
            self.states_changed = True
        state = alua.state_of_sense(sense)
        if state is None:
            return
        slot.error = PortRefused(f"{session.portal}: {sense}", slot.status, sense)
        if session.suspended is None:
            if self._refusal is None:
                log.warning("%s: %s; another portal is tried", session.portal, sense)
            self._refusal = state
            session.disconnect()


def _group_of(way: Way[Address], session: Session) -> _Group:
    return way.address[0].iqn.lower(), session.parameters.target_portal_group_tag


def place_of(url: Url) -> str:
    """The name of a portal, as in ``Paths.groups``."""
    return name_portal(url.host, url.port)


def _name(address: Address) -> str:
    return f"{address[0].scheme}://{name_portal(address[0].host, address[0].port)}"


def _state_words(way: Way[Address], state: int) -> str:
    return f"{way.name}: its port is in the state {alua.state_words(state)}"


class Access(NamedTuple):
    """ALUA as a port tells it. ``state``, ``group``: of the port. ``tpgs``: how states change.
    ``any_optimized``: whether any group is active/optimized. ``identifiers``: of the LUN."""

    state: int
    group: int
    tpgs: int
    any_optimized: bool
    identifiers: tuple[str, ...]


def access_state(session: Session, lun: int, name: str) -> Operation[int | None]:
    """The ALUA state of the port that ``session`` is connected to; None where it is not known."""
    here = yield from access(session, lun, name)
    return None if here is None else here.state


def access(session: Session, lun: int, name: str) -> Operation[Access | None]:
    """What the port that ``session`` is connected to tells of ALUA; None where it is not known."""
    field = luns.encode(lun)
    standard = inquiry.decode_standard((yield from ask(session, field, cdb.inquiry(96), 96, name)))
    if not standard.tpgs:
        return None
    try:
        page = yield from ask(
            session,
            field,
            cdb.inquiry(_ALLOCATION, inquiry.DEVICE_IDENTIFICATION),
            _ALLOCATION,
            name,
        )
        length, answer = _ALLOCATION, memoryview(b"")
        while True:
            request = alua.report_target_port_groups(length)
            answer = yield from ask(session, field, request, length, name)
            whole = alua.length_of_report(answer)
            if whole <= length or length >= _MOST_REPORT:
                break
            length = min(whole, _MOST_REPORT)
    except ScsiError as error:
        # The LUN claims to have ALUA, but answers no question about it.
        log.info("%s: ALUA states are not known: %s", name, error)
        return None
    groups = alua.decode_report(answer)
    here = alua.state_here(groups, alua.decode_port_identity(page))
    if here is None:
        return None
    optimized = any(each.state == alua.ACTIVE_OPTIMIZED for each in groups)
    identifiers = inquiry.decode_identifiers(page)
    return Access(here.state, here.group, standard.tpgs, optimized, identifiers)


def reset_lun(session: Session, lun: int) -> Operation[None]:
    """Send LOGICAL UNIT RESET: once it is answered, no earlier task of any session is carried out
    any more. Raises ConnectionLost when it did not succeed."""
    control = session.queue.take_control()
    if control is None:
        raise ConnectionLost(f"{session.portal}: no room for a LOGICAL UNIT RESET")
    pdu.TaskManagementRequest(
        function=pdu.TMF_LOGICAL_UNIT_RESET,
        lun=luns.encode(lun),
        itt=0,
        cmd_sn=0,
        exp_stat_sn=0,
    ).pack_into(control.bhs)
    waiter = session.new_waiter()
    waiter.pending += 1
    session.queue.send_immediate(control, waiter)
    yield waiter
    if session.error is not None:
        raise ConnectionLost(str(session.error))
    if control.response != pdu.TMF_COMPLETE:
        words = reasons.task_management_response(control.response)
        raise ConnectionLost(f"{session.portal}: LOGICAL UNIT RESET: {words}")
