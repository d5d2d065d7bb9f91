"""What an iSNS server says, and what comes to and from the port for metrics."""

from __future__ import annotations

from iserblk.discovery import isns
from iserblk.discovery.isns import Attribute
from iserblk.metrics.exposition import parse_untrusted
from iserblk.metrics.serving import judge_untrusted
from tests.discovery.test_isns import group, pdu
from tests.fuzz.engine import Case, Row, decoder
from tests.iscsi.logins import INITIATOR, TARGET

_ANSWERS = [
    isns.registration(INITIATOR),
    isns.own_query(INITIATOR),
    [
        isns.text(isns.ISCSI_NAME, INITIATOR),
        Attribute(isns.DELIMITER, b""),
        isns.text(isns.ISCSI_NAME, TARGET),
        isns.number(isns.ISCSI_NODE_TYPE, isns.NODE_TARGET),
        isns.text(isns.ENTITY_IDENTIFIER, "entity"),
        isns.number(isns.REGISTRATION_PERIOD, 300),
    ],
    [
        isns.text(isns.GROUP_ISCSI_NAME, TARGET),
        Attribute(isns.DELIMITER, b""),
        *group(TARGET, "10.0.0.1", 3260, 1),
        *group(TARGET, "fe80::1", 3261, None),
    ],
]
_PAYLOADS = [bytes(4) + isns.encode_attributes(each) for each in _ANSWERS]
_STREAMS = [pdu(each, 0x0C00) for each in _PAYLOADS]
_READERS = (
    isns.names_untrusted,
    isns.entity_untrusted,
    isns.targets_untrusted,
    lambda attributes: isns.portals_untrusted(attributes, TARGET),
    lambda attributes: isns.period_untrusted(attributes, 300),
)


def _answer(case: Case) -> None:
    message = isns.Message(0x8002, 1, case.data)
    _, attributes = isns.response_untrusted(message)
    case.chance.choice(_READERS)(attributes)


def _stream(case: Case) -> None:
    reader = isns.MessageReader()
    for _ in range(2):
        for message in reader.feed(case.data):
            _, attributes = isns.response_untrusted(message)
            case.chance.choice(_READERS)(attributes)


_PAGE = b"""# HELP iserblk_process_info x
# TYPE iserblk_process_info gauge
iserblk_process_info{pid="12",version="1"} 1.0
iserblk_reads_total{target="iqn.x:y",lun="0"} 5.0
iserblk_seconds_bucket{target="iqn.x:y",lun="0",le="+Inf",operation="read"} 3
"""

ROWS = (
    Row("iSNS answer", _answer, _PAYLOADS),
    Row("iSNS stream", _stream, _STREAMS, each=2),
    Row(
        "metrics",
        lambda case: (parse_untrusted(case.data.decode("utf-8", "replace")), None)[1],
        (_PAGE,),
    ),
    decoder(
        "metrics request", judge_untrusted, b"GET /metrics HTTP/1.1\r\n", b"HEAD / HTTP/1.0",
        allowed=(),
    ),
)  # fmt: skip
