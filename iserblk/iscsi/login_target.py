"""The login phase of a target, PDU by PDU (RFC 7143 section 6.3).

Without accounts there is no authentication: the answer in the security stage is AuthMethod=None,
and an initiator may skip that stage. With accounts an initiator must pass the security stage by
CHAP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from iserblk.errors import AuthenticationError, RemoteProtocolError
from iserblk.iscsi import bhs, chap, keys, pdu
from iserblk.iscsi.chap import Accounts, ChapTarget
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.serial import MASK32
from iserblk.iscsi.stages import TARGET, Event, Stages, State
from iserblk.iscsi.text import Collector, encode
from iserblk.names import MAXIMUM_NAME, may_name

MAXIMUM_ROUNDS = 32
# Bytes of all texts of a login: twice what has to be taken (section 6.1). Its keys are remembered
# until it has ended, and any peer may begin one.
MAXIMUM_LOGIN = 16384
_MAXIMUM_RESPONSE = 8192  # bytes that any initiator takes in one Login Response

INITIATOR_ERROR = 0x0200
AUTHENTICATION_FAILURE = 0x0201
AUTHORIZATION_FAILURE = 0x0202
NOT_FOUND = 0x0203
UNSUPPORTED_VERSION = 0x0205
TOO_MANY_CONNECTIONS = 0x0206
MISSING_PARAMETER = 0x0207
CANNOT_INCLUDE = pdu.LOGIN_CANNOT_INCLUDE
SESSION_TYPE_NOT_SUPPORTED = 0x0209
SESSION_DOES_NOT_EXIST = 0x020A
OUT_OF_RESOURCES = 0x0302

FIRST_BURST = 65536  # bytes of unsolicited data of a command that we take
# Unsolicited Data-Outs of all commands together: enough for 128 commands in segments of 8 KiB, or
# for 8 commands in segments of 512 bytes.
UNSOLICITED_PDUS = 1024
# Seconds for which the tasks of a lost connection are kept at most, whatever Time2Wait an initiator
# asks for: they hold memory, and may hold up the tasks of others.
LONGEST_RETENTION = 40
_DIGESTS = "CRC32C,None"  # digests that we accept over Traditional iSCSI
_IDENTITY = ("InitiatorName", "TargetName", "SessionType")


def time2retain_beside(time2wait: int, time2retain: int) -> int:
    """The Time2Retain, of at most ``time2retain``, that we can keep behind this Time2Wait; all in
    seconds. 0: nothing is kept."""
    return max(0, min(time2retain, LONGEST_RETENTION - time2wait))


class Joinable(Protocol):
    """A session that a further connection may join, as the login of that connection sees it.

    ``portal_group``: the tag; a session stays in one portal group. ``user``: as which its leading
    connection logged in. ``parameters``: what the leading login agreed on. ``exp_cmd_sn``,
    ``max_cmd_sn``: its command window now. ``depth``: how many commands that had at first."""

    @property
    def initiator_name(self) -> str: ...

    @property
    def isid(self) -> bytes: ...

    @property
    def user(self) -> str: ...

    @property
    def portal_group(self) -> int: ...

    @property
    def parameters(self) -> SessionParameters: ...

    @property
    def exp_cmd_sn(self) -> int: ...

    @property
    def max_cmd_sn(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def done(self) -> bool:
        """The session has ended."""
        ...

    def takes(self, cid: int) -> bool:
        """Whether there is room for a connection with this CID, new or reinstated."""
        ...


def _no_session(_tsih: int) -> Joinable | None:
    return None


@dataclass(slots=True, frozen=True)
class LoginTargetConfig:
    """What the target offers in a login.

    ``tsih``: the TSIH of a new session. ``receive_data_segment_length``: data bytes of one PDU that
    we take. ``unexpected_pdus``: how many PDUs besides commands we take at once. ``max_ulpdu``: the
    MaxULPDULength in bytes to declare to an initiator that declares its own; 0: none.

    ``queue_depth``: commands that an initiator may have outstanding, at most.
    ``unsolicited_pdus``: unsolicited Data-Outs of all these commands that we have room for over
    iSER; the more of them a command may have, the fewer commands may be outstanding.

    ``find_session(TSIH)``: the session that a login may join, None: there is none.
    ``max_connections``, ``error_recovery_level``: the most that we agree to. ``time2retain``:
    seconds for which we keep the tasks of a lost connection at ErrorRecoveryLevel 2, or fewer, see
    ``time2retain_beside``; below that level they end at once.

    ``accounts`` None: no initiator has to authenticate.
    ``may_log_in(initiator name, user)``: whether this initiator is allowed here as the user that it
    has proved to be ("" without CHAP).
    ``may_reinstate(initiator name, ISID, user)``: whether a new session may take the place of the
    one of that name, if there is one.
    ``portal_group``: the target portal group tag.

    ``solicited_only``: what an initiator means that does not declare
    TaggedBufferForSolicitedDataOnly. True: Yes, as running code, unless it asks for a Hello, for
    then it knows the key. False: No, the default of the specifications (RFC 7145 section 6.9; RFC
    5046 section 7.3.1 has no such key).

    ``rdma`` False: the connection is Traditional iSCSI. True: login travels in messages of iSER,
    and ends if iSER is not agreed to; but with a ``max_recv_data_segment_length`` other than 0 it
    travels as a byte stream, and where the initiator does not ask for iSER (RDMAExtensions=Yes) the
    connection goes on in Traditional iSCSI, with that MaxRecvDataSegmentLength. There
    ``takes_iser`` False is the answer No to RDMAExtensions, and ``takes_traditional`` False ends a
    login that does not ask for iSER, except for discovery."""

    target_name: str
    tsih: int
    receive_data_segment_length: int = 8192
    unexpected_pdus: int = 32
    max_ulpdu: int = 0
    queue_depth: int = 128
    unsolicited_pdus: int = UNSOLICITED_PDUS
    find_session: Callable[[int], Joinable | None] = _no_session
    max_connections: int = 1
    error_recovery_level: int = 0
    time2retain: int = 20
    rdma: bool = True
    max_recv_data_segment_length: int = 0
    takes_iser: bool = True
    takes_traditional: bool = True
    accounts: Accounts | None = None
    may_log_in: Callable[[str, str], bool] = lambda _name, _user: True
    may_reinstate: Callable[[str, bytes, str], bool] = lambda _name, _isid, _user: True
    portal_group: int = 1
    solicited_only: bool = True


class _Refusal(Exception):
    """The login is refused with ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class LoginTarget:
    """The target's side of one login, without I/O.

    Call ``receive`` for each Login Request until ``done`` or ``failed``. When it is done, full
    feature phase begins with ``parameters``, ``initiator_name``, ``isid``, ``discovery``,
    ``stat_sn``, ``exp_cmd_sn`` and ``max_cmd_sn``. ``cid``, ``tsih``: of the connection and of its
    session. ``joined``: the session that the connection becomes a part of; None: a new one.
    ``depth``: commands in the window of a new session.
    ``unsolicited_of_each``: unsolicited Data-Outs that each may have, over iSER. ``user``: the user
    name that the initiator has proved, "" without CHAP. When it has failed, ``problem`` may have
    the reason, for the log.
    """

    def __init__(self, config: LoginTargetConfig) -> None:
        self._config = config
        self._collector = Collector()
        self._rounds = 0
        self._length = 0  # bytes of all texts so far
        self._first: pdu.LoginRequest | None = None
        self._received: dict[str, str] = {}  # every key of the initiator so far
        self._offered: set[str] = set()  # keys that we offered, and that are not answered
        self._declared = False  # our MaxRecvDataSegmentLength was sent
        # The connection is a byte stream, on which the initiator may ask for iSER.
        self._stream = config.rdma and config.max_recv_data_segment_length > 0
        self._rdma = config.rdma and not self._stream  # iSER is agreed on, or there is no choice
        self._last: pdu.LoginRequest | None = None
        self._stages = Stages(TARGET)
        self._chap = ChapTarget(config.accounts) if config.accounts else None
        self.problem = ""
        self.discovery = False
        self.initiator_name = ""
        self.target_name = config.target_name
        self.isid = b""
        self.cid = 0
        self.tsih = config.tsih
        self._joins = False  # the initiator names a session
        self.joined: Joinable | None = None
        self.stat_sn = 0
        self.exp_cmd_sn = 0
        self.max_cmd_sn = 0
        self.depth = 0
        self.unsolicited_of_each = 0
        self.parameters = SessionParameters(
            rdma_extensions=config.rdma,
            max_connections=config.max_connections,
            error_recovery_level=config.error_recovery_level,
            header_digest="None" if self._rdma else _DIGESTS,
            data_digest="None" if self._rdma else _DIGESTS,
            initial_r2t=False,
            immediate_data=True,
            max_burst_length=(1 << 24) - 1,
            first_burst_length=FIRST_BURST,
            default_time2wait=0,
            default_time2retain=0,
            target_recv_data_segment_length=config.receive_data_segment_length,
            initiator_recv_data_segment_length=262144,
            target_portal_group_tag=config.portal_group,
        )

    @property
    def done(self) -> bool:
        return self._stages.done

    @property
    def failed(self) -> bool:
        return self._stages.failed

    @property
    def user(self) -> str:
        return self._chap.user if self._chap else ""

    @property
    def begun(self) -> bool:
        """A Login Request has come."""
        return self._first is not None

    def claimed_user(self, header: bytes, data: bytes | memoryview) -> str:
        """The user name that a Login Request, which ``receive`` has not seen yet, gives with a
        response of CHAP; "": it gives none. Changes nothing."""
        flags = pdu.LoginRequest.unpack_from(header).flags
        if not self._must_authenticate() or flags & bhs.FLAG_CONTINUE:
            return ""
        try:
            pairs = self._collector.look(data)
        except RemoteProtocolError:
            return ""
        return dict(pairs).get("CHAP_N", "")

    def _must_authenticate(self) -> bool:
        return self._chap is not None and not self._chap.done

    def receive(self, header: bytes, data: bytes | memoryview) -> list[tuple[bytes, bytes]]:
        """Take a Login Request; returns the responses. A refusal is a response, too, and sets
        ``failed``.

        Raises RemoteProtocolError for a PDU that is no Login Request, and for a login of too many
        rounds; then the connection is to be closed.
        """
        if self._stages.over:
            raise RemoteProtocolError("iSCSI", "a login request after the end of the login")
        self._rounds += 1
        if self._rounds > MAXIMUM_ROUNDS:
            raise RemoteProtocolError("iSCSI", f"no end of login after {MAXIMUM_ROUNDS} rounds")
        request = pdu.LoginRequest.unpack_from(header)
        if request.opcode & bhs.OPCODE_MASK != bhs.LOGIN_REQUEST:
            raise RemoteProtocolError("iSCSI", f"opcode {request.opcode:#x} during login")
        self._last = request
        if self._first is None:
            self._first = request
            self.isid = request.isid
            self.cid = request.cid
            self._joins = request.tsih != 0
            self.tsih = request.tsih or self._config.tsih
            # StatSN starts where the initiator expects it. The initiator chooses CmdSN.
            self.stat_sn = request.exp_stat_sn
            self.exp_cmd_sn = request.cmd_sn
            # The smallest window, as no command comes during login. ``_conclude`` opens it.
            self.max_cmd_sn = request.cmd_sn
        try:
            return self._take(request, self._first, data)
        except _Refusal as refusal:
            self._stages.enter(Event.REFUSE)
            return [self._response(request, 0, b"", refusal.status)]
        except AuthenticationError as error:
            self._stages.enter(Event.REFUSE)
            self.problem = f"authentication failed: {error}"
            return [self._response(request, 0, b"", AUTHENTICATION_FAILURE)]
        except chap.MissingKey as error:
            self._stages.enter(Event.REFUSE)
            self.problem = str(error)
            return [self._response(request, 0, b"", MISSING_PARAMETER)]
        except RemoteProtocolError:
            # The PDU is a Login Request, so the initiator gets a Login Response (section 6.3).
            self._stages.enter(Event.REFUSE)
            return [self._response(request, 0, b"", INITIATOR_ERROR)]

    def out_of_resources(self, problem: str) -> tuple[bytes, bytes]:
        """Refuse the login that has just been ``done``: the connection resources cannot be
        allocated. Returns the response (0302) that takes the place of the final one."""
        assert self._last is not None
        self._stages.enter(Event.REFUSE)
        self.problem = f"no connection resources: {problem}"
        self.stat_sn = (self.stat_sn - 1) & MASK32  # of the response that is not sent
        return self._response(self._last, 0, b"", OUT_OF_RESOURCES)

    def _take(
        self, request: pdu.LoginRequest, first: pdu.LoginRequest, data: bytes | memoryview
    ) -> list[tuple[bytes, bytes]]:
        stage = request.flags >> pdu.CSG_SHIFT & pdu.STAGE_MASK
        following = request.flags & pdu.STAGE_MASK
        transit = bool(request.flags & pdu.TRANSIT)
        if request.version_min > 0:
            raise _Refusal(UNSUPPORTED_VERSION)
        if (request.isid, request.tsih, request.itt, request.cid) != (
            *(first.isid, first.tsih, first.itt, first.cid),
        ):
            raise _Refusal(INITIATOR_ERROR)
        if self._stages.state is not State.START and stage != self._stages.code:
            raise _Refusal(INITIATOR_ERROR)
        if stage not in (pdu.SECURITY_STAGE, pdu.OPERATIONAL_STAGE):
            raise _Refusal(INITIATOR_ERROR)
        if stage == pdu.OPERATIONAL_STAGE and self._must_authenticate():
            raise AuthenticationError("the initiator skipped the security stage")
        if self._stages.state is State.START:
            self._stages.enter(Event.SECURE if stage == pdu.SECURITY_STAGE else Event.SKIP)
        self._length += len(data)
        if self._length > MAXIMUM_LOGIN:
            self.problem = f"its texts have more than {MAXIMUM_LOGIN} bytes"
            raise _Refusal(INITIATOR_ERROR)
        self._collector.add(data)
        if request.flags & bhs.FLAG_CONTINUE:
            if transit:
                raise _Refusal(INITIATOR_ERROR)
            return [self._response(request, stage << pdu.CSG_SHIFT, b"")]
        answers = self._answers(self._collector.take(), stage)
        if transit and (
            following <= stage or following not in (pdu.OPERATIONAL_STAGE, pdu.FULL_FEATURE_PHASE)
        ):
            raise _Refusal(INITIATOR_ERROR)
        transit = transit and not self._must_authenticate()
        if following == pdu.FULL_FEATURE_PHASE and not self._may_finish(stage):
            # Not yet: the operational stage comes first, and all our offers must be answered.
            following = pdu.OPERATIONAL_STAGE
            transit = transit and stage == pdu.SECURITY_STAGE
        text = encode(answers)
        if len(text) > _MAXIMUM_RESPONSE:
            raise _Refusal(INITIATOR_ERROR)
        flags = stage << pdu.CSG_SHIFT
        if transit:
            flags |= pdu.TRANSIT | following
            if following == pdu.FULL_FEATURE_PHASE:
                self._conclude()
                self._stages.enter(Event.CONCLUDE)
                self._received.clear()  # a session lasts
            else:
                self._stages.enter(Event.NEGOTIATE)
        return [self._response(request, flags, text)]

    def _conclude(self) -> None:
        if not self._config.may_log_in(self.initiator_name, self.user):
            self.problem = f"{self.initiator_name} may not log in as {self.user or 'no user'!r}"
            raise _Refusal(AUTHORIZATION_FAILURE)
        if (
            not self.discovery
            and self.joined is None
            and not self._config.may_reinstate(self.initiator_name, self.isid, self.user)
        ):
            self.problem = (
                f"{self.initiator_name} has a session with this ISID already, of another user than "
                f"{self.user or 'no user'!r}"
            )
            raise _Refusal(AUTHORIZATION_FAILURE)
        outcome = self.parameters
        if self.joined:
            keys.conclude(outcome, self._received.keys() | keys.LEADING_ONLY)
        else:
            keys.conclude(outcome, self._received)
        if not self._rdma:
            # The layers above use the names of iSER for the data lengths of both datamovers.
            outcome.initiator_recv_data_segment_length = outcome.max_recv_data_segment_length
            outcome.target_recv_data_segment_length = self._traditional_length()
        elif outcome.tagged_buffer_for_solicited_data_only is None and (
            outcome.iser_hello_required or not self._config.solicited_only
        ):
            outcome.tagged_buffer_for_solicited_data_only = False
        depth = self._config.queue_depth
        self.unsolicited_of_each = 0
        if self._rdma and not self.discovery and not outcome.initial_r2t:
            # Each unsolicited Data-Out must find a receive (RFC 7145 section 8.1.1.2). So the
            # window is made so small that the Data-Outs of all its commands have room.
            segment = outcome.target_recv_data_segment_length
            self.unsolicited_of_each = -(-outcome.first_burst_length // segment)
            depth = min(depth, self._config.unsolicited_pdus // self.unsolicited_of_each)
        joined = self.joined
        if joined is not None:
            if joined.done:
                raise _Refusal(SESSION_DOES_NOT_EXIST)
            if not joined.takes(self.cid):
                raise _Refusal(TOO_MANY_CONNECTIONS)
            if depth < joined.depth:  # the window is open already: its Data-Outs may all come here
                raise _Refusal(OUT_OF_RESOURCES)
            self.depth = joined.depth
            return
        self.depth = depth
        self.max_cmd_sn = (self.exp_cmd_sn + depth - 1) & MASK32

    def _traditional_length(self) -> int:
        """Our MaxRecvDataSegmentLength in Traditional iSCSI."""
        config = self._config
        return config.max_recv_data_segment_length or config.receive_data_segment_length

    def _may_finish(self, stage: int) -> bool:
        """Whether full feature phase may follow ``stage`` now. Raises _Refusal on a connection
        over iSER when RDMAExtensions is not Yes."""
        if self.discovery:
            return True
        if stage == pdu.SECURITY_STAGE or self._offered:
            return False
        if not self._rdma:
            return True
        if not self.parameters.rdma_extensions:
            raise _Refusal(INITIATOR_ERROR)
        return True

    def _answers(self, pairs: list[tuple[str, str]], stage: int) -> list[tuple[str, str]]:
        """Take a complete text of the initiator; returns the keys of our response."""
        answers: list[tuple[str, str]] = []
        fresh: list[tuple[str, str]] = []
        started = "AuthMethod" in self._received
        for name, value in pairs:
            if name not in self._received:
                self._received[name] = value
                fresh.append((name, value))
            elif self._received[name] != value or not self._is_declared(name):
                raise _Refusal(INITIATOR_ERROR)  # no renegotiation within login (section 6.3)
            # else: libiscsi repeats its names in the operational stage
        if not self.initiator_name:
            answers += self._identify()
        if self._joins and not self.joined and not self._must_authenticate():
            self._join()
        if self._stream and stage == pdu.OPERATIONAL_STAGE and not self.discovery:
            self._choose_mode()
        if not self.discovery:
            self._choose_time2retain([name for name, _ in fresh])
        secure = [pair for pair in fresh if self._chap is not None and chap.is_key(pair[0])]
        for name, value in fresh:
            if (name, value) not in secure:
                answers += self._answer(name, value, stage)
        if self._chap is not None and (secure or self._must_authenticate()):
            answers += self._authenticate(self._chap, secure, stage, started)
        if stage == pdu.OPERATIONAL_STAGE and not self._rdma and not self._declared:
            self._declared = True
            most = str(self._traditional_length())
            answers.append(("MaxRecvDataSegmentLength", most))
        if stage == pdu.OPERATIONAL_STAGE and not self.discovery and self._rdma:
            if self.joined:
                pass  # RDMAExtensions is exchanged on the leading connection (RFC 7145 section 5.1)
            elif "RDMAExtensions" not in self._received and not self._offered:
                # RFC 7145 section 6.3: as early as possible in the operational stage.
                self._offered.add("RDMAExtensions")
                answers.insert(0, ("RDMAExtensions", "Yes"))
            elif self._offered and "RDMAExtensions" not in {name for name, _ in fresh}:
                self._offered.clear()  # offered, but not answered: the default, No, holds
                self.parameters.rdma_extensions = False
        return answers

    def _join(self) -> None:
        """Make the connection a part of the session whose TSIH the initiator names. What the
        leading login agreed on holds, its mode included. Before an initiator is authenticated it
        is not told whether there is such a session."""
        session = self._config.find_session(self.tsih)
        if (
            session is None
            or session.done
            or session.isid != self.isid
            or session.initiator_name.lower() != self.initiator_name.lower()
            or session.user != self.user
        ):
            raise _Refusal(SESSION_DOES_NOT_EXIST)
        rdma = session.parameters.rdma_extensions
        if (
            self.discovery
            or session.portal_group != self._config.portal_group
            or not (self._stream or rdma == self._rdma)
        ):
            raise _Refusal(CANNOT_INCLUDE)
        if not session.takes(self.cid):
            raise _Refusal(TOO_MANY_CONNECTIONS)
        self.joined = session
        self._stream = False
        self._rdma = rdma
        own = self.parameters
        self.parameters = replace(
            session.parameters,
            header_digest="None" if rdma else own.header_digest,
            data_digest="None" if rdma else own.data_digest,
            target_recv_data_segment_length=own.target_recv_data_segment_length,
            initiator_recv_data_segment_length=own.initiator_recv_data_segment_length,
            max_recv_data_segment_length=own.max_recv_data_segment_length,
            max_ulpdu=own.max_ulpdu,
            initiator_alias=own.initiator_alias,
        )

    def _choose_time2retain(self, fresh: list[str]) -> None:
        """Only a session of ErrorRecoveryLevel 2 has tasks to keep for a later connection."""
        offered = keys.parse(
            keys.TABLE["ErrorRecoveryLevel"], self._received.get("ErrorRecoveryLevel", "0")
        )
        settled = "DefaultTime2Retain" in self._received and "DefaultTime2Retain" not in fresh
        if not self.joined and offered == 2 == self._config.error_recovery_level and not settled:
            offer = self._received.get("DefaultTime2Wait", "")
            wait = keys.parse(keys.TABLE["DefaultTime2Wait"], offer)
            self.parameters.default_time2retain = time2retain_beside(
                wait if isinstance(wait, int) else 0, self._config.time2retain
            )

    def _choose_mode(self) -> None:
        """On a byte stream the first text of the operational stage decides between iSER and
        Traditional iSCSI: an initiator offers RDMAExtensions there or never (RFC 7145 section 6.3).
        It is not offered by us, as most clients of a TCP port do not know it."""
        self._stream = False
        if self._received.get("RDMAExtensions") == "Yes" and self._config.takes_iser:
            self._rdma = True
            # RDMAExtensions=Yes implies that (section 6.1).
            self.parameters.header_digest = self.parameters.data_digest = "None"
        elif self._config.takes_traditional:
            self.parameters.rdma_extensions = False
        else:
            self.problem = "the portal group takes iSER only, and the initiator does not ask for it"
            raise _Refusal(INITIATOR_ERROR)

    def _authenticate(
        self, chap_target: ChapTarget, pairs: list[tuple[str, str]], stage: int, started: bool
    ) -> list[tuple[str, str]]:
        """Take one step of CHAP. ``started``: CHAP was agreed on before this text."""
        if stage != pdu.SECURITY_STAGE:
            raise _Refusal(INITIATOR_ERROR)
        if "AuthMethod" not in self._received:
            raise AuthenticationError("the initiator offers no AuthMethod")
        if not started and not pairs:
            return []  # CHAP was agreed on in this text
        return chap_target.receive(pairs)

    @staticmethod
    def _is_declared(name: str) -> bool:
        key = keys.TABLE.get(name)
        return name in _IDENTITY or (key is not None and key.kind == keys.DECLARE)

    def _identify(self) -> list[tuple[str, str]]:
        """Take initiator name, session type and target name, which the first text must have."""
        received = self._received
        name = received.get("InitiatorName", "")
        if not name or len(name.encode()) > MAXIMUM_NAME:
            raise _Refusal(MISSING_PARAMETER)
        if not may_name(name):  # section 4.2.7.1; and logs show the name as it is
            raise _Refusal(INITIATOR_ERROR)
        kind = received.get("SessionType", "Normal")
        if kind not in ("Normal", "Discovery"):
            raise _Refusal(SESSION_TYPE_NOT_SUPPORTED)
        self.discovery = kind == "Discovery"
        if self.discovery:
            self.parameters.error_recovery_level = 0
            self.parameters.max_connections = 1
        self.initiator_name = name
        target = received.get("TargetName", "")
        if not self.discovery:
            if not target:
                raise _Refusal(MISSING_PARAMETER)
            if target.lower() != self._config.target_name.lower():
                raise _Refusal(NOT_FOUND)
        return [("TargetPortalGroupTag", str(self.parameters.target_portal_group_tag))]

    def _answer(self, name: str, value: str, stage: int) -> list[tuple[str, str]]:
        if name in _IDENTITY:
            return []
        if name == "AuthMethod":
            if stage != pdu.SECURITY_STAGE:
                raise _Refusal(INITIATOR_ERROR)
            method = "None" if self._chap is None else "CHAP"
            if method not in value.split(","):
                raise AuthenticationError(f"the initiator does not offer AuthMethod={method}")
            return [(name, method)]
        if self.joined and name in keys.LEADING_ONLY:
            if name == "RDMAExtensions" and (value == "Yes") != self._rdma:
                raise _Refusal(CANNOT_INCLUDE)
            return [(name, keys.IRRELEVANT)]
        if name in self._offered:
            self._offered.remove(name)
            keys.accept(self.parameters, name, value)
            return []
        if name == keys.MAX_ULPDU and not self._config.max_ulpdu:
            return [(name, keys.NOT_UNDERSTOOD)]
        answer = keys.answer(self.parameters, name, value, self.discovery)
        if answer is not None:
            return [(name, answer)]
        if name == "MaxOutstandingUnexpectedPDUs" and self._rdma:
            # We declare ours only to initiators that know the key: others take it for an error.
            return [(name, str(self._config.unexpected_pdus))]
        if name == keys.MAX_ULPDU:
            return [(name, str(self._config.max_ulpdu))]
        return []

    def _response(
        self, request: pdu.LoginRequest, flags: int, data: bytes, status: int = 0
    ) -> tuple[bytes, bytes]:
        numbers = self.joined or self
        response = pdu.LoginResponse(
            flags=flags,
            data_length=len(data),
            isid=request.isid,
            # That of a new session is told in the final response only (RFC 7143 section 11.13.3).
            tsih=request.tsih or (self.tsih if self.done else 0),
            itt=request.itt,
            stat_sn=self.stat_sn,
            exp_cmd_sn=numbers.exp_cmd_sn,
            max_cmd_sn=numbers.max_cmd_sn,
            status=status,
        )
        self.stat_sn = (self.stat_sn + 1) & MASK32
        return response.pack(), data
