"""Converts readings to Prometheus text, and back. Users rely on the names (docs/commands/stats.md).

Only this module and its tables import prometheus_client, which takes time: import it late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from iserblk.errors import RemoteProtocolError
from iserblk.metrics.counting import OPERATIONS
from iserblk.metrics.number import Number
from iserblk.metrics.reading import (
    BOUNDS_US,
    ConnectionReading,
    LunReading,
    OperationReading,
    PathReading,
    ProcessReading,
)
from iserblk.metrics.target_exposition import PREFIX, TargetSamples, families

# The format that ``generate_latest`` makes.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LUN = ("target", "lun")
_CONNECTION = (*_LUN, "cid", "portal", "provider")
_PATH = (*_LUN, "path", "portal")
_DURATION = "iserblk_request_duration_seconds"
_BYTES = "iserblk_request_bytes"
_ERRORS = "iserblk_request_errors"
_LUN_INFO = "iserblk_lun_info"
_PATH_INFO = "iserblk_path_info"
_PROCESS_INFO = "iserblk_process_info"
_BEGAN = "iserblk_start_time_seconds"


# With one value for each LUN: fields of LunReading.
_NUMBERS = (
    Number("size", "iserblk_size_bytes", "Size of the LUN."),
    Number("connected", "iserblk_connected", "1 while there is a connection to the target."),
    Number(
        "away_since",
        "iserblk_disconnected_since_seconds",
        "When the connection was lost, since 1970; 0: it is there.",
    ),
    Number("in_flight", "iserblk_commands_in_flight", "SCSI commands sent, or waiting to be sent."),
    Number("unflushed", "iserblk_unflushed_bytes", "Bytes written and kept until a flush."),
    Number("retries", "iserblk_command_retries", "SCSI commands sent again.", counter=True),
    Number("reconnects", "iserblk_reconnects", "New connections of the session.", counter=True),
    Number(
        "replayed", "iserblk_replayed", "Commands sent again on a new connection.", counter=True
    ),
    Number(
        "aborted", "iserblk_aborted", "Commands of the session that were aborted.", counter=True
    ),
    Number("resets", "iserblk_resets", "LUN resets of the session.", counter=True),
    Number("connections", "iserblk_connections", "Connections of the session."),
    Number("wanted", "iserblk_connections_wanted", "Connections that it should have."),
    Number(
        "recovered", "iserblk_recoveries", "Connections lost while others went on.", counter=True
    ),
    Number(
        "reassigned", "iserblk_reassigned", "Tasks that another connection took over.", counter=True
    ),
    Number("snacks", "iserblk_snacks", "SNACKs that asked for lost PDUs.", counter=True),
    Number("damaged", "iserblk_damaged_pdus", "PDUs lost to their data digest.", counter=True),
)

# Of ConnectionReading.
_OF_CONNECTION = (
    Number("in_flight", "iserblk_connection_commands_in_flight", "SCSI commands at the target."),
    Number(
        "commands",
        "iserblk_connection_commands",
        "SCSI commands sent since its login.",
        counter=True,
    ),
    Number("bytes", "iserblk_connection_bytes", "Bytes of these commands.", counter=True),
)

# Of PathReading. A number that is None has no sample.
_OF_PATH = (
    Number("in_use", "iserblk_path_in_use", "1: the session goes this way, of several."),
    Number("failures", "iserblk_path_failures", "Since it last carried the session."),
    Number("state", "iserblk_path_access_state", "ALUA state of its port, when last seen."),
)


class LunCollector(Collector):
    """The metrics of the reading that ``look`` returns. Make a new one for each scrape.
    ``sessions``: with those of targets that have a name."""

    def __init__(self, look: Callable[[], ProcessReading], sessions: bool = False) -> None:
        self._look = look
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        for family in self._families(self._look()):
            if family.samples:
                yield family

    def _families(self, process: ProcessReading) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            _PROCESS_INFO, "The process that serves these metrics.", labels=("pid", "version")
        )
        info.add_metric((str(process.pid), process.version), 1)
        yield info
        began = GaugeMetricFamily(
            _BEGAN, "When the command began, since 1970.", labels=("command",)
        )
        began.add_metric((process.command,), process.began)
        yield began
        yield _information(_LUN_INFO, "The name and URL of the LUN.", ("disk", "url"), process.luns)
        yield _information(_PATH_INFO, "The path in use.", ("portal", "provider"), process.luns)
        for number in _NUMBERS:
            family = number.family(_LUN)
            for lun in process.luns:
                family.add_metric(_labels(lun), getattr(lun, number.field))
            yield family
        for number in _OF_CONNECTION:
            family = number.family(_CONNECTION)
            for lun in process.luns:
                for each in lun.per_connection:
                    labels = (*_labels(lun), str(each.cid), each.portal, each.provider)
                    family.add_metric(labels, getattr(each, number.field))
            yield family
        for number in _OF_PATH:
            family = number.family(_PATH)
            for lun in process.luns:
                for path in lun.paths:
                    if (value := getattr(path, number.field)) is not None:
                        family.add_metric((*_labels(lun), str(path.index), path.portal), value)
            yield family
        yield from _operations(process.luns)
        yield from families(process.targets, sessions=self._sessions)


def _labels(lun: LunReading) -> tuple[str, str]:
    return lun.target, str(lun.lun)


def _information(
    name: str, text: str, fields: tuple[str, str], luns: Iterable[LunReading]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(*_LUN, *fields))
    for lun in luns:
        values = [getattr(lun, "name" if each == "disk" else each) for each in fields]
        family.add_metric((*_labels(lun), *values), 1)
    return family


def _operations(luns: Iterable[LunReading]) -> Iterator[Metric]:
    labels = (*_LUN, "operation")
    durations = HistogramMetricFamily(
        _DURATION, "Requests, by the time until they were answered.", labels=labels
    )
    moved = CounterMetricFamily(_BYTES, "Bytes of successful requests.", labels=labels)
    errors = CounterMetricFamily(_ERRORS, "Requests that ended with an error.", labels=labels)
    for lun in luns:
        for name, operation in lun.operations.items():
            values = (*_labels(lun), name)
            count = 0
            buckets = []
            for bound, more in zip((*_LE, "+Inf"), operation.buckets, strict=True):
                count += more
                buckets.append((bound, float(count)))
            durations.add_metric(values, buckets, operation.seconds)
            moved.add_metric(values, operation.bytes)
            errors.add_metric(values, operation.errors)
    yield from (durations, moved, errors)


_LE = tuple(f"{bound / 1e6:.6f}".rstrip("0").rstrip(".") for bound in BOUNDS_US)
_INDEX = {float(bound): index for index, bound in enumerate(_LE)} | {float("inf"): len(_LE)}


def expose(look: Callable[[], ProcessReading], sessions: bool = False) -> bytes:
    """The complete text. It uses no registry, so other metrics of this process are not in it.
    ``sessions``: with those of targets that have a name."""
    collector = LunCollector(look, sessions)
    return generate_latest(cast(Any, collector))  # 0.20 is typed for a registry only


# --- back ----------------------------------------------------------------------------------------


class _Parts:
    """Collects the samples of one LUN, which come in any order."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.text = {"name": "", "url": "", "portal": "", "provider": ""}
        self.connections: dict[tuple[int, str, str], dict[str, Any]] = {}
        self.paths: dict[tuple[int, str], dict[str, Any]] = {}
        self.rising = {name: [0] * (len(_LE) + 1) for name in OPERATIONS}
        self.sums = {name: {"bytes": 0.0, "errors": 0.0, "seconds": 0.0} for name in OPERATIONS}

    def reading(self, target: str, lun: int) -> LunReading:
        operations = {}
        for name, rising in self.rising.items():
            buckets = [high - low for low, high in zip([0, *rising], rising, strict=False)]
            if min(buckets) < 0:
                raise ValueError("the buckets of a histogram decrease")
            sums = self.sums[name]
            operations[name] = OperationReading(
                tuple(buckets), int(sums["bytes"]), int(sums["errors"]), sums["seconds"]
            )
        fields: dict[str, Any] = {name: int(value) for name, value in self.values.items()}
        fields["per_connection"] = tuple(
            ConnectionReading(*key, **numbers) for key, numbers in self.connections.items()
        )
        fields["paths"] = tuple(
            PathReading(*key, **numbers | {"in_use": bool(numbers.get("in_use"))})
            for key, numbers in self.paths.items()
        )
        fields |= self.text | {"connected": bool(fields.get("connected"))}
        return LunReading(target, lun, **{"size": 0} | fields, operations=operations)


