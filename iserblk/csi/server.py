"""gRPC on Unix sockets: identity and node for the kubelet, and its plugin registration.

Calls run in threads, and further ones give servers to devices whose server has ended, for example
because the container that it ran in was replaced. Needs grpcio (``pip install 'iserblk[csi]'``).

Sources: the Container Storage Interface specification, version 1; the kubelet's plugin
registration (a socket in its directory plugins_registry, which it finds and asks by itself).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from iserblk import __version__
from iserblk.csi import messages
from iserblk.csi.messages import SERVICES, message
from iserblk.csi.node import Node
from iserblk.csi.refusals import OF_STATUS, Code, Refused
from iserblk.errors import BadArgument, Busy, IserblkError
from iserblk.metrics.address import LONGEST_SOCKET_PATH

log = logging.getLogger(__name__)

NAME = "iserblk.csi"
_CALLS = 100  # at once; those for volumes whose target is away may wait for minutes
MOST_CALLS = 2 * _CALLS  # that run, or wait for a thread; further ones are refused
_MOST_MESSAGE = 256 << 10  # bytes; CSI's own limits make a few KiB
_LOOK_S = 2.0
_GRACE_S = 60.0  # for calls that run when the server is to end
_CODES = {code.value[0]: code for code in grpc.StatusCode}

Call = Callable[[Any], Any]


def identity() -> dict[str, Call]:
    def info(_request: Any) -> Any:
        return message("csi.v1.GetPluginInfoResponse")(name=NAME, vendor_version=__version__)

    def capabilities(_request: Any) -> Any:
        response = message("csi.v1.GetPluginCapabilitiesResponse")()
        response.capabilities.add().volume_expansion.type = messages.ONLINE
        return response

    def probe(_request: Any) -> Any:
        response = message("csi.v1.ProbeResponse")()
        response.ready.value = True
        return response

    return {"GetPluginInfo": info, "GetPluginCapabilities": capabilities, "Probe": probe}


def calls_of(node: Node) -> dict[str, Call]:
    return {
        "NodeStageVolume": node.stage,
        "NodeUnstageVolume": node.unstage,
        "NodePublishVolume": node.publish,
        "NodeUnpublishVolume": node.unpublish,
        "NodeGetVolumeStats": node.stats,
        "NodeExpandVolume": node.expand,
        "NodeGetCapabilities": node.capabilities,
        "NodeGetInfo": node.info,
    }


def registration(endpoint: Path) -> dict[str, Call]:
    """``endpoint``: where the kubelet finds the plugin, as it sees the file system."""

    def info(_request: Any) -> Any:
        return message("pluginregistration.PluginInfo")(
            type="CSIPlugin", name=NAME, endpoint=str(endpoint), supported_versions=["1.0.0"]
        )

    def notified(request: Any) -> Any:
        if request.plugin_registered:
            log.info("registered with the kubelet")
        else:
            log.error("the kubelet has not registered the plugin: %s", request.error)
        return message("pluginregistration.RegistrationStatusResponse")()

    return {"GetInfo": info, "NotifyRegistrationStatus": notified}


def _handler(service: str, calls: dict[str, Call]) -> grpc.GenericRpcHandler:
    handlers = {}
    for name, (asked, answered) in SERVICES[service].items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            _served(calls[name]),
            request_deserializer=message(asked).FromString,
            response_serializer=message(answered).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service, handlers)


def _served(call: Call) -> Callable[[Any, grpc.ServicerContext], Any]:
    def serve(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return call(request)
        except Refused as refused:
            context.abort(_CODES[refused.code], refused.words)  # raises
        except IserblkError as error:
            code = OF_STATUS.get(error.exit_status, Code.INTERNAL)
            context.abort(_CODES[code], str(error))
        except OSError as error:
            words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            context.abort(grpc.StatusCode.INTERNAL, words)

    return serve


def _listening(path: Path, services: dict[str, dict[str, Call]]) -> grpc.Server:
    """A server that has begun to listen at ``path``. Raises Busy when another one does, BadArgument
    when nothing can listen there."""
    length = len(os.fsencode(path))
    if length > LONGEST_SOCKET_PATH:
        raise BadArgument(
            f"{path}: the path has {length} bytes, and that of a socket has {LONGEST_SOCKET_PATH}"
            " at most: name a shorter one"
        )
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            raise Busy(f"{path}: another program listens there")
        path.unlink(missing_ok=True)
    elif path.exists():
        raise BadArgument(f"{path}: there is a file that is no socket; name another path")
    server = grpc.server(
        ThreadPoolExecutor(_CALLS),
        maximum_concurrent_rpcs=MOST_CALLS,
        options=[("grpc.max_receive_message_length", _MOST_MESSAGE)],
    )
    for service, calls in services.items():
        server.add_generic_rpc_handlers((_handler(service, calls),))
    mask = os.umask(0o177)  # it listens at once, and connections that are made wait for ``start``
    try:
        server.add_insecure_port(f"unix://{path}")
    except RuntimeError:
        raise BadArgument(f"{path}: cannot listen there; is there such a directory?") from None
    finally:
        os.umask(mask)
    os.chmod(path, 0o600)
    server.start()
    return server


def serve(
    node: Node,
    endpoint: Path,
    registry: Path | None,
    seen_at: Path,
    ready: Callable[[], None],
    stopped: threading.Event,
) -> None:
    """Serve until ``stopped`` is set; calls that run then are waited for. What is staged stays.

    ``endpoint``: the socket of the plugin. ``registry``: the kubelet's directory
    plugins_registry; None: something else registers the plugin. ``seen_at``: ``endpoint`` as the
    kubelet sees it. ``ready`` is called when calls are served. Raises Busy and BadArgument.
    """
    with contextlib.ExitStack() as stack:
        places = [(endpoint, {"csi.v1.Identity": identity(), "csi.v1.Node": calls_of(node)})]
        if registry is not None:
            services = {"pluginregistration.Registration": registration(seen_at)}
            places.append((registry / f"{NAME}-reg.sock", services))
        for path, found in places:
            server = _listening(path, found)
            stack.callback(path.unlink, missing_ok=True)
            stack.callback(lambda server=server: server.stop(_GRACE_S).wait())  # type: ignore[misc]
        ready()
        complained: dict[str, str] = {}
        while not stopped.wait(_LOOK_S):
            node.look_after(complained)
