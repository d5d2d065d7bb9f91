"""The calls of CSI's node service.

Each call may come again, because its answer was lost, or because the plugin was killed in it, and
then does what is left to do. So a record says what is about to be done before it is done: the
device that the LUN is to be attached at, and that mkfs has begun: what it has left on the LUN is no
file system of a user's.

    stage      record → attach → (mkfs →) mount at the staging path
    publish    bind the staging path, or the device, to the target path
    unpublish  unmount the target path
    unstage    unmount the staging path → detach → remove the record

Source: the Container Storage Interface specification, "Node Service RPC".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from iserblk.csi import messages
from iserblk.csi.host import Host
from iserblk.csi.messages import message
from iserblk.csi.refusals import Code, Refused
from iserblk.csi.volumes import BLOCK, MOUNT, Records, Volume, capability_of, needed, volume_of

log = logging.getLogger(__name__)

_CAPABILITIES = (
    messages.STAGE_UNSTAGE_VOLUME,
    messages.GET_VOLUME_STATS,
    messages.EXPAND_VOLUME,
    messages.VOLUME_CONDITION,
    messages.SINGLE_NODE_MULTI_WRITER_CAPABILITY,
)


class Node:
    """Takes requests, and returns responses (``messages``). Raises Refused. The calls may run in
    several threads at once."""

    def __init__(self, node_id: str, host: Host, records: Records) -> None:
        self._node_id = node_id
        self._host = host
        self._records = records

    # --- staging ---

    def stage(self, request: Any) -> Any:
        asked, secret = volume_of(request)
        with self._records.locked(asked.volume_id):
            volume = self._records.get(asked.volume_id)
            if volume is not None and not volume.is_as(asked):
                raise Refused(
                    Code.ALREADY_EXISTS,
                    f"volume {asked.volume_id} is staged already, at {volume.staging}, in another "
                    "way; unstage it first",
                )
            self._records.put_secret(asked, secret)
            try:
                volume = self._attached(volume or self._records.put(asked))
                if volume.kind == MOUNT:
                    self._mount(volume)
            except (Refused, OSError):
                self._undo(asked)
                raise
        return message("csi.v1.NodeStageVolumeResponse")()

    def _undo(self, asked: Volume) -> None:
        """After a refusal, the orchestrator takes nothing for staged. What is staged since an
        earlier call stays."""
        volume = self._records.get(asked.volume_id)
        if volume is None or (volume.device and self._host.mounted(volume.staging) is not None):
            return
        try:
            if self._host.is_attached(volume):
                self._host.detach(volume)
        except Refused as refused:
            log.warning("%s: %s", volume.device, refused.words)
        else:
            self._records.remove(volume)

    def _attached(self, volume: Volume) -> Volume:
        """Attach the LUN, where it is not yet."""
        tried: list[str] = []
        while True:
            if not volume.device:
                taken = [each.device for each in self._records.all()]
                device = self._host.free_device([*taken, *tried])
                volume = self._records.put(replace(volume, device=device))
            if self._host.attach(volume, self._records.secret(volume)):
                return volume
            tried.append(volume.device)
            volume = self._records.put(replace(volume, device=""))

    def _mount(self, volume: Volume) -> None:
        mounted = self._host.mounted(volume.staging)
        if mounted is not None:
            if mounted.number == self._host.number(volume.device):
                return
            raise Refused(
                Code.FAILED_PRECONDITION, f"{volume.staging}: something else is mounted there"
            )
        # Never from the record alone: another node may have written to the LUN since.
        found = self._host.file_system(volume)
        if not found:
            if volume.read_only:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume.volume_id}: there is no file system on its LUN, and it is to "
                    "be read only",
                )
            volume = self._records.put(replace(volume, formatting=True))
            self._host.format(volume)
        elif found != volume.fs:
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"volume {volume.volume_id}: the file system on its LUN is {found}, not "
                f"{volume.fs}: correct fsType",
            )
        if volume.formatting:
            volume = self._records.put(replace(volume, formatting=False))
        self._host.mount(volume, volume.staging)

    def unstage(self, request: Any) -> Any:
        volume_id = needed(request, "volume_id")
        staging = needed(request, "staging_target_path")
        with self._records.locked(volume_id):
            volume = self._records.get(volume_id)
            if volume is not None and volume.staging != staging:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume_id} is staged at {volume.staging}, not at {staging}",
                )
            self._host.unmount(staging)
            if volume is not None:
                try:
                    if self._host.is_attached(volume):
                        self._host.detach(volume)
                finally:
                    if not self._host.is_attached(volume):
                        self._records.remove(volume)
        return message("csi.v1.NodeUnstageVolumeResponse")()

    # --- publishing ---

    def publish(self, request: Any) -> Any:
        volume_id = needed(request, "volume_id")
        target = needed(request, "target_path")
        kind, _, _, _ = capability_of(request)
        with self._records.locked(volume_id):
            volume = self._staged(volume_id)
            if kind != volume.kind:
                raise Refused(
                    Code.INVALID_ARGUMENT,
                    f"volume {volume_id} is staged as {volume.kind}, not as {kind}",
                )
            if kind == BLOCK and request.readonly and not volume.read_only:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume_id}: a block device is read-only for all pods or for none: "
                    "use the access mode ReadOnlyMany",
                )
            source = volume.staging if kind == MOUNT else volume.device
            if kind == MOUNT and self._host.mounted(source) is None:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume_id}: not mounted at {source}: stage it",
                )
            mounted = self._host.mounted(target)
            if mounted is not None and self._host.number(target) != self._host.number(source):
                raise Refused(Code.ALREADY_EXISTS, f"{target}: something else is mounted there")
            read_only = kind == MOUNT and bool(request.readonly)
            if mounted is not None and mounted.read_only and not read_only and not volume.read_only:
                raise Refused(Code.ALREADY_EXISTS, f"{target}: is mounted read-only there")
            if mounted is None or (read_only and not mounted.read_only):
                self._host.bind(volume, source, target, read_only)
        return message("csi.v1.NodePublishVolumeResponse")()

    def unpublish(self, request: Any) -> Any:
        volume_id = needed(request, "volume_id")
        target = needed(request, "target_path")
        with self._records.locked(volume_id):
            self._host.unmount(target)
        return message("csi.v1.NodeUnpublishVolumeResponse")()

    def _staged(self, volume_id: str) -> Volume:
        volume = self._records.get(volume_id)
        if volume is None or not self._host.is_attached(volume):
            raise Refused(
                Code.FAILED_PRECONDITION, f"volume {volume_id} is not staged on this node"
            )
        return volume

    # --- what is known of it ---

    def stats(self, request: Any) -> Any:
        volume_id = needed(request, "volume_id")
        path = needed(request, "volume_path")
        volume = self._records.get(volume_id)
        if volume is None or self._host.mounted(path) is None:
            at_device = volume is not None and volume.kind == BLOCK and path == volume.device
            if volume is None or not at_device:
                raise Refused(Code.NOT_FOUND, f"volume {volume_id} is not at {path}")
        response = message("csi.v1.NodeGetVolumeStatsResponse")()
        if volume.kind == BLOCK:
            response.usage.add(total=self._host.size(volume), unit=messages.BYTES)
        else:
            usage = self._host.usage(path)
            response.usage.add(
                total=usage.f_blocks * usage.f_frsize,
                available=usage.f_bavail * usage.f_frsize,
                used=(usage.f_blocks - usage.f_bfree) * usage.f_frsize,
                unit=messages.BYTES,
            )
            response.usage.add(
                total=usage.f_files,
                available=usage.f_favail,
                used=usage.f_files - usage.f_ffree,
                unit=messages.INODES,
            )
        served = self._host.is_served(volume)
        response.volume_condition.abnormal = not served
        response.volume_condition.message = f"{volume.device}: " + (
            "its server runs" if served else "its server has ended"
        )
        return response

    def expand(self, request: Any) -> Any:
        volume_id = needed(request, "volume_id")
        needed(request, "volume_path")
        wanted = request.capacity_range.required_bytes
        limit = request.capacity_range.limit_bytes
        with self._records.locked(volume_id):
            volume = self._records.get(volume_id)
            if volume is None:
                raise Refused(Code.NOT_FOUND, f"volume {volume_id} is not staged on this node")
            self._staged(volume_id)
            size = self._host.wait_for_size(volume, self._records.secret(volume), wanted)
            if size < wanted or (limit and size > limit):
                raise Refused(
                    Code.OUT_OF_RANGE,
                    f"volume {volume_id}: its LUN has {size} bytes: resize the LUN on its target",
                )
            if volume.kind == MOUNT:
                self._host.grow(volume, volume.staging)
        return message("csi.v1.NodeExpandVolumeResponse")(capacity_bytes=size)

    def capabilities(self, _request: Any) -> Any:
        response = message("csi.v1.NodeGetCapabilitiesResponse")()
        for each in _CAPABILITIES:
            response.capabilities.add().rpc.type = each
        return response

    def info(self, _request: Any) -> Any:
        return message("csi.v1.NodeGetInfoResponse")(
            node_id=self._node_id, max_volumes_per_node=self._host.device_count()
        )

    # --- servers that died ---

    def look_after(self, complained: dict[str, str]) -> None:
        """Give a server to each staged volume whose server has ended; the kernel keeps its requests
        meanwhile. ``complained``: what was said of volumes the last time, and is not said again."""
        for volume in self._unserved(self._records.all()):
            said = ""
            try:
                with self._records.locked(volume.volume_id):
                    if self._host.is_attached(volume):
                        self._host.attach(volume, self._records.secret(volume))
                        log.warning("%s: its server had ended; it has a new one", volume.device)
            except Refused as refused:
                if refused.code != Code.ABORTED:  # a call for it is under way
                    said = refused.words
                    if complained.get(volume.volume_id) != said:
                        log.warning("%s: its server has ended: %s", volume.device, said)
            if said:
                complained[volume.volume_id] = said
            else:
                complained.pop(volume.volume_id, None)

    def _unserved(self, volumes: Sequence[Volume]) -> list[Volume]:
        return [
            each
            for each in volumes
            if self._host.is_attached(each) and not self._host.is_served(each)
        ]
