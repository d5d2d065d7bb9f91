"""The login phase of an initiator, PDU by PDU (RFC 7143 sections 6.3, 11.12; RFC 7145 section 6).

The first request offers every operational key at once, in the operational stage: what running
targets accept in one round. A target that wants the security stage first, more rounds, or has keys
of its own to offer, is followed.
"""

from __future__ import annotations

from dataclasses import dataclass

from iserblk.errors import AuthenticationError, LoginError, RemoteProtocolError, TargetNotFound
from iserblk.iscsi import bhs, keys, pdu, reasons
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.text import Collector, encode

MAXIMUM_ROUNDS = 32
_ITT = 0


@dataclass(slots=True, frozen=True)
class LoginInitiatorConfig:
    """``isid``: 6 bytes. ``receive_data_segment_length``: data bytes of one PDU that we take.
    ``discovery``: a discovery session, which has no target name."""

    initiator_name: str
    target_name: str
    isid: bytes
    immediate_data: bool = False
    receive_data_segment_length: int = 8192
    discovery: bool = False
    cid: int = 0


class LoginInitiator:
    """Call ``start`` once, then ``receive`` for each Login Response, until ``done``.

    Afterwards ``parameters``, ``tsih``, ``cmd_sn`` (of the first command), ``exp_stat_sn``,
    ``exp_cmd_sn`` and ``max_cmd_sn`` hold what full feature phase begins with.
    """

    def __init__(self, config: LoginInitiatorConfig) -> None:
        self._config = config
        self._collector = Collector()
        self._stage = pdu.OPERATIONAL_STAGE
        self._offered: set[str] = set()
        self._answered: set[str] = set()
        self._rounds = 0
        self._sent_operational = False
        self.done = False
        self.tsih = 0
        self.cmd_sn = 1
        self.exp_stat_sn = 0
        self.exp_cmd_sn = 1
        self.max_cmd_sn = 1
        self.parameters = SessionParameters(
            rdma_extensions=not config.discovery,
            initial_r2t=True,
            immediate_data=config.immediate_data,
            max_burst_length=1 << 20,
            first_burst_length=65536,
            default_time2wait=0,
            default_time2retain=0,
            target_recv_data_segment_length=262144,
            initiator_recv_data_segment_length=config.receive_data_segment_length,
            max_outstanding_unexpected_pdus=0,
        )

    def start(self) -> tuple[bytes, bytes]:
        """The first Login Request, as (BHS, data segment)."""
        return self._request(self._identity() + self._operational(), transit=True)

    def _identity(self) -> list[tuple[str, str]]:
        config = self._config
        pairs = [("InitiatorName", config.initiator_name)]
        if config.discovery:
            return [*pairs, ("SessionType", "Discovery")]
        return [*pairs, ("TargetName", config.target_name), ("SessionType", "Normal")]

    def _operational(self) -> list[tuple[str, str]]:
        """All operational keys; once only (RFC 7143 section 6.2: no key twice)."""
        if self._sent_operational:
            return []
        self._sent_operational = True
        wish = self.parameters
        names = [
            # First of them: RFC 7145 section 6.3.
            "RDMAExtensions",
            "HeaderDigest",
            "DataDigest",
            "TargetRecvDataSegmentLength",
            "InitiatorRecvDataSegmentLength",
            "MaxOutstandingUnexpectedPDUs",
            "MaxConnections",
            "InitialR2T",
            "ImmediateData",
            "MaxBurstLength",
            "FirstBurstLength",
            "DefaultTime2Wait",
            "DefaultTime2Retain",
            "MaxOutstandingR2T",
            "DataPDUInOrder",
            "DataSequenceInOrder",
            "ErrorRecoveryLevel",
        ]
        if self._config.discovery:
            names = [name for name in names if keys.TABLE[name].discovery]
        self._offered.update(names)
        return [(name, keys.text_of(getattr(wish, keys.TABLE[name].field))) for name in names]

    def _request(self, pairs: list[tuple[str, str]], transit: bool) -> tuple[bytes, bytes]:
        data = encode(pairs)
        flags = self._stage << pdu.CSG_SHIFT
        if transit:
            following = (
                pdu.OPERATIONAL_STAGE
                if self._stage == pdu.SECURITY_STAGE
                else pdu.FULL_FEATURE_PHASE
            )
            flags |= pdu.TRANSIT | following
        request = pdu.LoginRequest(
            flags=flags,
            data_length=len(data),
            isid=self._config.isid,
            tsih=0,
            itt=_ITT,
            cid=self._config.cid,
            cmd_sn=self.cmd_sn,
            exp_stat_sn=self.exp_stat_sn,
        )
        return request.pack(), data

    def receive(self, header: bytes, data: bytes | memoryview) -> list[tuple[bytes, bytes]]:
        """Take a PDU of the target; returns the requests to send next (none when done).

        Raises LoginError and its kin when the target refuses, RemoteProtocolError for nonsense;
        then the connection is to be closed.
        """
        self._rounds += 1
        if self._rounds > MAXIMUM_ROUNDS:
            raise RemoteProtocolError("iSCSI", f"no end of login after {MAXIMUM_ROUNDS} rounds")
        if header[0] & bhs.OPCODE_MASK == bhs.REJECT:
            words = reasons.reject_reason(pdu.Reject.unpack_from(header).reason)
            raise LoginError(f"the target rejected the login request: {words}")
        if header[0] & bhs.OPCODE_MASK != bhs.LOGIN_RESPONSE:
            raise RemoteProtocolError(
                "iSCSI", f"opcode {header[0]:#x} in answer to a login request"
            )
        response = pdu.LoginResponse.unpack_from(header)
        if response.itt != _ITT or response.isid != self._config.isid:
            raise RemoteProtocolError("iSCSI", "a login response to somebody else's request")
        if response.status:
            raise self._refused(response.status, data)
        self.exp_stat_sn = (response.stat_sn + 1) & 0xFFFFFFFF
        self.exp_cmd_sn = response.exp_cmd_sn
        self.max_cmd_sn = response.max_cmd_sn
        if response.flags & bhs.FLAG_CONTINUE:
            self._collector.add(data, more=True)
            return [self._request([], transit=False)]
        pairs = self._collector.add(data, more=False)
        answers = self._take(pairs or [])
        return self._advance(response, answers)

    def _advance(
        self, response: pdu.LoginResponse, answers: list[tuple[str, str]]
    ) -> list[tuple[bytes, bytes]]:
        stage = response.flags >> pdu.CSG_SHIFT & pdu.STAGE_MASK
        following = response.flags & pdu.STAGE_MASK
        if stage == pdu.SECURITY_STAGE and self._stage == pdu.OPERATIONAL_STAGE:
            # We skipped the security stage, and the target wants it.
            self._stage = pdu.SECURITY_STAGE
        elif stage != self._stage:
            raise RemoteProtocolError("iSCSI", f"the target is in login stage {stage}")
        if not response.flags & pdu.TRANSIT:
            if self._stage == pdu.SECURITY_STAGE:
                if "AuthMethod" not in self._offered:
                    self._offered.add("AuthMethod")
                    answers = [("AuthMethod", "None"), *answers]
                return [self._request(answers, transit=True)]
            return [self._request(answers, transit=True)]
        if following == pdu.FULL_FEATURE_PHASE:
            if answers:
                raise RemoteProtocolError(
                    "iSCSI", f"the target offered {answers[0][0]} with its last login response"
                )
            self.tsih = response.tsih
            self._finish()
            return []
        if following != pdu.OPERATIONAL_STAGE or self._stage != pdu.SECURITY_STAGE:
            raise RemoteProtocolError("iSCSI", f"the target goes to login stage {following}")
        self._stage = pdu.OPERATIONAL_STAGE
        return [self._request(self._operational() + answers, transit=True)]

    def _take(self, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Settle what came; returns our answers to what the target offered by itself."""
        answers: list[tuple[str, str]] = []
        for name, value in pairs:
            if name == "AuthMethod":
                if value != "None":
                    raise AuthenticationError(
                        f"the target wants {value[:40]} authentication, which is not supported "
                        "yet; allow this initiator without it"
                    )
            elif name in self._offered and name not in self._answered:
                self._answered.add(name)
                keys.accept(self.parameters, name, value)
            elif name in self._answered:
                raise RemoteProtocolError("iSCSI", f"the target answered {name} twice")
            else:
                self._answered.add(name)
                answer = keys.answer(self.parameters, name, value, self._config.discovery)
                if answer is not None:
                    answers.append((name, answer))
        return answers

    def _finish(self) -> None:
        parameters = self.parameters
        if not self._config.discovery and (
            "RDMAExtensions" not in self._answered or not parameters.rdma_extensions
        ):
            raise LoginError(
                "the target does not agree to iSER (RDMAExtensions is not Yes); "
                "use a portal of it that has iSER enabled"
            )
        if parameters.iser_hello_required:
            raise LoginError("the target requires iSER Hello, which only an initiator may ask for")
        # What a key says that was not answered is its default.
        defaults = SessionParameters()
        for name in self._offered - self._answered - {"AuthMethod"}:
            field = keys.TABLE[name].field
            if keys.TABLE[name].kind not in (keys.DECLARE, keys.LIST):
                setattr(parameters, field, getattr(defaults, field))
        self.done = True

    def _refused(self, status: int, data: bytes | memoryview) -> LoginError:
        words = reasons.login_status(status)
        name = self._config.target_name
        if status >> 8 == 1:
            address = next(
                (v for k, v in self._collector.add(data, more=False) or () if k == "TargetAddress"),
                "an address that it does not name",
            )
            return LoginError(f"{words}, to {address[:200]}: put that into the URL", status)
        if status == 0x0201:
            return AuthenticationError(f"login refused: {words}", status)
        if status in (0x0203, 0x0204):
            return TargetNotFound(f"no target {name}: {words}", status)
        return LoginError(f"login to {name or 'discovery session'} refused: {words}", status)
