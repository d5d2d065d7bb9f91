"""Login without a datamover: both machines in one loop, or one of them against written PDUs."""

from __future__ import annotations

from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.chap import Credentials
from iserblk.iscsi.login_initiator import LoginInitiator, LoginInitiatorConfig
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.iscsi.text import decode_untrusted, encode

INITIATOR = "iqn.2026-11.example:host"
TARGET = "iqn.2026-11.example:disk"
ISID = b"\x80abcde"
TSIH = 7

Pairs = list[tuple[str, str]]


def initiator(
    *,
    target_name: str = TARGET,
    discovery: bool = False,
    immediate_data: bool = False,
    hello: bool = False,
    credentials: Credentials | None = None,
    rdma: bool = True,
    header_digest: str = "None",
    **config: object,
) -> LoginInitiator:
    return LoginInitiator(
        LoginInitiatorConfig(
            initiator_name=INITIATOR,
            target_name="" if discovery else target_name,
            isid=ISID,
            immediate_data=immediate_data,
            hello=hello,
            discovery=discovery,
            credentials=credentials,
            rdma=rdma,
            header_digest=header_digest,
            **config,  # type: ignore[arg-type]
        )
    )


def target(**config: object) -> LoginTarget:
    return LoginTarget(LoginTargetConfig(TARGET, TSIH, **config))  # type: ignore[arg-type]


def login(one: LoginInitiator, other: LoginTarget) -> int:
    """Carry PDUs between them until neither has anything to say; returns the round trips."""
    requests, rounds = [one.start()], 0
    while requests:
        rounds += 1
        responses = [answer for request in requests for answer in other.receive(*request)]
        requests = [answer for response in responses for answer in one.receive(*response)]
    return rounds


def request(
    pairs: Pairs | bytes,
    stage: int = pdu.OPERATIONAL_STAGE,
    following: int | None = pdu.FULL_FEATURE_PHASE,
    **fields: object,
) -> tuple[bytes, bytes]:
    """A Login Request; ``following`` None: without T."""
    data = pairs if isinstance(pairs, bytes) else encode(pairs)
    flags = stage << pdu.CSG_SHIFT
    if following is not None:
        flags |= pdu.TRANSIT | following
    values: dict[str, object] = {
        "flags": flags,
        "data_length": len(data),
        "isid": ISID,
        "tsih": 0,
        "itt": 5,
        "cmd_sn": 100,
        "exp_stat_sn": 9,
        **fields,
    }
    return pdu.LoginRequest(**values).pack(), data  # type: ignore[arg-type]


def response(
    pairs: Pairs | bytes = b"",
    stage: int = pdu.OPERATIONAL_STAGE,
    following: int | None = pdu.FULL_FEATURE_PHASE,
    **fields: object,
) -> tuple[bytes, bytes]:
    """A Login Response to the requests of ``initiator``."""
    data = pairs if isinstance(pairs, bytes) else encode(pairs)
    flags = stage << pdu.CSG_SHIFT
    if following is not None:
        flags |= pdu.TRANSIT | following
    values: dict[str, object] = {
        "flags": flags,
        "data_length": len(data),
        "isid": ISID,
        "tsih": TSIH,
        "itt": 0,
        "stat_sn": 0xFFFFFFFF,
        "exp_cmd_sn": 1,
        "max_cmd_sn": 32,
        **fields,
    }
    return pdu.LoginResponse(**values).pack(), data  # type: ignore[arg-type]


def said(message: tuple[bytes, bytes]) -> dict[str, str]:
    """The keys in a login PDU."""
    return dict(decode_untrusted(message[1]))


def stages(header: bytes) -> tuple[int, int | None]:
    """CSG, and NSG or None without T."""
    flags = header[1]
    following = flags & pdu.STAGE_MASK if flags & pdu.TRANSIT else None
    return flags >> pdu.CSG_SHIFT & pdu.STAGE_MASK, following


def is_continued(header: bytes) -> bool:
    return bool(header[1] & bhs.FLAG_CONTINUE)
