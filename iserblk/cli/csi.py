"""``iserblk csi``: a CSI node plugin, for the kubelet of its node."""

from __future__ import annotations

import platform
import threading
from pathlib import Path

import click

from iserblk.cli.command import Command
from iserblk.cli.notify import ready, tell_systemd
from iserblk.endings import Endings, ending_signals
from iserblk.errors import BadArgument
from iserblk.limited_log import limited_lines
from iserblk.metrics.records import Recorded
from iserblk.nbd.kernel.device import Directories, need_root

DIRECTORIES = Directories()
_SCHEME = "unix://"


@click.command("csi", cls=Command)
@click.option(
    "--endpoint",
    metavar="unix://PATH",
    envvar="CSI_ENDPOINT",
    required=True,
    help="The socket to serve at. Default: $CSI_ENDPOINT.",
)
@click.option(
    "--node-id",
    metavar="NAME",
    envvar="NODE_ID",
    default=platform.node,
    help="The node's name in the cluster. Default: $NODE_ID, or the name of this machine.",
)
@click.option(
    "--register",
    "registry",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The kubelet's directory plugins_registry: register there.",
)
@click.option(
    "--seen-at",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="The path of the socket as the kubelet sees it. Default: that of --endpoint.",
)
def command(endpoint: str, node_id: str, registry: Path | None, seen_at: Path | None) -> None:
    """Serve the identity and node services of CSI until a signal ends it (docs/kubernetes.md).

    Volumes are LUNs that exist: their URL is in volumeAttributes, CHAP in a secret. They stay as
    they are when the plugin ends, and its successor looks after them. Prints `ready unix://PATH`.
    Needs root.
    """
    path = Path(endpoint.removeprefix(_SCHEME))
    if not path.is_absolute():
        raise BadArgument(f"--endpoint {endpoint}: write unix:///PATH/csi.sock")
    # Here, as the help does without grpcio and protobuf.
    from iserblk.csi.host import Machine  # noqa: PLC0415
    from iserblk.csi.node import Node  # noqa: PLC0415
    from iserblk.csi.server import serve  # noqa: PLC0415
    from iserblk.csi.volumes import Records  # noqa: PLC0415

    need_root()
    stopped = threading.Event()
    Endings(ending_signals(), lambda _number: stopped.set()).listen()
    node = Node(node_id, Machine(DIRECTORIES), Records(DIRECTORIES.run / "csi"))
    with limited_lines(), Recorded("csi", str(path)):
        serve(node, path, registry, seen_at or path, lambda: ready(f"{_SCHEME}{path}"), stopped)
    tell_systemd("STOPPING=1")
