"""A kubelet for tests: requests, and a client that makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from iserblk.csi import messages
from iserblk.csi.messages import SERVICES, message

URL = "iser://array.example/iqn.2026-11.example:disk/3"
OTHER = "iser://array.example/iqn.2026-11.example:disk/4"
STAGING = "/var/lib/kubelet/plugins/kubernetes.io/csi/pv/1/globalmount"
TARGET = "/var/lib/kubelet/pods/1/volumes/csi/1/mount"


def capability(
    fs: str | None = "ext4", mode: int = messages.SINGLE_NODE_WRITER, *flags: str
) -> Any:
    made = message("csi.v1.VolumeCapability")()
    if fs is None:
        made.block.SetInParent()
    else:
        made.mount.fs_type = fs
        made.mount.mount_flags.extend(flags)
    made.access_mode.mode = mode
    return made


def stage(
    volume: str = "one", url: str = URL, how: Any = None, staging: str = "", **context: str
) -> Any:
    return message("csi.v1.NodeStageVolumeRequest")(
        volume_id=volume,
        staging_target_path=staging or f"{STAGING}-{volume}",
        volume_capability=how or capability(),
        volume_context={"url": url, **{key.replace("_", "-"): context[key] for key in context}},
    )


def publish(
    volume: str = "one",
    how: Any = None,
    readonly: bool = False,
    staging: str = "",
    path: str = "",
) -> Any:
    return message("csi.v1.NodePublishVolumeRequest")(
        volume_id=volume,
        staging_target_path=staging or f"{STAGING}-{volume}",
        target_path=path or f"{TARGET}-{volume}",
        volume_capability=how or capability(),
        readonly=readonly,
    )


def unpublish(volume: str = "one", path: str = "") -> Any:
    return message("csi.v1.NodeUnpublishVolumeRequest")(
        volume_id=volume, target_path=path or f"{TARGET}-{volume}"
    )


def unstage(volume: str = "one", staging: str = "") -> Any:
    return message("csi.v1.NodeUnstageVolumeRequest")(
        volume_id=volume, staging_target_path=staging or f"{STAGING}-{volume}"
    )


def stats(path: str, volume: str = "one") -> Any:
    return message("csi.v1.NodeGetVolumeStatsRequest")(volume_id=volume, volume_path=path)


def expand(size: int, limit: int = 0, volume: str = "one") -> Any:
    asked = message("csi.v1.NodeExpandVolumeRequest")(
        volume_id=volume, volume_path=f"{TARGET}-{volume}"
    )
    asked.capacity_range.required_bytes = size
    asked.capacity_range.limit_bytes = limit
    return asked


class Kubelet:
    """A client that has the calls of ``service`` as functions."""

    def __init__(self, path: Path, service: str) -> None:
        self._channel = grpc.insecure_channel(f"unix://{path}")
        self._service = service

    def __enter__(self) -> Kubelet:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, name: str, request: Any = None, timeout: float = 60.0) -> Any:
        asked, answered = SERVICES[self._service][name]
        stub = self._channel.unary_unary(
            f"/{self._service}/{name}",
            request_serializer=message(asked).SerializeToString,
            response_deserializer=message(answered).FromString,
        )
        return stub(request or message(asked)(), timeout=timeout)
