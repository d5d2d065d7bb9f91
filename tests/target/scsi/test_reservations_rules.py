"""What always holds of a LUN's reservations, for any commands in any order."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from iserblk.scsi import reservations as pr
from iserblk.scsi import sense
from iserblk.scsi.reservations import OutParameters, TransportId
from iserblk.target.scsi.ended import Ended
from iserblk.target.scsi.reservations import CHANGES, FREE, READS, Reservations
from iserblk.target.seam import ALL_PORTS, NexusName

NEXUSES = [
    NexusName(TransportId(name, b"\x80abcde"), int(port)) for name, port in ("a1", "a2", "b1")
]
KEYS = st.sampled_from([0, 1, 2, 3])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(NEXUSES),
        st.sampled_from(range(7)),
        st.sampled_from([*pr.TYPES, 0, 2, 0x11]),
        st.booleans(),  # under the key that it has
        KEYS,
        KEYS,
        st.sampled_from([0, 0, 0, 0, pr.ALL_TG_PT, pr.APTPL, pr.SPEC_I_PT]),
    ),
    max_size=40,
)


def those(initiator: TransportId, port: int) -> set[NexusName]:
    """The nexuses that a registration is for."""
    return {
        each for each in NEXUSES if each.initiator == initiator and port in (ALL_PORTS, each.port)
    }


def of_all(names: Iterable[NexusName]) -> set[NexusName]:
    return {each for name in names for each in those(*name)}


class Listening:
    """Nexuses without a session. ``told``: what they would have been told."""

    def __init__(self, told: list[tuple[NexusName, int]]) -> None:
        self._told = told

    def tell(self, name: NexusName, code: int) -> None:
        self._told.append((name, code))

    def known(self, initiator: str) -> list[TransportId]:
        return []


def look(reservations: Reservations) -> tuple[bytes, ...]:
    return tuple(reservations.answer(action) for action in range(4))


@given(STEPS)
def test_the_rules(
    steps: list[tuple[NexusName, int, int, bool, int, int, int]],
) -> None:
    reservations = Reservations()
    told: list[tuple[NexusName, int]] = []
    reservations.nexuses = Listening(told)
    for nexus, action, kind, honest, some_key, action_key, flags in steps:
        before = look(reservations)
        _, old = pr.decode_full_status(before[3])
        places = [(those(each.initiator, each.port), each) for each in old]  # type: ignore[arg-type]
        keys = {name: each.key for names, each in places for name in names}
        mine = next((names for names, _ in places if nexus in names), {nexus})
        key = keys.get(nexus, 0) if honest else some_key
        told.clear()
        try:
            victims = reservations.change(
                nexus, action, kind, OutParameters(key, action_key, flags)
            )
        except Ended:
            assert look(reservations) == before and not told, "nothing changed"
            continue
        after = look(reservations)
        generation, registered = pr.decode_full_status(after[3])
        places = [(those(each.initiator, each.port), each) for each in registered]  # type: ignore[arg-type]
        assert all(each.all_ports == (not each.port) for each in registered)
        names = {name for some, _ in places for name in some}
        assert len(names) == sum(len(some) for some, _ in places), "each is registered once"
        counted = generation - pr.decode_keys(before[0])[0]
        # A generation is counted where registrations change, and nowhere else.
        if action in (pr.RESERVE, pr.RELEASE):
            assert not counted
        elif after[3][4:] != before[3][4:]:
            assert counted == 1
        # A reservation has a holder, and only registrants hold.
        reservation = pr.decode_reservation(after[1])[1]
        holders = [each for each in registered if each.holder]
        assert (reservation is None) == (not holders)
        if reservation is not None:
            everybody = reservation.type in (7, 8)
            assert len(holders) == (len(registered) if everybody else 1)
            assert reservation.key == (0 if everybody else holders[0].key)
            assert {each.type for each in holders} == {reservation.type}
        # A nexus is told when another nexus removed its registration; the sender is never told.
        assert nexus not in of_all(each for each, _ in told) | of_all(victims)
        lost = set(keys) - names - mine
        codes = (sense.RESERVATIONS_PREEMPTED, sense.REGISTRATIONS_PREEMPTED)
        assert lost == of_all(each for each, code in told if code in codes)
        assert of_all(victims) == (lost if action == pr.PREEMPT_AND_ABORT else set())
        assert len(told) == len(set(told)) <= 2
        # A holder may do everything; without a reservation every nexus may.
        for each in NEXUSES:
            may = [not reservations.conflicts(each, access, b"") for access in (READS, CHANGES)]
            assert not reservations.conflicts(each, FREE, b"")
            assert may[0] >= may[1], "who may write may read"
            if reservation is None or each in {
                name for some, holder in places if holder.holder for name in some
            }:
                assert all(may)
            elif each not in names:
                assert not may[1]
