"""Node records in the form in which open-iscsi 2.1 keeps them, iscsiadm(8) and iscsid.conf(5)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_FIRST = {"node.name": "", "node.tpgt": "1", "node.startup": "manual", "node.leading_login": "No"}

# What `iscsiadm -m discovery -t sendtargets` writes by itself, behind the keys of the interface.
_USUAL = {
    "node.discovery_address": "192.0.2.1",
    "node.discovery_port": "3260",
    "node.discovery_type": "send_targets",
    "node.session.initial_cmdsn": "0",
    "node.session.initial_login_retry_max": "8",
    "node.session.xmit_thread_priority": "-20",
    "node.session.cmds_max": "128",
    "node.session.queue_depth": "32",
    "node.session.nr_sessions": "1",
    "node.session.auth.authmethod": "None",
    "node.session.auth.chap_algs": "MD5",
    "node.session.timeo.replacement_timeout": "120",
    "node.session.err_timeo.abort_timeout": "15",
    "node.session.err_timeo.lu_reset_timeout": "30",
    "node.session.err_timeo.tgt_reset_timeout": "30",
    "node.session.err_timeo.host_reset_timeout": "60",
    "node.session.iscsi.FastAbort": "Yes",
    "node.session.iscsi.InitialR2T": "No",
    "node.session.iscsi.ImmediateData": "Yes",
    "node.session.iscsi.FirstBurstLength": "262144",
    "node.session.iscsi.MaxBurstLength": "16776192",
    "node.session.iscsi.DefaultTime2Retain": "0",
    "node.session.iscsi.DefaultTime2Wait": "2",
    "node.session.iscsi.MaxConnections": "1",
    "node.session.iscsi.MaxOutstandingR2T": "1",
    "node.session.iscsi.ERL": "0",
    "node.session.scan": "auto",
    "node.session.reopen_max": "0",
    "node.conn[0].address": "192.0.2.1",
    "node.conn[0].port": "3260",
    "node.conn[0].startup": "manual",
    "node.conn[0].tcp.window_size": "524288",
    "node.conn[0].tcp.type_of_service": "0",
    "node.conn[0].timeo.logout_timeout": "15",
    "node.conn[0].timeo.login_timeout": "15",
    "node.conn[0].timeo.auth_timeout": "45",
    "node.conn[0].timeo.noop_out_interval": "5",
    "node.conn[0].timeo.noop_out_timeout": "5",
    "node.conn[0].iscsi.MaxXmitDataSegmentLength": "0",
    "node.conn[0].iscsi.MaxRecvDataSegmentLength": "262144",
    "node.conn[0].iscsi.HeaderDigest": "None",
    "node.conn[0].iscsi.IFMarker": "No",
    "node.conn[0].iscsi.OFMarker": "No",
}
_INTERFACE = {
    "iface.iscsi_ifacename": "default",
    "iface.prefix_len": "0",
    "iface.transport_name": "tcp",
    "iface.vlan_id": "0",
    "iface.vlan_priority": "0",
    "iface.iface_num": "0",
    "iface.mtu": "0",
    "iface.port": "0",
    "iface.tos": "0",
    "iface.ttl": "0",
    "iface.tcp_wsf": "0",
    "iface.tcp_timer_scale": "0",
    "iface.def_task_mgmt_timeout": "0",
    "iface.erl": "0",
    "iface.max_receive_data_len": "0",
    "iface.first_burst_len": "0",
    "iface.max_outstanding_r2t": "0",
    "iface.max_burst_len": "0",
}


def put_record(
    nodes: Path,
    target: str,
    address: str = "192.0.2.1",
    changes: Mapping[str, str] | None = None,
    *,
    flat: bool = False,
) -> Path:
    """Write a record below ``nodes``. ``flat``: a file for the portal, as older versions have it,
    in place of a directory with a file for each interface."""
    changes = changes or {}
    values = {**_FIRST, **_INTERFACE, **_USUAL}
    values |= {"node.name": target, "node.conn[0].address": address, **changes}
    lines = ["# BEGIN RECORD 2.1.8", *(f"{key} = {value}" for key, value in values.items())]
    portal = nodes / target / f"{address},{values['node.conn[0].port']},{values['node.tpgt']}"
    path = portal if flat else portal / values["iface.iscsi_ifacename"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "# END RECORD", ""]))
    path.chmod(0o600)
    return path
