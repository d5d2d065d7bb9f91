import re,io
def sub(path, *pairs):
    s=open(path).read()
    for a,b in pairs:
        assert s.count(a)==1,(path,a,s.count(a))
        s=s.replace(a,b)
    open(path,'w').write(s)
sub('iserblk/options.py',
("    busy_poll_us: int = BUSY_POLL_US\n","    connections: int = 1  # of the session, at most\n    error_recovery_level: int = 0  # the highest that is asked for\n    busy_poll_us: int = BUSY_POLL_US\n"),
("""def _microseconds(""","""def _connections(key: str, value: str) -> int:
    connections = _number(value)
    if not 1 <= connections <= MOST_CONNECTIONS:
        raise BadArgument(f"{key}={shown(value)}: give a number from 1 to {MOST_CONNECTIONS}")
    if connections > 1:
        raise NotSupported(f"{key}={connections}: only one connection so far; leave it out")
    return connections


def _level(key: str, value: str) -> int:
    if value not in ("0", "1", "2"):
        raise BadArgument(f"{key}={shown(value)}: say 0, 1 or 2")
    if value != "0":
        raise NotSupported(f"{key}={value}: only level 0 so far; leave it out")
    return int(value)


def _microseconds("""),
("SMALLEST_JOURNAL = 64 << 10\n","SMALLEST_JOURNAL = 64 << 10\nMOST_CONNECTIONS = 8  # of one session\n"),
("from iserblk.errors import BadArgument\n","from iserblk.errors import BadArgument, NotSupported\n"),
('    "busy-poll": (','    "connections": ("connections", _connections),\n    "error-recovery-level": ("error_recovery_level", _level),\n    "busy-poll": ('),
)
sub('iserblk/cli/options.py',
('    ("queue-depth", "N", "Commands in flight on one connection. Default 128."),\n',
'    ("queue-depth", "N", "Commands in flight in one session. Default 128."),\n    ("connections", "N", "Connections of the session, 1 to 8. Default 1."),\n    ("error-recovery-level", "0|1|2", "The highest level to agree to. Default 0."),\n'))
sub('docs/cli.md',
("| `queue-depth` | Commands in flight on one connection, 1 to 1024 | 128 |\n",
"""| `queue-depth` | Commands in flight in one session, 1 to 1024 | 128 |
| `connections` | Connections of one session, 1 to 8, if the target takes as many (MaxConnections). Only 1 is possible so far | 1 |
| `error-recovery-level` | `0`, `1`, `2`: the highest ErrorRecoveryLevel to agree to with the target. Only 0 is possible so far | 0 |
"""))
sub('iserblk/iscsi/login_initiator.py',
('''# Discovery sessions have neither''','''# The later connections of a session: what is negotiated for one connection. All other keys are those
# of the leading login.
_LATER = (
    "HeaderDigest",
    "DataDigest",
    "TargetRecvDataSegmentLength",
    "InitiatorRecvDataSegmentLength",
)
_LATER_TRADITIONAL = ("HeaderDigest", "DataDigest", "MaxRecvDataSegmentLength")
# Discovery sessions have neither'''),
('''    ``rdma`` False: Trad''','''    ``max_connections``, ``error_recovery_level``: the most to agree to; ``time2retain``: seconds
    that the target is to keep the tasks of a lost connection.

    ``leading``: what the leading login of a session agreed on; None: this is one. For a later
    connection ``tsih`` is that of the session, ``cid`` one that no other connection of it has, and
    ``cmd_sn`` the CmdSN of the session's next command. Keys that only a leading login may send are
    left out, RDMAExtensions among them: the mode is inherited (RFC 7145 section 5.1).

    ``rdma`` False: Trad'''),
('''    cid: int = 0
    rdma: bool''','''    max_connections: int = 1
    error_recovery_level: int = 0
    time2retain: int = 0
    leading: SessionParameters | None = None
    tsih: int = 0
    cid: int = 0
    cmd_sn: int = _FIRST_CMD_SN
    rdma: bool'''),
('''        self.tsih = 0
        self.cmd_sn = _FIRST_CMD_SN
        self.exp_stat_sn = 0
        self.exp_cmd_sn = _FIRST_CMD_SN
        self.max_cmd_sn = _FIRST_CMD_SN - 1  # the window is closed until the target opens it
''','''        self.tsih = config.tsih
        self.cmd_sn = config.cmd_sn
        self.exp_stat_sn = 0
        self.exp_cmd_sn = config.cmd_sn
        # The window is closed until the target opens it.
        self.max_cmd_sn = (config.cmd_sn - 1) & MASK32
'''),
('''            default_time2wait=0,
            default_time2retain=0,
            header_digest''','''            max_connections=config.max_connections,
            error_recovery_level=config.error_recovery_level,
            default_time2wait=0,
            default_time2retain=config.time2retain,
            header_digest'''),
('''            iser_hello_required=True if config.hello else None,
        )
''','''            iser_hello_required=True if config.hello else None,
        )
        if config.leading is not None:
            wish = self.parameters
            self.parameters = replace(
                config.leading,
                **{key.field: getattr(wish, key.field) for key in map(keys.TABLE.get, _OF_ONE)},
            )
'''),
('''            return [*pairs, ("SessionType", "Discovery")]
        return''','''            return [*pairs, ("SessionType", "Discovery")]
        if config.leading is not None:
            return [*pairs, ("TargetName", config.target_name)]  # SessionType is leading only
        return'''),
('''        if self._config.max_ulpdu:
            names''','''        if self._config.leading is not None:
            names = _LATER if self._config.leading.rdma_extensions else _LATER_TRADITIONAL
        if self._config.max_ulpdu:
            names'''),
('''        if self._config.hello:
            names''','''        if self._config.hello and self._config.leading is None:
            names'''),
('''            tsih=0,
            itt=_ITT,''','''            tsih=self._config.tsih,
            itt=_ITT,'''),
('''        self.tsih = response.tsih
        self._settle()''','''        if self._config.leading is not None and response.tsih != self._config.tsih:
            raise RemoteProtocolError(
                "iSCSI", f"the target put a connection of session {self._config.tsih} into session "
                f"{response.tsih}"
            )
        self.tsih = response.tsih
        self._settle()'''),
('''            elif name in self._offered:
                keys.accept(self.parameters, name, value)
            else:
''','''            elif name in self._offered:
                keys.accept(self.parameters, name, value)
            elif self._config.leading is not None and name in keys.LEADING_ONLY:
                if keys.TABLE[name].kind != keys.DECLARE:
                    answers.append((name, keys.REJECT))
            else:
'''),
('''        keys.conclude(outcome, self._settled)
''','''        if config.leading is None:
            keys.conclude(outcome, self._settled)
        else:
            self._settle_later(config.leading)
'''),
('''    def _settle_traditional(self)''','''    def _settle_later(self, leading: SessionParameters) -> None:
        """The keys of one connection, where this is not the first of its session."""
        for name in self._offered - self._settled:
            if name in keys.TABLE:
                keys.not_answered(self.parameters, name)
        group = self.parameters.target_portal_group_tag
        if group != leading.target_portal_group_tag:
            raise LoginError(
                f"the portal belongs to portal group {group}, the session to portal group "
                f"{leading.target_portal_group_tag}"
            )

    def _settle_traditional(self)'''),
)
sub('iserblk/iscsi/login_initiator.py',
("from dataclasses import dataclass\n","from dataclasses import dataclass, replace\n"),
)
sub('iserblk/iscsi/keys.py',
('''# Numbers of unexpected PDUs''','''# Only the leading login of a session may send these (RFC 7143 section 13, RFC 7145 section 6).
LEADING_ONLY = frozenset(
    (
        "RDMAExtensions",
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
        "TaskReporting",
        "iSCSIProtocolLevel",
        "MaxOutstandingUnexpectedPDUs",
        "MaxAHSLength",
        "TaggedBufferForSolicitedDataOnly",
        "iSERHelloRequired",
    )
)

# Numbers of unexpected PDUs'''))
