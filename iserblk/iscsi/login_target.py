"""The login phase of a target, PDU by PDU (RFC 7143 section 6.3).

No authentication: AuthMethod=None in the security stage, which an initiator may skip.
"""

from __future__ import annotations

from dataclasses import dataclass

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, keys, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.text import Collector, encode

MAXIMUM_ROUNDS = 32
_MAXIMUM_NAME = 223

INITIATOR_ERROR = 0x0200
NOT_FOUND = 0x0203
UNSUPPORTED_VERSION = 0x0205
MISSING_PARAMETER = 0x0207
SESSION_TYPE_NOT_SUPPORTED = 0x0209
SESSION_DOES_NOT_EXIST = 0x020A
AUTHENTICATION_FAILURE = 0x0201


@dataclass(slots=True, frozen=True)
class LoginTargetConfig:
    """``tsih``: what a new session gets. ``receive_data_segment_length``: data bytes of one PDU
    that we take. ``queue_depth``: commands that an initiator may have outstanding."""

    target_name: str
    tsih: int
    receive_data_segment_length: int = 8192
    queue_depth: int = 128


class _Refusal(Exception):
    """The login ends with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class LoginTarget:
    """Call ``receive`` for each Login Request until ``done`` or ``failed``.

    Then ``parameters``, ``initiator_name``, ``isid``, ``discovery``, ``stat_sn``, ``exp_cmd_sn``
    and ``max_cmd_sn`` hold what full feature phase begins with.
    """

    def __init__(self, config: LoginTargetConfig) -> None:
        self._config = config
        self._collector = Collector()
        self._rounds = 0
        self._answered: set[str] = set()
        self._stage: int | None = None
        self._pending: list[tuple[str, str]] = []
        self.done = False
        self.failed = False
        self.discovery = False
        self.initiator_name = ""
        self.target_name = config.target_name
        self.isid = b""
        self.stat_sn = 0
        self.exp_cmd_sn = 0
        self.max_cmd_sn = 0
        self.parameters = SessionParameters(
            rdma_extensions=True,
            initial_r2t=True,  # unsolicited Data-Out is not taken
            immediate_data=True,
            max_burst_length=(1 << 24) - 1,
            first_burst_length=(1 << 24) - 1,
            default_time2wait=0,
            default_time2retain=0,
            target_recv_data_segment_length=config.receive_data_segment_length,
            initiator_recv_data_segment_length=262144,
            target_portal_group_tag=1,
        )

    def receive(self, header: bytes, data: bytes | memoryview) -> list[tuple[bytes, bytes]]:
        """Take a Login Request; returns the responses. A refusal is a response, too: ``failed``.

        Raises RemoteProtocolError for what is no login, or has no end: close the connection.
        """
        self._rounds += 1
        if self._rounds > MAXIMUM_ROUNDS:
            raise RemoteProtocolError("iSCSI", f"no end of login after {MAXIMUM_ROUNDS} rounds")
        request = pdu.LoginRequest.unpack_from(header)
        if not self.isid:
            self.isid = request.isid
            # StatSN starts where the initiator expects it; CmdSN is of its choice.
            self.stat_sn = request.exp_stat_sn
        self.exp_cmd_sn = request.cmd_sn
        self.max_cmd_sn = (request.cmd_sn + self._config.queue_depth - 1) & 0xFFFFFFFF
        try:
            return self._take(request, data)
        except _Refusal as refusal:
            self.failed = True
            return [self._response(request, 0, b"", refusal.status)]

    def _take(
        self, request: pdu.LoginRequest, data: bytes | memoryview
    ) -> list[tuple[bytes, bytes]]:
        stage = request.flags >> pdu.CSG_SHIFT & pdu.STAGE_MASK
        following = request.flags & pdu.STAGE_MASK
        transit = bool(request.flags & pdu.TRANSIT)
        if request.version_min > 0:
            raise _Refusal(UNSUPPORTED_VERSION)
        if request.tsih:
            # Another connection of a session: there is one per session here.
            raise _Refusal(SESSION_DOES_NOT_EXIST)
        if self._stage is not None and stage != self._stage:
            raise _Refusal(INITIATOR_ERROR)
        if stage not in (pdu.SECURITY_STAGE, pdu.OPERATIONAL_STAGE):
            raise _Refusal(INITIATOR_ERROR)
        self._stage = stage
        if request.flags & bhs.FLAG_CONTINUE:
            if transit:
                raise _Refusal(INITIATOR_ERROR)
            self._collector.add(data, more=True)
            return [self._response(request, stage << pdu.CSG_SHIFT, b"")]
        pairs = self._collector.add(data, more=False) or []
        if not self.initiator_name:
            pairs = self._identify(pairs)
        answers = self._pending
        self._pending = []
        for name, value in pairs:
            answers += self._answer(name, value, stage)
        flags = stage << pdu.CSG_SHIFT
        if transit:
            if following <= stage or following not in (
                pdu.OPERATIONAL_STAGE,
                pdu.FULL_FEATURE_PHASE,
            ):
                raise _Refusal(INITIATOR_ERROR)
            flags |= pdu.TRANSIT | following
            self._stage = following
        text = encode(answers)
        if len(text) > self._config.receive_data_segment_length:
            raise _Refusal(INITIATOR_ERROR)
        ends = transit and following == pdu.FULL_FEATURE_PHASE
        if ends and not self.discovery and not self.parameters.rdma_extensions:
            raise _Refusal(INITIATOR_ERROR)  # this connection is iSER already
        self.done = ends
        return [self._response(request, flags, text)]

    def _identify(self, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Who wants what: the keys of the first request; returns the others."""
        named = dict(pairs)
        name = named.pop("InitiatorName", "")
        if not name or len(name) > _MAXIMUM_NAME:
            raise _Refusal(MISSING_PARAMETER)
        kind = named.pop("SessionType", "Normal")
        if kind not in ("Normal", "Discovery"):
            raise _Refusal(SESSION_TYPE_NOT_SUPPORTED)
        self.discovery = kind == "Discovery"
        target = named.pop("TargetName", "")
        if not self.discovery:
            if not target:
                raise _Refusal(MISSING_PARAMETER)
            if target.lower() != self._config.target_name.lower():
                raise _Refusal(NOT_FOUND)
        self.initiator_name = name
        if not self.discovery:
            self._pending.append(
                ("TargetPortalGroupTag", str(self.parameters.target_portal_group_tag))
            )
        return list(named.items())

    def _answer(self, name: str, value: str, stage: int) -> list[tuple[str, str]]:
        if name in self._answered:
            raise _Refusal(INITIATOR_ERROR)  # renegotiation within login (RFC 7143 section 6.2)
        self._answered.add(name)
        if name == "AuthMethod":
            if stage != pdu.SECURITY_STAGE:
                raise _Refusal(INITIATOR_ERROR)
            if "None" not in value.split(","):
                raise _Refusal(AUTHENTICATION_FAILURE)
            return [(name, "None")]
        if name in ("InitiatorName", "TargetName", "SessionType"):
            raise _Refusal(INITIATOR_ERROR)
        try:
            answer = keys.answer(self.parameters, name, value, self.discovery)
        except RemoteProtocolError:
            return [(name, keys.REJECT)]
        return [] if answer is None else [(name, answer)]

    def _response(
        self, request: pdu.LoginRequest, flags: int, data: bytes, status: int = 0
    ) -> tuple[bytes, bytes]:
        final = flags & pdu.TRANSIT and flags & pdu.STAGE_MASK == pdu.FULL_FEATURE_PHASE
        response = pdu.LoginResponse(
            flags=flags,
            data_length=len(data),
            isid=request.isid,
            tsih=self._config.tsih if final else 0,
            itt=request.itt,
            stat_sn=self.stat_sn,
            exp_cmd_sn=self.exp_cmd_sn,
            max_cmd_sn=self.max_cmd_sn,
            status=status,
        )
        self.stat_sn = (self.stat_sn + 1) & 0xFFFFFFFF
        return response.pack(), data
