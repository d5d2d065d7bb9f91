"""Reservations of one LUN: persistent ones (registrations, the holder), those of RESERVE(6), and
which commands conflict.

No I/O and no clock. A registration belongs to the name of an I_T nexus (initiator name, ISID, and
target port; all target ports with ALL_TG_PT). So it outlives connections and LUN resets. With
APTPL it outlives the process, too: ``snapshot`` and ``restore``.
RESERVE(6) reserves for an I_T nexus until RELEASE(6), a reset, or the end of its session.
Sources: SPC-4, Persistent reservations; the classes of commands also SBC-3, Reservations. For
RESERVE(6) and RELEASE(6) SPC-2, Reservations; and SPC-3 section 5.6.3 for both kinds together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Container
from typing import Any, NamedTuple, Protocol

from iserblk.names import may_name
from iserblk.scsi import opcodes, sense
from iserblk.scsi import reservations as pr
from iserblk.scsi.reservations import (
    FullStatus,
    MoveParameters,
    OutParameters,
    Reservation,
    TransportId,
)
from iserblk.target.scsi.ended import CheckCondition, ReservationConflict, wrong_parameter
from iserblk.target.seam import ALL_PORTS, Nexus, NexusName

# What a command does to a LUN that another initiator has reserved.
FREE = 0  # nothing: it is always allowed, or has rules of its own
READS = 1  # reads: reservations of Write Exclusive types allow it
CHANGES = 2  # writes, or changes the LUN otherwise
STARTS = 3  # FREE where bit 0 of byte 4 is set, else CHANGES (START STOP UNIT)
PREVENTS = 4  # FREE where bits 1-0 of byte 4 are 0, else CHANGES (PREVENT ALLOW MEDIUM REMOVAL)

MAXIMUM_REGISTRATIONS = 256  # for each LUN, as every initiator that can log in can add some

ATP_C = 0x04
SIP_C = 0x08
PTPL_C = 0x01
CRH = 0x10  # RESERVE(6) and RELEASE(6) as SPC-3 section 5.6.3 has them
# Commands that do not conflict with a RESERVE(6) of another nexus, besides those that need no LUN.
_NOT_RESERVED = (opcodes.RELEASE_6, opcodes.LOG_SENSE)
_PERSISTENT = (opcodes.PERSISTENT_RESERVE_IN, opcodes.PERSISTENT_RESERVE_OUT)
_EXCLUSIVE = (pr.EXCLUSIVE_ACCESS, pr.EXCLUSIVE_ACCESS_REGISTRANTS, pr.EXCLUSIVE_ACCESS_ALL)
_ALL_REGISTRANTS = (pr.WRITE_EXCLUSIVE_ALL, pr.EXCLUSIVE_ACCESS_ALL)
_FOR_REGISTERED = (
    pr.WRITE_EXCLUSIVE_REGISTRANTS,
    pr.EXCLUSIVE_ACCESS_REGISTRANTS,
    *_ALL_REGISTRANTS,
)
_HELD_BY_ONE = tuple(set(pr.TYPES) - set(_ALL_REGISTRANTS))
_GENERATIONS = 1 << 32


_VERSION = 1  # of snapshots
_ISID = re.compile("[0-9a-f]{12}")
_SAVED_KEY = re.compile("0x[0-9a-f]{1,16}")
_MAXIMUM_PORT = 0xFFFF


class _Registration(NamedTuple):
    key: int


class Nexuses(Protocol):
    """The I_T nexuses of the target, as the reservations of a LUN use them."""

    def tell(self, name: NexusName, code: int) -> None:
        """Set a unit attention for an I_T nexus."""
        ...

    def known(self, initiator: str) -> list[TransportId]:
        """The initiator ports of an iSCSI name that have sessions."""
        ...


class _NoNexuses:
    """Implements Nexuses."""

    def tell(self, name: NexusName, code: int) -> None:
        pass

    def known(self, initiator: str) -> list[TransportId]:
        return []


class Reservations:
    """The reservation and the registrations of one LUN.

    ``type``: type of the persistent reservation; 0: there is none. ``reserved_by``: the nexus that
    has reserved the LUN by RESERVE(6); then there is no registration. ``present``: whether there is
    a reservation of either kind. ``can_persist``: APTPL is taken.

    The device server sets ``nexuses``, and ``ports``: all relative target ports.

    For one thread only."""

    def __init__(self) -> None:
        self.type = 0
        self.reserved_by: Nexus | None = None
        self.present = False
        self.generation = 0
        self.can_persist = False
        self.persists = False  # APTPL of the last registration
        self.nexuses: Nexuses = _NoNexuses()
        self.ports: Container[int] = (1,)
        self._holder: NexusName | None = None  # None for the All Registrants types, too
        self._registered: dict[NexusName, _Registration] = {}

    # -- what is forbidden ------------------------------------------------------------------------

    def conflicts(self, nexus: NexusName, access: int, cdb: bytes) -> bool:
        """Whether a command of ``nexus`` ends with RESERVATION CONFLICT. ``access``: FREE, READS,
        … of the command."""
        if self.reserved_by is not None:
            if nexus == self.reserved_by.name:
                return cdb[0] in _PERSISTENT
            return cdb[0] not in _NOT_RESERVED and not (access == PREVENTS and not cdb[4] & 3)
        if access >= STARTS:
            bits = cdb[4]
            access = FREE if (bits & 1 if access == STARTS else not bits & 3) else CHANGES
        if access == FREE or not self.type:
            return False
        nexus = self._name(nexus)
        if nexus == self._holder:
            return False
        if self.type in _FOR_REGISTERED and nexus in self._registered:
            return False
        return access == CHANGES or self.type in _EXCLUSIVE

    # -- RESERVE(6), RELEASE(6) -------------------------------------------------------------------

    def reserve(self, nexus: Nexus) -> None:
        """RESERVE(6). Raises ReservationConflict; nothing has changed then."""
        if self._registered:
            self._check_exception(nexus.name)
        else:
            self.reserved_by = nexus
            self._note()

    def release(self, nexus: Nexus) -> None:
        """RELEASE(6): nothing happens for a nexus that has not reserved the LUN. Raises
        ReservationConflict."""
        if self._registered:
            self._check_exception(nexus.name)
        else:
            self.lose(nexus)

    def lose(self, nexus: Nexus) -> None:
        """The session of ``nexus`` has ended, or another with its name begins."""
        if self.reserved_by is not None and self.reserved_by.name == nexus.name:
            self.reset()

    def reset(self) -> None:
        """End the reservation of RESERVE(6), not a persistent one."""
        self.reserved_by = None
        self._note()

    def _check_exception(self, nexus: NexusName) -> None:
        """With persistent reservations, RESERVE(6) and RELEASE(6) do nothing and end with GOOD for
        a nexus that has all the access that it asks for. Else raises ReservationConflict."""
        nexus = self._name(nexus)
        if not (self._holds(nexus) or (self.type in _FOR_REGISTERED and nexus in self._registered)):
            raise ReservationConflict

    def _note(self) -> None:
        self.present = bool(self.type) or self.reserved_by is not None

    # -- PERSISTENT RESERVE IN --------------------------------------------------------------------

    def answer(self, action: int) -> bytes:
        """The complete parameter data of a service action of PERSISTENT RESERVE IN."""
        if action == pr.READ_KEYS:
            keys = [each.key for each in self._registered.values()]
            return pr.encode_keys(self.generation, keys)
        if action == pr.READ_RESERVATION:
            return pr.encode_reservation(self.generation, self._reservation())
        if action == pr.REPORT_CAPABILITIES:
            return pr.encode_capabilities(
                ATP_C | SIP_C | CRH | (PTPL_C if self.can_persist else 0), self.persists
            )
        status = [
            FullStatus(
                registration.key,
                self._holds(nexus),
                self.type,
                nexus.port == ALL_PORTS,
                nexus.port,
                nexus.initiator,
            )
            for nexus, registration in self._registered.items()
        ]
        return pr.encode_full_status(self.generation, status)

    def _name(self, nexus: NexusName) -> NexusName:
        """The name under which ``nexus`` is registered, or would be: that with ALL_PORTS if there
        is such a registration, else its own."""
        everywhere = NexusName(nexus.initiator, ALL_PORTS)
        return everywhere if everywhere in self._registered else nexus

    def _reservation(self) -> Reservation | None:
        if not self.type:
            return None
        key = 0 if self._holder is None else self._registered[self._holder].key
        return Reservation(key, self.type)

    def _holds(self, nexus: NexusName) -> bool:
        if self.type in _ALL_REGISTRANTS:
            return nexus in self._registered
        return bool(self.type) and nexus == self._holder

    # -- PERSISTENT RESERVE OUT -------------------------------------------------------------------

    def change(
        self, nexus: NexusName, action: int, scope_type: int, parameters: OutParameters
    ) -> list[NexusName]:
        """Carry out a service action of PERSISTENT RESERVE OUT for ``nexus``; ``scope_type`` is
        byte 2 of the CDB. Returns the nexuses whose tasks have to end: those that PREEMPT AND ABORT
        has preempted, without the sender. Raises CheckCondition or ReservationConflict; nothing has
        changed then."""
        nexus = self._name(nexus)
        mine = self._registered.get(nexus)
        if action in (pr.REGISTER, pr.REGISTER_AND_IGNORE):
            if action == pr.REGISTER and parameters.key != (mine.key if mine else 0):
                raise ReservationConflict
            if parameters.flags & pr.APTPL and not self.can_persist:
                raise wrong_parameter(20, 0)
            others: list[NexusName] = []
            if parameters.flags & pr.SPEC_I_PT:
                if action != pr.REGISTER or mine is not None or not parameters.action_key:
                    raise wrong_parameter(20, 3)
                others = self._specified(nexus, parameters)
            if parameters.action_key or mine is not None:
                self._check_room(({nexus} | set(others)) - self._registered.keys())
            self._register(nexus, parameters)
            for each in others:
                self._registered[each] = _Registration(parameters.action_key)
            self.persists = bool(parameters.flags & pr.APTPL)
            return []
        if mine is None or mine.key != parameters.key:
            raise ReservationConflict
        if action == pr.RESERVE:
            self._reserve(nexus, scope_type)
        elif action == pr.RELEASE:
            self._release(nexus, scope_type)
        elif action == pr.CLEAR:
            self._clear(nexus)
        else:
            victims = self._preempt(nexus, scope_type, parameters.action_key)
            return victims if action == pr.PREEMPT_AND_ABORT else []
        return []

    def _register(self, nexus: NexusName, parameters: OutParameters) -> None:
        known = nexus in self._registered
        if parameters.action_key:
            if parameters.flags & pr.ALL_TG_PT:
                nexus = self._widen(nexus)
            self._registered[nexus] = _Registration(parameters.action_key)
        elif known:
            self._unregister(nexus)
        else:
            return  # there is no registration to remove
        self._next_generation()

    def _check_room(self, more: Collection[NexusName]) -> None:
        if more and len(self._registered) + len(more) > MAXIMUM_REGISTRATIONS:
            raise CheckCondition(sense.ILLEGAL_REQUEST, sense.NO_ROOM_FOR_REGISTRATION)

    def _specified(self, nexus: NexusName, parameters: OutParameters) -> list[NexusName]:
        """The nexuses that SPEC_I_PT names beside ``nexus``, which sends the command. A name
        without an ISID stands for all ports of that initiator that have sessions. Raises
        CheckCondition for a nexus that is not known, or registered already, and for a name that no
        session could have: it would be kept, and written, and never used."""
        port = ALL_PORTS if parameters.flags & pr.ALL_TG_PT else nexus.port
        found: dict[NexusName, None] = {}
        for each in parameters.initiators:
            if each is None or not may_name(each.name):
                raise wrong_parameter(28)
            initiator = TransportId(each.name.lower(), each.isid)
            initiators = [initiator] if initiator.isid else self.nexuses.known(initiator.name)
            if not initiators:
                raise wrong_parameter(28)
            found |= dict.fromkeys(NexusName(one, port) for one in initiators)
        found.pop(NexusName(nexus.initiator, port), None)
        registered = {each.initiator for each in self._registered if self._meet(each.port, port)}
        if any(each.initiator in registered for each in found):
            raise wrong_parameter(28)
        return list(found)

    @staticmethod
    def _meet(one: int, other: int) -> bool:
        return one == other or ALL_PORTS in (one, other)

    def move(self, nexus: NexusName, parameters: MoveParameters) -> None:
        """Carry out REGISTER AND MOVE for ``nexus``. Raises CheckCondition or ReservationConflict;
        nothing has changed then."""
        nexus = self._name(nexus)
        mine = self._registered.get(nexus)
        if (
            mine is None
            or mine.key != parameters.key
            or nexus != self._holder  # which no nexus is with All Registrants types
        ):
            raise ReservationConflict
        if not parameters.action_key:
            raise wrong_parameter(8)
        if parameters.flags & pr.APTPL and not self.can_persist:
            raise wrong_parameter(17, 0)
        if parameters.port not in self.ports:
            raise wrong_parameter(18)
        initiator = parameters.initiator
        if initiator is None or not initiator.isid or not may_name(initiator.name):
            raise wrong_parameter(24)
        there = self._name(
            NexusName(TransportId(initiator.name.lower(), initiator.isid), parameters.port)
        )
        if there.initiator == nexus.initiator and self._meet(there.port, nexus.port):
            raise wrong_parameter(24)
        self._check_room({there} - self._registered.keys())
        self._registered[there] = _Registration(parameters.action_key)
        self._hold(there, self.type)
        if parameters.flags & pr.UNREG:
            del self._registered[nexus]
        self.persists = bool(parameters.flags & pr.APTPL)
        self._next_generation()

    # -- from one start of the target to the next -------------------------------------------------

    def snapshot(self) -> bytes | None:
        """What has to survive a loss of power, as JSON; None: nothing. Raises ValueError for what
        ``restore`` would refuse."""
        if not self.persists or not self._registered:
            return None
        names = list(self._registered)
        content = {
            "version": _VERSION,
            "type": self.type,
            "holder": None if self._holder is None else names.index(self._holder),
            "registrations": [
                {
                    "initiator": each.initiator.name,
                    "isid": each.initiator.isid.hex(),
                    "port": each.port,
                    "key": f"{self._registered[each].key:#x}",
                }
                for each in names
            ],
        }
        _decode(content)
        return json.dumps(content, indent=1).encode() + b"\n"

    def restore(self, content: bytes) -> None:
        """Take over what ``snapshot`` has returned in an earlier process. Raises ValueError for
        other content; nothing has changed then."""
        try:
            kind, holder, registered = _decode(json.loads(content))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        self._registered = registered
        self.persists = True
        self._holder = holder
        self.type = kind
        self._note()

    def _widen(self, nexus: NexusName) -> NexusName:
        """Replace all registrations of the initiator by a single name for all ports. It keeps its
        reservation. Returns that name; the caller adds the registration."""
        everywhere = NexusName(nexus.initiator, ALL_PORTS)
        for each in [each for each in self._registered if each.initiator == nexus.initiator]:
            del self._registered[each]
            if each == self._holder:
                self._holder = everywhere
        return everywhere

    def _unregister(self, nexus: NexusName) -> None:
        """Remove a registration. The reservation ends with its holder's registration, or, of an All
        Registrants type, with the last registration."""
        del self._registered[nexus]
        if self.type in _ALL_REGISTRANTS:
            if not self._registered:
                self._end_reservation()
        elif nexus == self._holder:
            told = self.type in _FOR_REGISTERED
            self._end_reservation()
            if told:
                self._tell_others(nexus, sense.RESERVATIONS_RELEASED)

    def _reserve(self, nexus: NexusName, scope_type: int) -> None:
        kind = _checked_type(scope_type)
        if not self.type:
            self._hold(nexus, kind)
        elif not self._holds(nexus) or kind != self.type:
            raise ReservationConflict

    def _release(self, nexus: NexusName, scope_type: int) -> None:
        if not self._holds(nexus):
            return  # GOOD: a release by a nexus that holds no reservation changes nothing
        if scope_type != self.type:
            raise CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_RELEASE)
        told = self.type in _FOR_REGISTERED
        self._end_reservation()
        if told:
            self._tell_others(nexus, sense.RESERVATIONS_RELEASED)

    def _clear(self, nexus: NexusName) -> None:
        self._tell_others(nexus, sense.RESERVATIONS_PREEMPTED)
        self._registered.clear()
        self._end_reservation()
        self._next_generation()

    def _preempt(self, nexus: NexusName, scope_type: int, key: int) -> list[NexusName]:
        """Preempt by ``key``. If the holder's registration has that key (0: if all registrants hold
        the reservation), the sender takes over the reservation and keeps its registration. All
        other registrations with that key (0: all) are removed in any case. Returns the preempted
        nexuses, without the sender."""
        everybody = self.type in _ALL_REGISTRANTS and not key
        if not key and not everybody:
            raise wrong_parameter(8)
        holder = self._registered[self._holder] if self._holder is not None else None
        takes_over = everybody or (holder is not None and holder.key == key)
        victims = [each for each, at in self._registered.items() if everybody or at.key == key]
        if takes_over:
            kind = _checked_type(scope_type)
            victims = [each for each in victims if each != nexus]
            changed = kind != self.type
            self._hold(nexus, kind)
        elif not victims:
            raise ReservationConflict
        else:
            changed = False
        for victim in victims:
            del self._registered[victim]
        if not self._registered:
            self._end_reservation()  # an All Registrants type, and no registration is left
        self._next_generation()
        victims = [each for each in victims if each != nexus]
        for victim in victims:
            self.nexuses.tell(victim, sense.REGISTRATIONS_PREEMPTED)
        if changed:
            self._tell_others(nexus, sense.RESERVATIONS_RELEASED)
        return victims

    def _hold(self, nexus: NexusName, kind: int) -> None:
        self.type = kind
        self._holder = None if kind in _ALL_REGISTRANTS else nexus
        self._note()

    def _end_reservation(self) -> None:
        self.type = 0
        self._holder = None
        self._note()

    def _next_generation(self) -> None:
        self.generation = (self.generation + 1) % _GENERATIONS

    def _tell_others(self, nexus: NexusName, code: int) -> None:
        for each in self._registered:
            if each != nexus:
                self.nexuses.tell(each, code)


def _decode(found: Any) -> tuple[int, NexusName | None, dict[NexusName, _Registration]]:
    """Type, holder and registrations of a snapshot. Nothing of it is believed: a file may have been
    changed. Raises ValueError, KeyError or TypeError."""
    version, kind, index = _whole(found["version"]), _whole(found["type"]), found["holder"]
    entries = found["registrations"]
    if version != _VERSION:
        raise ValueError("another version")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAXIMUM_REGISTRATIONS:
        raise ValueError("the registrations are no list, or none, or too many")
    registered: dict[NexusName, _Registration] = {}
    for each in entries:
        nexus = _decode_nexus(each["initiator"], each["isid"], each["port"])
        key = _match(_SAVED_KEY, each["key"], "key")
        if not int(key, 16):
            raise ValueError("a registration with the key 0")
        if nexus in registered:
            raise ValueError("a registration comes twice")
        registered[nexus] = _Registration(int(key, 16))
    if index is not None and not 0 <= _whole(index) < len(entries):
        raise ValueError("the holder is none of the registrations")
    known = kind == 0 or kind in pr.TYPES
    if not known or (index is None) == (kind in _HELD_BY_ONE):
        raise ValueError("type and holder contradict each other")
    return kind, None if index is None else list(registered)[index], registered


def _decode_nexus(name: object, isid: object, port: object) -> NexusName:
    if not isinstance(name, str) or not may_name(name):
        raise ValueError("an initiator has no usable name")
    if not 0 <= _whole(port) <= _MAXIMUM_PORT:
        raise ValueError("a target port has more than 16 bits")
    initiator = TransportId(name.lower(), bytes.fromhex(_match(_ISID, isid, "ISID")))
    return NexusName(initiator, _whole(port))


def _whole(value: object) -> int:
    """A number without a fraction; JSON has Infinity and true as well. Raises ValueError."""
    if type(value) is not int:
        raise ValueError("a number is expected")
    return value


def _match(form: re.Pattern[str], value: object, what: str) -> str:
    """``value``, if it has this form. Raises ValueError."""
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ValueError(f"a registration has no usable {what}")
    return value


def _checked_type(scope_type: int) -> int:
    """The type of a reservation. Raises CheckCondition if the scope is not the LUN (0), or the type
    is unknown."""
    if scope_type not in pr.TYPES:
        raise CheckCondition(
            sense.ILLEGAL_REQUEST,
            sense.INVALID_FIELD_IN_CDB,
            field=2,
            bit=7 if scope_type >> 4 else 3,
        )
    return scope_type
