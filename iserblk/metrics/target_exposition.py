"""Converts readings of targets to metrics, and samples back. Users rely on the metric names.

Who connects to a target chooses how many addresses, names and logins it sees. So no metric has a
label that peers choose, but ``address``: of the few that hold most memory. Sessions have one, the
name of the initiator: they are told only where a client asks for them, which no collector of
metrics does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from iserblk.metrics.number import Number
from iserblk.metrics.target_reading import (
    AddressReading,
    SessionReading,
    TargetLunReading,
    TargetReading,
)

PREFIX = "iserblk_target_"
_INFO = "iserblk_target_info"
_ADDRESS = "iserblk_target_address_memory_bytes"
_SESSION = "iserblk_target_session_info"

_NUMBERS = (
    Number("memory", "iserblk_target_memory_bytes", "Memory that peers make the target hold."),
    Number("memory_beside", "iserblk_target_memory_beside_bytes", "What of it is no data buffer."),
    Number("memory_free", "iserblk_target_memory_free_bytes", "Free data buffers, which give way."),
    Number("memory_limit", "iserblk_target_memory_limit_bytes", "Limit of all this memory."),
    Number("address_count", "iserblk_target_addresses", "Addresses whose sessions hold memory."),
    Number(
        "address_limit",
        "iserblk_target_address_memory_limit_bytes",
        "Limit of this memory of an address.",
    ),
    Number(
        "largest_session",
        "iserblk_target_session_memory_bytes",
        "Memory of the session that holds most.",
    ),
    Number(
        "session_limit",
        "iserblk_target_session_memory_limit_bytes",
        "Limit of data buffers of a session.",
    ),
    Number(
        "memory_waiting",
        "iserblk_target_memory_waiting",
        "Sessions whose commands wait for memory.",
    ),
    Number(
        "memory_refused",
        "iserblk_target_memory_refused",
        "Commands ended for want of memory.",
        counter=True,
    ),
    Number("sessions", "iserblk_target_sessions", "Sessions."),
    Number(
        "connections",
        "iserblk_target_connections",
        "Connections that have logged in, or are kept.",
    ),
    Number("connection_limit", "iserblk_target_connections_limit", "Limit of connections."),
    Number(
        "logins_unfinished",
        "iserblk_target_logins_unfinished",
        "Connections that have not logged in.",
    ),
    Number("login_limit", "iserblk_target_logins_unfinished_limit", "Limit of these."),
    Number(
        "logins_given_up",
        "iserblk_target_logins_given_up",
        "Of these, ended as there were too many.",
        counter=True,
    ),
    Number("logins", "iserblk_target_logins", "Logins that succeeded.", counter=True),
    Number(
        "logins_refused", "iserblk_target_logins_refused", "Logins that were refused.", counter=True
    ),
    Number(
        "attempts_failed", "iserblk_target_chap_failures", "Wrong answers to CHAP.", counter=True
    ),
    Number(
        "attempts_delayed", "iserblk_target_chap_delays", "Answers that had to wait.", counter=True
    ),
    Number(
        "kept", "iserblk_target_kept_connections", "Lost connections that are kept for their tasks."
    ),
    Number("kept_limit", "iserblk_target_kept_connections_limit", "Limit of these."),
    Number("kept_memory", "iserblk_target_kept_memory_bytes", "Data of the tasks of these."),
    Number("kept_memory_limit", "iserblk_target_kept_memory_limit_bytes", "Limit of this data."),
    Number(
        "kept_given_up",
        "iserblk_target_kept_given_up",
        "Of these, given up as too many.",
        counter=True,
    ),
    Number("commands", "iserblk_target_commands", "Commands that came.", counter=True),
    Number("in_flight", "iserblk_target_commands_in_flight", "Commands that have not ended."),
    Number(
        "lines_left_out",
        "iserblk_target_log_lines_left_out",
        "Lines left out of the log.",
        counter=True,
    ),
)
_OF_LUN = (
    Number("threads", "iserblk_target_lun_threads", "Threads that carry out commands of the LUN."),
    Number(
        "waiting", "iserblk_target_lun_commands_waiting", "Commands that wait for such a thread."
    ),
)


def families(targets: Iterable[TargetReading], *, sessions: bool = False) -> Iterator[Metric]:
    """``sessions``: those that have a name, too."""
    targets = list(targets)
    info = GaugeMetricFamily(_INFO, "The target and its first address.", labels=("target", "url"))
    for each in targets:
        info.add_metric((each.target, each.url), 1)
    yield info
    for number in _NUMBERS:
        family = number.family(("target",))
        for each in targets:
            family.add_metric((each.target,), getattr(each, number.field))
        yield family
    memory = GaugeMetricFamily(
        _ADDRESS, "Memory of the addresses that hold most.", labels=("target", "address")
    )
    for each in targets:
        for address in each.addresses:
            memory.add_metric((each.target, address.address), address.memory)
    yield memory
    for number in _OF_LUN:
        family = number.family(("target", "lun"))
        for each in targets:
            for lun in each.luns:
                family.add_metric((each.target, str(lun.lun)), getattr(lun, number.field))
        yield family
    if sessions:
        yield _sessions(targets)


def _sessions(targets: Iterable[TargetReading]) -> Metric:
    family = GaugeMetricFamily(
        _SESSION, "A session.", labels=("target", "session", "initiator", "address")
    )
    for each in targets:
        for number, session in enumerate(each.named_sessions):
            family.add_metric((each.target, str(number), session.initiator, session.address), 1)
    return family


# --- back ----------------------------------------------------------------------------------------

_BY_SAMPLE = {number.sample: number.field for number in _NUMBERS}
_BY_LUN = {number.sample: number.field for number in _OF_LUN}


class TargetSamples:
    """Collects the samples of one target, which come in any order. Raises KeyError or ValueError
    for what ``families`` does not tell."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._addresses: list[AddressReading] = []
        self._luns: dict[int, dict[str, int]] = {}
        self._sessions: list[SessionReading] = []

    def take(self, sample: Sample) -> None:
        """Take a sample whose name begins with PREFIX; one of a later version does nothing."""
        if sample.name in _BY_SAMPLE:
            self._values[_BY_SAMPLE[sample.name]] = int(sample.value)
        elif sample.name in _BY_LUN:
            lun = self._luns.setdefault(int(sample.labels["lun"]), {"threads": 0, "waiting": 0})
            lun[_BY_LUN[sample.name]] = int(sample.value)
        elif sample.name == _ADDRESS:
            self._addresses.append(AddressReading(sample.labels["address"], int(sample.value)))
        elif sample.name == _SESSION:
            labels = sample.labels
            self._sessions.append(SessionReading(labels["initiator"], labels["address"]))
        elif sample.name == _INFO:
            self._values["url"] = sample.labels["url"]

    def reading(self, target: str) -> TargetReading:
        return TargetReading(
            target,
            **{"url": ""} | self._values,
            addresses=tuple(self._addresses),
            luns=tuple(TargetLunReading(lun, **values) for lun, values in self._luns.items()),
            named_sessions=tuple(self._sessions),
        )
