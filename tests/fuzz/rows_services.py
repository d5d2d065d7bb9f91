"""What an iSNS server and SLP agents say, and what comes to and from the port for metrics."""

from __future__ import annotations

from iserblk.cli.watch.page import chosen_untrusted
from iserblk.cli.watch.terminal import keys_untrusted
from iserblk.discovery import isns, slp
from iserblk.discovery.isns import Attribute
from iserblk.iscsi.send_targets import Portal
from iserblk.metrics.exposition import parse_untrusted
from iserblk.metrics.merging import Merger
from iserblk.metrics.scraping import body_untrusted
from iserblk.metrics.serving import (
    host_untrusted,
    judge_untrusted,
    names_untrusted,
    path_untrusted,
    wants_sessions_untrusted,
)
from iserblk.target.announcing.announced import Announced
from iserblk.target.announcing.slp_agent import ServiceAgent
from tests.discovery.test_isns import group, pdu
from tests.fuzz.engine import Case, Row, decoder
from tests.iscsi.logins import INITIATOR, TARGET
from tests.vectors import slp as recorded

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
    lambda attributes: isns.targets_untrusted(attributes, []),
    lambda attributes: isns.portals_untrusted(attributes, TARGET, []),
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


_SLP = (
    recorded.TOOL_MULTICAST,
    recorded.TOOL_REQUEST,
    recorded.TOOL_ATTRIBUTES,
    recorded.TOOL_TYPES,
    recorded.REGISTRATION,
    recorded.DA_ADVERT,
    recorded.SERVICE_REPLY,
    recorded.ATTRIBUTE_REPLY,
    recorded.ACKNOWLEDGE,
)
_AGENT = ServiceAgent(
    Announced(TARGET, [Portal("192.0.2.1", 3260, 1), Portal("0.0.0.0", 860, 2)], lambda: None),
    ["DEFAULT"],
)


def _slp_request(case: Case) -> None:
    """The target answers by UDP and by TCP; what it answers is decoded again."""
    chance = case.chance
    answer = _AGENT.answer(
        case.data,
        chance.choice(("192.0.2.9", "127.0.0.1", recorded.HERE)),
        datagram=chance.random() < 0.5,
        multicast=chance.random() < 0.2,
    )
    if answer is not None:
        slp.message_untrusted(answer)


def _slp_answer(case: Case) -> None:
    message = slp.message_untrusted(case.data)
    kind = case.chance.choice(
        ("services", "attributes", "types", "request", "acknowledge", "directory")
    )
    if kind == "services":
        for entry in slp.service_reply_untrusted(message)[1]:
            slp.target_untrusted(entry.url, 3260)
    elif kind == "attributes":
        slp.group_untrusted(slp.attribute_reply_untrusted(message)[1])
    elif kind == "types":
        slp.type_request_untrusted(message)
    elif kind == "request":
        slp.request_untrusted(message)
    elif kind == "acknowledge":
        slp.acknowledge_untrusted(message)
    else:
        slp.agent_host_untrusted(slp.advertisement_untrusted(message).url)


_ATTRIBUTES = {"iscsi-name": ["iqn.x:y"], "c": ["4", "x"], "a": ["b"], "alias": [",z"], "k": []}


def _text(case: Case) -> str:
    return case.data.decode("utf-8", "replace")


_PAGE = b"""# HELP iserblk_process_info x
# TYPE iserblk_process_info gauge
iserblk_process_info{pid="12",version="1"} 1.0
iserblk_reads_total{target="iqn.x:y",lun="0"} 5.0
iserblk_seconds_bucket{target="iqn.x:y",lun="0",le="+Inf",operation="read"} 3
"""

_WHOLE_PAGE = b"""iserblk_size_bytes{lun="0",target="iqn.x:y"} 1.0e+09
iserblk_request_duration_seconds_bucket{le="0.000008",lun="0",operation="read",target="t"} 3
iserblk_connection_bytes_total{cid="0",lun="0",portal="h:1",provider="iwarp",target="t"} 5.0
"""

_TARGET_PAGE = b"""iserblk_process_info{pid="12",version="1"} 1.0
iserblk_target_info{target="iqn.x:y",url="iser://h/iqn.x:y"} 1.0
iserblk_target_memory_bytes{target="iqn.x:y"} 1.073741824e+09
iserblk_target_logins_total{target="iqn.x:y"} 5.0
iserblk_target_address_memory_bytes{address="::/64",target="iqn.x:y"} 5.0
iserblk_target_lun_threads{lun="0",target="iqn.x:y"} 16.0
"""


def _request(head: bytes) -> None:
    judge_untrusted(head)
    wants_sessions_untrusted(head)
    chosen_untrusted(path_untrusted(head)[1])
    names_untrusted(host_untrusted(head), ())


ROWS = (
    Row("iSNS answer", _answer, _PAYLOADS),
    Row("iSNS stream", _stream, _STREAMS, each=2),
    Row("SLP request", _slp_request, _SLP),
    Row("SLP answer", _slp_answer, _SLP),
    Row(
        "SLP attributes",
        lambda case: (slp.attributes_untrusted(_text(case)), None)[1],
        (rb"(iscsi-name=iqn.x:y),(portal-group=1,2),keyword,(alias=\2C\28)",),
    ),
    Row(
        "SLP predicate",
        lambda case: (slp.matches_untrusted(_text(case), _ATTRIBUTES), None)[1],
        (rb"(&(|(a=b*)(!(c>=5)))(iscsi-name=*x:y)(alias=\2C*))",),
    ),
    Row(
        "SLP URL",
        lambda case: (slp.target_untrusted(_text(case), 3260), None)[1],
        (b"service:iscsi:target://[::1]:3260/iqn.x:%41/identity", recorded.URL.encode()),
    ),
    Row(
        "metrics",
        lambda case: (parse_untrusted(case.data.decode("utf-8", "replace")), None)[1],
        (_PAGE, _TARGET_PAGE),
    ),
    Row(
        "metrics of several",
        lambda case: Merger().take_untrusted('where="x"', _text(case)),
        (_PAGE, _WHOLE_PAGE, _TARGET_PAGE),
    ),
    decoder(
        "metrics answer", body_untrusted, b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nup",
    ),
    decoder(
        "keys of a terminal", keys_untrusted, b"\x1b[A\x1bOBq\r\x1b[5~\x1b", allowed=(),
    ),
    decoder(
        "metrics request", _request, b"GET /metrics?sessions HTTP/1.1\r\n", b"HEAD / HTTP/1.0",
        b"GET /?lun=0123456789abcdef HTTP/1.1\r\nHost: [::1]:13260\r\n\r\n",
        allowed=(),
    ),
)  # fmt: skip
