"""The login phase of an initiator, PDU by PDU (RFC 7143 sections 6.3, 11.12; RFC 7145 section 6).

Without CHAP the first request offers all operational keys at once, in the operational stage;
targets accept that in one round. The target may also demand the security stage first, take more
rounds, or offer keys itself. With CHAP the login starts in the security stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from iserblk.errors import (
    AuthenticationError,
    IserblkError,
    IserRefused,
    LoginError,
    RemoteProtocolError,
    TargetNotFound,
)
from iserblk.iscsi import bhs, chap, keys, pdu, reasons
from iserblk.iscsi.chap import ChapInitiator, Credentials
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.serial import MASK32, serial_lt
from iserblk.iscsi.stages import INITIATOR, Event, Stages, State
from iserblk.iscsi.text import Collector, encode

MAXIMUM_ROUNDS = 32
# The default of TargetRecvDataSegmentLength; also used where a target only repeats our offer.
SAFE_SEGMENT_LENGTH = 8192
_ITT = 0
_FIRST_CMD_SN = 1
_AUTHENTICATION_FAILURE = 0x0201
_NOT_FOUND = (0x0203, 0x0204)

# The keys that are offered, in this order.
_NORMAL = (
    "RDMAExtensions",  # must be first: RFC 7145 section 6.3
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
)
# Traditional iSCSI: no keys of RFC 7145.
_TRADITIONAL = (
    "HeaderDigest",
    "DataDigest",
    "MaxRecvDataSegmentLength",
    *_NORMAL[_NORMAL.index("MaxConnections") :],
)
# A byte stream that becomes iSER, or stays Traditional iSCSI.
_STREAM = (*_NORMAL[:3], "MaxRecvDataSegmentLength", *_NORMAL[3:])
# The later connections of a session: what each negotiates for itself. All other keys are those of
# the leading login.
_LATER, _LATER_TRADITIONAL = (
    tuple(name for name in names if name not in keys.LEADING_ONLY)
    for names in (_NORMAL, _TRADITIONAL)
)
# Discovery sessions have neither RDMAExtensions nor the keys that depend on it (RFC 7145 5.1).
_DISCOVERY = (
    "HeaderDigest",
    "DataDigest",
    "MaxRecvDataSegmentLength",
    "DefaultTime2Wait",
    "DefaultTime2Retain",
    "ErrorRecoveryLevel",
)


@dataclass(slots=True, frozen=True)
class LoginInitiatorConfig:
    """What the initiator asks for in a login.

    ``isid``: 6 bytes. ``receive_data_segment_length``: data bytes of one PDU that we take.
    ``send_data_segment_length``: data bytes of one PDU that we send, at most; where the target only
    repeats this offer, 8192 at most. ``unexpected_pdus``: how many PDUs that answer nothing we take
    at once. ``max_ulpdu``: the MaxULPDULength to declare, in bytes; 0: none. ``hello``: declare
    that a Hello is required; a target that does not know it, or says No, gets none.
    ``discovery``: a discovery session, which has no target name. ``credentials`` None: no
    authentication.
    ``unsolicited_data``: InitialR2T=No is offered; None: it is in Traditional iSCSI, where
    immediate data is offered.

    ``max_connections``, ``error_recovery_level``: the most to agree to; ``time2retain``: seconds
    that the target is to keep the tasks of a lost connection.

    ``leading``: what the leading login of a session agreed on; None: this is one. For a later
    connection ``tsih`` is that of the session, ``cid`` one that no other connection of it has, and
    ``cmd_sn`` the CmdSN of the session's next command. Keys that only a leading login may send are
    left out, RDMAExtensions among them: the mode is inherited (RFC 7145 section 5.1).

    ``rdma`` False: Traditional iSCSI. Then ``header_digest`` and ``data_digest`` are the digests to
    offer (comma-separated, best first), and ``receive_data_segment_length`` holds for Data-In,
    too.

    ``rdma`` with a ``max_recv_data_segment_length`` other than 0: login travels as a byte stream,
    and where the target does not agree to RDMAExtensions, the connection goes on in Traditional
    iSCSI, with that MaxRecvDataSegmentLength and those digests. ``needs_rdma``: it must not."""

    initiator_name: str
    target_name: str
    isid: bytes
    immediate_data: bool = False
    unsolicited_data: bool | None = None
    receive_data_segment_length: int = 8192
    send_data_segment_length: int = 8192
    unexpected_pdus: int = 32
    max_ulpdu: int = 0
    hello: bool = False
    discovery: bool = False
    max_connections: int = 1
    error_recovery_level: int = 0
    time2retain: int = 0
    leading: SessionParameters | None = None
    tsih: int = 0
    cid: int = 0
    cmd_sn: int = _FIRST_CMD_SN
    rdma: bool = True
    max_recv_data_segment_length: int = 0
    needs_rdma: bool = True
    header_digest: str = "None"
    data_digest: str = "None"
    credentials: Credentials | None = None


class LoginInitiator:
    """The initiator's side of one login, without I/O.

    Call ``start`` once, then ``receive`` for each Login Response, until ``done``. Full feature
    phase then begins with ``parameters``, ``tsih``, ``cmd_sn`` (of the first command),
    ``exp_stat_sn``, ``exp_cmd_sn`` and ``max_cmd_sn``.
    """

    def __init__(self, config: LoginInitiatorConfig) -> None:
        self._config = config
        self._collector = Collector()
        self._chap = ChapInitiator(config.credentials) if config.credentials else None
        self._stages = Stages(INITIATOR)
        self._next_stage: int | None = None  # the NSG that the request in flight asks for
        self._offered: set[str] = set()
        self._settled: set[str] = set()  # answered by the target, or offered by it
        self._rounds = 0
        self.tsih = config.tsih
        self.cmd_sn = config.cmd_sn
        self.exp_stat_sn = 0
        self.exp_cmd_sn = config.cmd_sn
        # The window is closed until the target opens it.
        self.max_cmd_sn = (config.cmd_sn - 1) & MASK32
        unsolicited = config.unsolicited_data
        if unsolicited is None:
            unsolicited = config.immediate_data and not config.rdma
        self.parameters = SessionParameters(
            rdma_extensions=config.rdma and not config.discovery,
            initial_r2t=not unsolicited,
            immediate_data=config.immediate_data,
            max_burst_length=1 << 20,
            first_burst_length=65536,
            max_connections=config.max_connections,
            error_recovery_level=config.error_recovery_level,
            default_time2wait=0,
            default_time2retain=config.time2retain,
            header_digest=config.header_digest,
            data_digest=config.data_digest,
            target_recv_data_segment_length=config.send_data_segment_length,
            initiator_recv_data_segment_length=config.receive_data_segment_length,
            iser_hello_required=True if config.hello else None,
        )
        if config.leading is not None:
            self.parameters = replace(
                config.leading,
                header_digest=config.header_digest,
                data_digest=config.data_digest,
                target_recv_data_segment_length=config.send_data_segment_length,
                initiator_recv_data_segment_length=config.receive_data_segment_length,
                max_recv_data_segment_length=SAFE_SEGMENT_LENGTH,
                max_ulpdu=0,
            )

    @property
    def done(self) -> bool:
        return self._stages.done

    def start(self) -> tuple[bytes, bytes]:
        """The first Login Request, as (BHS, data segment)."""
        if self._chap is not None:
            self._stages.enter(Event.SECURE)
            self._offered.add("AuthMethod")
            return self._request([*self._identity(), ("AuthMethod", "CHAP")], transit=False)
        self._stages.enter(Event.SKIP)
        return self._request(self._identity() + self._offers(), transit=True)

    def _identity(self) -> list[tuple[str, str]]:
        config = self._config
        pairs = [("InitiatorName", config.initiator_name)]
        if config.discovery:
            return [*pairs, ("SessionType", "Discovery")]
        if config.leading is not None:
            return [*pairs, ("TargetName", config.target_name)]  # SessionType is leading only
        return [*pairs, ("TargetName", config.target_name), ("SessionType", "Normal")]

    def _offers(self) -> list[tuple[str, str]]:
        """The operational keys that are not settled. At first these are all. After a target has
        sent us back to the security stage, they are those that it has not answered."""
        wish = self.parameters
        # Our declarations come from the config: ``parameters`` holds what the target declared.
        declared: dict[str, int] = {
            "MaxOutstandingUnexpectedPDUs": self._config.unexpected_pdus,
            "MaxRecvDataSegmentLength": self._traditional_length(),
            keys.MAX_ULPDU: self._config.max_ulpdu,
        }
        names = _NORMAL if self._config.rdma else _TRADITIONAL
        if self._config.max_recv_data_segment_length:
            names = _STREAM
        if self._config.leading is not None:
            names = _LATER if self._config.leading.rdma_extensions else _LATER_TRADITIONAL
        if self._config.max_ulpdu:
            names = (*names, keys.MAX_ULPDU)
        if self._config.hello and self._config.leading is None:
            names = (*names, "iSERHelloRequired")
        if self._config.discovery:
            names = _DISCOVERY
        offers: list[tuple[str, str]] = []
        for name in names:
            if name not in self._settled:
                self._offered.add(name)
                value = declared.get(name, getattr(wish, keys.TABLE[name].field))
                offers.append((name, keys.text_of(value)))
        return offers

    def _traditional_length(self) -> int:
        """Our MaxRecvDataSegmentLength in Traditional iSCSI."""
        config = self._config
        return config.max_recv_data_segment_length or config.receive_data_segment_length

    def _request(self, pairs: list[tuple[str, str]], transit: bool) -> tuple[bytes, bytes]:
        data = encode(pairs)
        stage = self._stages.code
        flags = stage << pdu.CSG_SHIFT
        self._next_stage = None
        if transit:
            self._next_stage = (
                pdu.OPERATIONAL_STAGE if stage == pdu.SECURITY_STAGE else pdu.FULL_FEATURE_PHASE
            )
            flags |= pdu.TRANSIT | self._next_stage
        request = pdu.LoginRequest(
            flags=flags,
            data_length=len(data),
            isid=self._config.isid,
            tsih=self._config.tsih,
            itt=_ITT,
            cid=self._config.cid,
            cmd_sn=self.cmd_sn,
            exp_stat_sn=self.exp_stat_sn,
        )
        return request.pack(), data

    def receive(self, header: bytes, data: bytes | memoryview) -> list[tuple[bytes, bytes]]:
        """Take a PDU of the target; returns the requests to send next (none when done).

        Raises LoginError or one of its subclasses when the target refuses, RemoteProtocolError when
        it breaks the protocol. Then the login has failed, and the connection is to be closed.
        """
        if self._stages.over:
            raise RemoteProtocolError("iSCSI", "a login response after the end of the login")
        try:
            return self._receive(header, data)
        except IserblkError:
            self._stages.enter(Event.REFUSE)
            raise

    def _receive(self, header: bytes, data: bytes | memoryview) -> list[tuple[bytes, bytes]]:
        self._rounds += 1
        if self._rounds > MAXIMUM_ROUNDS:
            raise RemoteProtocolError("iSCSI", f"no end of login after {MAXIMUM_ROUNDS} rounds")
        response = pdu.LoginResponse.unpack_from(header)
        opcode = response.opcode & bhs.OPCODE_MASK
        if opcode == bhs.REJECT:
            words = reasons.reject_reason(pdu.Reject.unpack_from(header).reason)
            raise LoginError(f"the target rejected the login request: {words}")
        if opcode != bhs.LOGIN_RESPONSE:
            raise RemoteProtocolError("iSCSI", f"opcode {opcode:#x} in answer to a login request")
        if response.status:  # first of all: tgtd refuses without naming the login (ITT, ISID)
            raise self._refused(response.status, data)
        if response.itt != _ITT or response.isid != self._config.isid:
            raise RemoteProtocolError("iSCSI", "a login response to another request")
        if response.version_active:
            raise LoginError(
                f"the target speaks version {response.version_active} of iSCSI; we speak 0"
            )
        self._take_numbers(response)
        self._collector.add(data)
        if response.flags & bhs.FLAG_CONTINUE:
            if response.flags & pdu.TRANSIT:
                raise RemoteProtocolError("iSCSI", "a login response with both T and C")
            return [self._request([], transit=False)]
        pairs = self._collector.take()
        return self._advance(response, pairs)

    def _take_numbers(self, response: pdu.LoginResponse) -> None:
        """Take StatSN and the command window (RFC 7143 section 4.2.2.1)."""
        self.exp_stat_sn = (response.stat_sn + 1) & MASK32
        if not serial_lt(response.max_cmd_sn, (response.exp_cmd_sn - 1) & MASK32):
            self.exp_cmd_sn = response.exp_cmd_sn
            self.max_cmd_sn = response.max_cmd_sn

    def _advance(
        self, response: pdu.LoginResponse, pairs: list[tuple[str, str]]
    ) -> list[tuple[bytes, bytes]]:
        stage = response.flags >> pdu.CSG_SHIFT & pdu.STAGE_MASK
        following = response.flags & pdu.STAGE_MASK
        transit = bool(response.flags & pdu.TRANSIT)
        if stage == pdu.SECURITY_STAGE and self._stages.state is State.SKIPPED and not transit:
            self._stages.enter(Event.SEND_BACK)
        elif stage != self._stages.code:
            raise RemoteProtocolError("iSCSI", f"the target is in login stage {stage}")
        answers = self._take(pairs)
        if self._chap is not None and stage == pdu.SECURITY_STAGE:
            answers += self._authenticate(self._chap, pairs)
            if transit and not self._chap.done:
                raise AuthenticationError("the target goes on without CHAP")
            if not transit:
                return [self._request(answers, transit=self._chap.responded)]
        if not transit:
            if stage == pdu.SECURITY_STAGE and "AuthMethod" not in self._settled | self._offered:
                self._offered.add("AuthMethod")
                answers.append(("AuthMethod", "None"))
            return [self._request(answers, transit=True)]
        if following != self._next_stage:
            raise RemoteProtocolError("iSCSI", f"the target goes on to login stage {following}")
        if following == pdu.OPERATIONAL_STAGE:
            self._stages.enter(Event.NEGOTIATE)
            return [self._request(self._offers() + answers, transit=True)]
        # Offers in the last response cannot be answered. They are accepted where our answer would
        # be the same value.
        if any(pair not in pairs for pair in answers):
            raise RemoteProtocolError(
                "iSCSI", f"the target offered {answers[0][0]} with its last login response"
            )
        if self._config.leading is not None and response.tsih != self._config.tsih:
            raise RemoteProtocolError(
                "iSCSI",
                f"the target put a connection of session {self._config.tsih} into session "
                f"{response.tsih}",
            )
        self.tsih = response.tsih
        self._settle()
        self._stages.enter(Event.CONCLUDE)
        return []

    def _take(self, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Settle the keys of a response; returns our answers to keys that the target offered."""
        answers: list[tuple[str, str]] = []
        for name, value in pairs:
            if name in self._settled:
                raise RemoteProtocolError("iSCSI", f"the target sent {name} in two responses")
            self._settled.add(name)
            if self._chap is not None and (name == "AuthMethod" or chap.is_key(name)):
                if self._stages.state is not State.SECURITY:
                    raise RemoteProtocolError("iSCSI", f"{name} outside of the security stage")
            elif name == "AuthMethod":
                if "None" not in value.split(","):
                    raise AuthenticationError(
                        f"the target wants authentication ({value[:40]}): write iser://USER@HOST/…"
                        " and give chap-secret-file"
                    )
                if name not in self._offered:
                    answers.append((name, "None"))
            elif name in self._offered:
                keys.accept(self.parameters, name, value)
            elif self._config.leading is not None and name in keys.LEADING_ONLY:
                if keys.TABLE[name].kind != keys.DECLARE:
                    answers.append((name, keys.REJECT))
            else:
                answer = keys.answer(
                    self.parameters, name, value, self._config.discovery, by_target=True
                )
                if answer is not None:
                    answers.append((name, answer))
        return answers

    def _authenticate(
        self, chap_initiator: ChapInitiator, pairs: list[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """Take one step of CHAP; returns the keys to send."""
        given = dict(pairs)
        if "AuthMethod" not in self._settled:
            raise RemoteProtocolError("iSCSI", "the target did not answer AuthMethod")
        if given.get("CHAP_A") in keys.ANSWER_WORDS and self.hint:
            raise AuthenticationError(f"no algorithm of CHAP was agreed on{self.hint}")
        if "AuthMethod" not in given:
            return chap_initiator.receive([pair for pair in pairs if chap.is_key(pair[0])])
        method = given["AuthMethod"]
        if method == "None":
            raise AuthenticationError(
                "the target wants no CHAP, it does not authenticate initiators (AuthMethod=None), "
                "but a user and a secret were given; turn CHAP on at the target, or leave them out"
            )
        if method in keys.ANSWER_WORDS:
            raise AuthenticationError(
                f"the target refuses CHAP as a method (AuthMethod={method}), and a user and a "
                "secret were given; turn CHAP on at the target, or leave them out where it lets "
                "this initiator in without"
            )
        if method != "CHAP":
            raise RemoteProtocolError("iSCSI", f"AuthMethod={method[:40]} was not offered")
        if any(chap.is_key(name) for name in given):
            raise RemoteProtocolError("iSCSI", "the target began CHAP before it was asked")
        return chap_initiator.start()

    def _settle(self) -> None:
        """Set the values that the session works with, from the keys that were agreed on."""
        config, outcome = self._config, self.parameters
        if self._chap is not None:
            outcome.chap = "mutual" if self._chap.mutual else "one-way"
            outcome.chap_algorithm = self._chap.algorithm
        if config.leading is None:
            keys.conclude(outcome, self._settled)
        else:
            self._settle_later(config.leading)
        may_go_on = config.max_recv_data_segment_length and (
            config.discovery or not config.needs_rdma
        )
        if not config.rdma or (may_go_on and not outcome.rdma_extensions):
            self._settle_traditional()
            return
        # RDMAExtensions=Yes implies that, whatever was answered (RFC 7145 section 6.1).
        outcome.header_digest = outcome.data_digest = "None"
        if not config.discovery and not outcome.rdma_extensions:
            raise IserRefused(
                "the target does not agree to iSER (RDMAExtensions is not Yes); use a portal of it "
                "that has iSER enabled, an iscsi:// URL, or fallback=iscsi"
            )
        elif outcome.target_recv_data_segment_length == config.send_data_segment_length:
            # LIO repeats any value that it is offered, and still takes no more than 8192.
            outcome.target_recv_data_segment_length = min(
                outcome.target_recv_data_segment_length, SAFE_SEGMENT_LENGTH
            )

    def _settle_later(self, leading: SessionParameters) -> None:
        """The keys of one connection, where this is not the first of its session."""
        for name in self._offered - self._settled:
            if name in keys.TABLE:
                keys.not_answered(self.parameters, name)
        group = self.parameters.target_portal_group_tag
        if group != leading.target_portal_group_tag:
            raise LoginError(
                f"the portal belongs to portal group {group}, the session to portal group "
                f"{leading.target_portal_group_tag}",
                pdu.LOGIN_CANNOT_INCLUDE,
            )

    def _settle_traditional(self) -> None:
        config, outcome = self._config, self.parameters
        outcome.rdma_extensions = False
        # The layers above use the names of iSER for the data lengths of both datamovers.
        outcome.target_recv_data_segment_length = outcome.max_recv_data_segment_length
        outcome.initiator_recv_data_segment_length = self._traditional_length()
        for name, asked, agreed in (
            ("header", config.header_digest, outcome.header_digest),
            ("data", config.data_digest, outcome.data_digest),
        ):
            if agreed not in asked.split(","):
                raise LoginError(
                    f"the target does not agree to {name} digests; "
                    f"use {name}-digest=crc32c,none to go on without"
                )

    @property
    def hint(self) -> str:
        """Text to add to the error when the login ends now; "" for none.

        When the target ends the login instead of choosing an algorithm of CHAP, a shorter offer may
        help. The user has to choose that; it is not tried automatically."""
        one = self._chap
        if one is None or self._config.credentials is None or not one.offered or one.responded:
            return ""
        offered = self._config.credentials.algorithms
        if offered == (chap.MD5,):
            return ""
        if chap.MD5 not in offered:
            return "; it may not have the algorithm of CHAP that auth= asks for"
        return (
            "; it ended the login before its challenge: a target that looks at the first algorithm "
            "of CHAP only and wants MD5 (an old LIO or Synology) needs auth=md5 in the URL"
        )

    def _why_no_entry(self) -> str:
        """What an authentication failure means at this point of the login."""
        credentials = self._config.credentials
        if self._chap is None:
            return (
                "the target wants a user name and a secret, and none were given: write USER@ and "
                "chap-secret-file="
            )
        if "AuthMethod" not in self._settled:
            return (
                "the target refused when it was offered CHAP, before it had asked for a user name: "
                "if it wants no CHAP of this initiator, leave out user and secret, else turn CHAP "
                "on for it there"
            )
        if not self._chap.responded:
            return f"the target agreed to CHAP{self.hint or ', and ended the login'}"
        if credentials is not None and credentials.target_secret:
            return (
                "check user name and secret; for mutual CHAP the target needs a secret of its own"
            )
        return "check user name and secret"

    def _refused(self, status: int, data: bytes | memoryview) -> LoginError:
        words = reasons.login_status(status)
        name = self._config.target_name
        if status >> 8 == 1:
            self._collector.add(data)
            pairs = self._collector.take()
            address = next((value for key, value in pairs if key == "TargetAddress"), "")[:256]
            where = f", to {address}" if address else ""
            return LoginError(f"{words}{where}", status, address)
        if status == _AUTHENTICATION_FAILURE:
            return AuthenticationError(f"login refused: {words}: {self._why_no_entry()}", status)
        words += self.hint
        if status in _NOT_FOUND:
            return TargetNotFound(f"no target {name}: {words}", status)
        return LoginError(f"login to {name or 'discovery session'} refused: {words}", status)