_BY_SAMPLE = {each.sample: each.field for each in _NUMBERS}
_BY_CONNECTION = {each.sample: each.field for each in _OF_CONNECTION}
_BY_PATH = {each.sample: each.field for each in _OF_PATH}
_SUMS = {
    f"{_BYTES}_total": "bytes",
    f"{_ERRORS}_total": "errors",
    f"{_DURATION}_sum": "seconds",
}


def parse_untrusted(text: str) -> ProcessReading:
    """Parse the text of ``expose``; other metrics in it are ignored. Raises
    RemoteProtocolError."""
    found: dict[tuple[str, int], _Parts] = {}
    targets: dict[str, TargetSamples] = {}
    pid, version = 0, ""
    command, began = "", 0
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _PROCESS_INFO:
                    pid, version = int(sample.labels["pid"]), sample.labels["version"]
                elif sample.name == _BEGAN:
                    command, began = sample.labels["command"], int(sample.value)
                elif sample.name.startswith(PREFIX):
                    targets.setdefault(sample.labels["target"], TargetSamples()).take(sample)
                elif sample.name.startswith("iserblk_") and "lun" in sample.labels:
                    key = sample.labels["target"], int(sample.labels["lun"])
                    _take(found.setdefault(key, _Parts()), sample)
        luns = tuple(parts.reading(*key) for key, parts in found.items())
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise RemoteProtocolError("Prometheus", f"the text is not valid metrics: {error}") from None
    if not version:
        raise RemoteProtocolError("Prometheus", "these are not the metrics of iserblk")
    told = tuple(each.reading(target) for target, each in targets.items())
    return ProcessReading(pid, version, luns, told, command, began)


def _take(parts: _Parts, sample: Sample) -> None:
    labels = sample.labels
    if sample.name in _BY_SAMPLE:
        parts.values[_BY_SAMPLE[sample.name]] = sample.value
    elif sample.name in _BY_CONNECTION:
        key = int(labels["cid"]), labels["portal"], labels["provider"]
        parts.connections.setdefault(key, {})[_BY_CONNECTION[sample.name]] = int(sample.value)
    elif sample.name in _BY_PATH:
        place = int(labels["path"]), labels["portal"]
        parts.paths.setdefault(place, {})[_BY_PATH[sample.name]] = int(sample.value)
    elif sample.name == _LUN_INFO:
        parts.text |= {"name": labels["disk"], "url": labels["url"]}
    elif sample.name == _PATH_INFO:
        parts.text |= {"portal": labels["portal"], "provider": labels["provider"]}
    elif labels.get("operation") in OPERATIONS:
        if sample.name == f"{_DURATION}_bucket":
            index = _INDEX[float(labels["le"])]
            parts.rising[labels["operation"]][index] = int(sample.value)
        elif sample.name in _SUMS:
            parts.sums[labels["operation"]][_SUMS[sample.name]] = sample.value
