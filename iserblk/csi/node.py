"""The calls of CSI's node service.

Each call may come again, because its answer was lost, or because the plugin was killed in it, and
then does what is left to do. So a record says what is about to be done before it is done: the
device that the LUN is to be attached at, and that mkfs has begun: what it has left on the LUN is no
file system of a user's.

    stage      record → attach → (mkfs →) mount at the staging path; a block volume's device below
               it
    publish    bind the staging path, or the device, to the target path
    unpublish  unmount the target path
    unstage    unmount the staging path → detach → remove the record

Source: the Container Storage Interface specification, "Node Service RPC".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from iserblk.csi import messages
from iserblk.csi.host import Host
from iserblk.csi.messages import message
from iserblk.csi.refusals import Code, Refused
from iserblk.csi.volumes import (
    BLOCK,
    MOUNT,
    Records,
    Volume,
    capability_of,
    device_below,
    needed,
    volume_of,
)
from iserblk.errors import IserblkError

_FAILURES = (Refused, IserblkError, OSError)
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
        self._choosing = threading.Lock()
        self._looked_after: set[str] = set()  # by ``look_after``, at the moment

    # --- staging ---

    def stage(self, request: Any) -> Any:
        asked, secret = volume_of(request)
        with self._records.locked(asked.volume_id):
            volume = self._records.get(asked.volume_id) or self._found(asked)
            if volume is not None and not volume.device:  # nothing is attached: it may be another
                formatting = volume.formatting and volume.luns() == asked.luns()
                volume = self._records.put(replace(asked, formatting=formatting))
            if volume is not None and volume.is_remnant:
                volume = self._taken_up(volume, asked)
            if volume is not None and not volume.is_as(asked):
                raise Refused(
                    Code.ALREADY_EXISTS,
                    f"volume {asked.volume_id} is staged already, at {volume.staging}, in another "
                    "way; unstage it first",
                )
            staged = volume is not None and volume.staged
            try:
                self._records.put_secret(asked, secret)
                volume = self._attached(volume or self._records.put(asked))
                if not staged:
                    self._check_alone(volume)
                if volume.kind == MOUNT:
                    volume = self._mount(volume)
                else:
                    self._show(volume)
                if not volume.staged:
                    self._records.put(replace(volume, staged=True))
            except _FAILURES:
                if not staged:  # else a pod may use it, and waits for its server
                    self._undo(asked)
                raise
        return message("csi.v1.NodeStageVolumeResponse")()

    def _found(self, asked: Volume) -> Volume | None:
        """The volume as its mount tells, when its record is lost. A pod may use it."""
        device = self._host.attached_at(asked.place)
        found = replace(asked, device=device, staged=True)
        others = [each.device for each in self._others(asked)]
        if device in others or not self._host.is_attached(found):
            return None
        return self._records.put(self._with_targets(found))

    def _with_targets(self, volume: Volume) -> Volume:
        """Where it is published, as its mounts tell."""
        shown = self._host.shown(volume)
        readers = tuple(each.place for each in shown if each.read_only and not volume.read_only)
        targets = tuple(each.place for each in shown)
        return replace(volume, targets=targets, read_only_at=readers)

    def _taken_up(self, remnant: Volume, asked: Volume) -> Volume:
        """What has been found without a record, and could not be unstaged, as it is asked for now:
        the LUN may be attached with other options. Raises Refused."""
        if not self._host.is_attached(remnant):
            return self._records.put(asked)
        volume = replace(
            asked, device=remnant.device, targets=remnant.targets, read_only_at=remnant.read_only_at
        )
        if remnant.staging != asked.staging or not self._host.is_attached(volume):
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"volume {asked.volume_id}: what is attached at {remnant.device} for it is another "
                f"LUN, or staged at another path: `iserblk detach {remnant.device}` first",
            )
        if asked.kind != remnant.kind and self._is_shown(remnant):
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"volume {asked.volume_id}: its file system is mounted at {remnant.staging}: "
                "unstage it first",
            )
        return self._records.put(volume)

    def _undo(self, asked: Volume) -> None:
        """After a refusal, the orchestrator takes nothing for staged."""
        volume = self._records.get(asked.volume_id)
        unfinished = volume is not None and volume.formatting
        try:
            if volume is not None:
                shown = self._is_shown(volume)
                if shown and volume.kind == MOUNT:
                    return
                if volume.kind == BLOCK and (shown or self._host.mounted(volume.place) is None):
                    self._host.unmount(volume.place)
                if self._host.is_attached(volume):
                    unfinished = unfinished and not self._erased(volume)
                    self._host.detach(volume.device)
        except _FAILURES as error:
            log.warning("%s: %s", asked.volume_id, error)
        if volume is not None and self._host.is_attached(volume):
            return
        if unfinished:  # what is there now may be erased
            self._records.put_secret(asked, "")
            self._records.put(replace(asked, formatting=True))
        else:
            self._records.remove(asked.volume_id)

    def _is_shown(self, volume: Volume) -> bool:
        """Whether the device, or its file system, is what is mounted at its place."""
        mounted = self._host.mounted(volume.place)
        if mounted is None or not volume.device:
            return False
        if volume.kind == MOUNT:
            return mounted.source == volume.device  # a btrfs has a number of its own
        return self._host.number(volume.place) == self._host.number(volume.device)

    def _erased(self, volume: Volume) -> bool:
        """Erase what a mkfs that failed has left. Whether there is nothing to be erased now."""
        try:
            self._host.erase_unfinished(volume)
        except _FAILURES as error:
            log.warning("%s: what mkfs has left stays: %s", volume.device, error)
            return False
        return True

    def _attached(self, volume: Volume) -> Volume:
        """Attach the LUN, where it is not yet."""
        tried: list[str] = []
        while True:
            if not volume.device:
                with self._choosing:  # so that no two calls choose the same, or attach one LUN
                    others = self._others(volume)
                    for each in others:
                        if each.device and each.luns() & volume.luns():
                            _check_together(volume, each)
                    taken = [each.device for each in others]
                    device = self._host.free_device([*taken, *tried])
                    volume = self._records.put(replace(volume, device=device))
            if self._host.attach(volume, self._records.secret(volume)):
                return volume
            tried.append(volume.device)
            volume = self._records.put(replace(volume, device=""))

    def _others(self, volume: Volume) -> list[Volume]:
        return [each for each in self._records.all() if each.volume_id != volume.volume_id]

    def _check_alone(self, volume: Volume) -> None:
        """Refuse a LUN that is attached here already, by its identifiers, whatever its URL is:
        nothing keeps what two devices have in their caches in step."""
        others = {each.device: each for each in self._others(volume)}
        for device in self._host.also_attached_at(volume):
            if device in others:
                _check_together(volume, others[device])
            elif not volume.shared:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume.volume_id}: its LUN is attached at {device} already, and not "
                    f"for a volume: `iserblk detach {device}` first",
                )

    def _show(self, volume: Volume) -> None:
        """Mount the device below its staging path, where it is not yet."""
        if self._host.mounted(volume.place) is None:
            self._host.bind(volume, volume.device, volume.place, read_only=False)
        elif not self._is_shown(volume):
            raise Refused(
                Code.FAILED_PRECONDITION, f"{volume.place}: something else is mounted there"
            )

    def _mount(self, volume: Volume) -> Volume:
        """Mount it at its staging path, where it is not yet. Returns the record as it is then."""
        if self._is_shown(volume):
            return volume
        if self._host.mounted(volume.staging) is not None:
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
        return volume

    def unstage(self, request: Any) -> Any:
        volume_id = needed(request, "volume_id")
        staging = needed(request, "staging_target_path")
        with self._records.locked(volume_id):
            volume = self._records.get(volume_id)
            if volume is None:
                self._unstage_unknown(volume_id, staging)
            elif volume.staging == staging:
                self._unstage(volume)
            else:
                log.info("%s is staged at %s, not at %s", volume_id, volume.staging, staging)
        return message("csi.v1.NodeUnstageVolumeResponse")()

    def _unstage(self, volume: Volume) -> None:
        for target in volume.targets:
            if self._host.mounted(target) is not None:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume.volume_id} is published at {target}: unpublish it first",
                )
        try:
            self._serve(volume)  # what is in the kernel's cache is to be written
        except _FAILURES as error:
            log.warning("%s: it is unstaged without a server: %s", volume.device, error)
        for path in dict.fromkeys((volume.place, volume.staging)):
            self._host.unmount(path)
        try:
            if self._host.is_attached(volume):
                self._host.detach(volume.device)
        finally:
            if not self._host.is_attached(volume):
                self._records.remove(volume.volume_id)

    def _serve(self, volume: Volume) -> bool:
        """Give it a server, if its server has ended: while a call is under way, ``look_after`` does
        not. Returns whether it had ended."""
        if not self._host.is_attached(volume) or self._host.is_served(volume):
            return False
        self._host.attach(volume, self._records.secret(volume))
        return True

    def _unstage_unknown(self, volume_id: str, staging: str) -> None:
        """There is no record, or none that can be read: the mount tells the device. That of a block
        volume's device, which does not keep it in use, stays until the device is detached."""
        others = [each.device for each in self._records.all()]
        if self._host.mounted(staging) is None:  # else the file there is a user's
            shown = device_below(staging)
            device = self._host.attached_at(shown)
            if device and device not in others:
                self._host.detach(device)
            self._host.unmount(shown)
            self._host.unmount(staging)
            self._records.remove(volume_id)
            return
        device = self._host.attached_at(staging)
        if not device or device in others:
            self._host.unmount(staging)
            self._records.remove(volume_id)
            return
        # From here on the record tells: without it no later call would find the device.
        urls = (self._host.url(device),)
        volume = Volume(volume_id, urls, {}, staging, MOUNT, device=device, staged=True)
        self._unstage(self._records.put(self._with_targets(volume)))

    # --- publishing ---

    def publish(self, request: Any) -> Any:
        volume_id = needed(request, "volume_id")
        target = needed(request, "target_path")
        kind, _, _, mode = capability_of(request)
        staging = request.staging_target_path
        with self._records.locked(volume_id):
            volume = self._staged(volume_id)
            if staging != volume.staging:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume_id} is staged at {volume.staging}, not at {staging or 'none'}",
                )
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
            mounted = self._host.mounted(target)
            # Not one where binding has failed: the orchestrator may never unpublish it. Nor the
            # same by its real path, as its mount has told it.
            others = [
                each
                for each in volume.targets
                if each != target
                and (there := self._host.mounted(each)) is not None
                and (mounted is None or there.place != mounted.place)
            ]
            alone = mode in messages.OF_ONE_PATH
            if others and (alone or volume.alone):
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume_id} is for one pod alone, and is published at {others[0]}",
                )
            source = volume.staging if kind == MOUNT else volume.device
            if kind == MOUNT and self._host.mounted(source) is None:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume_id}: not mounted at {source}: stage it",
                )
            if mounted is not None and self._host.number(target) != self._host.number(source):
                raise Refused(Code.ALREADY_EXISTS, f"{target}: something else is mounted there")
            read_only = kind == MOUNT and bool(request.readonly)
            if mounted is not None and not volume.read_only:
                is_read_only = mounted.read_only or target in volume.read_only_at
                if is_read_only != read_only:
                    raise Refused(
                        Code.ALREADY_EXISTS,
                        f"{target}: is mounted there {'read-only' if is_read_only else 'writable'}",
                    )
            readers = [each for each in volume.read_only_at if each in others]
            fresh = replace(
                volume,
                targets=(*others, target),
                read_only_at=(*readers, target) if read_only else tuple(readers),
                alone=alone,
            )
            if fresh != volume:
                self._records.put(fresh)
            if mounted is None or (read_only and not mounted.read_only):
                self._host.bind(volume, source, target, read_only)
        return message("csi.v1.NodePublishVolumeResponse")()

    def unpublish(self, request: Any) -> Any:
        volume_id = needed(request, "volume_id")
        target = needed(request, "target_path")
        with self._records.locked(volume_id):
            self._host.unmount(target)
            volume = self._records.get(volume_id)
            if volume is not None and target in volume.targets:
                left = tuple(each for each in volume.targets if each != target)
                readers = tuple(each for each in volume.read_only_at if each != target)
                self._records.put(replace(volume, targets=left, read_only_at=readers))
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
        if volume is None or not self._is_at(volume, path):
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

    def _is_at(self, volume: Volume, path: str) -> bool:
        if volume.kind == BLOCK and path == volume.device:
            return True
        source = volume.staging if volume.kind == MOUNT else volume.device
        return self._host.mounted(path) is not None and (
            path == source or self._host.number(path) == self._host.number(source)
        )

    def expand(self, request: Any) -> Any:
        volume_id = needed(request, "volume_id")
        needed(request, "volume_path")
        wanted = request.capacity_range.required_bytes
        limit = request.capacity_range.limit_bytes
        with self._records.locked(volume_id):
            volume = self._records.get(volume_id)
            if volume is None:
                raise Refused(Code.NOT_FOUND, f"volume {volume_id} is not staged on this node")
            self._serve(self._staged(volume_id))
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

    def look_after(self, complained: dict[str, str]) -> list[threading.Thread]:
        """Give a server to each staged volume whose server has ended; the kernel keeps its requests
        meanwhile, but not for ever. ``complained``: what was said of volumes the last time, and is
        not said again. Returns the threads that this has begun: one for each volume, because no
        volume can wait until the target of another one is no longer away."""
        begun = []
        for volume in self._unserved(self._records.all()):
            if volume.volume_id not in self._looked_after:
                self._looked_after.add(volume.volume_id)
                thread = threading.Thread(target=self._succeed, args=(volume, complained))
                thread.start()
                begun.append(thread)
        return begun

    def _succeed(self, volume: Volume, complained: dict[str, str]) -> None:
        said = ""
        try:
            with self._records.locked(volume.volume_id, patience_s=0):
                if self._serve(volume):
                    log.warning("%s: its server had ended; it has a new one", volume.device)
        except _FAILURES as error:
            # ABORTED: a call for it is under way
            if not isinstance(error, Refused) or error.code != Code.ABORTED:
                said = str(error)
                if complained.get(volume.volume_id) != said:
                    log.warning("%s: its server has ended: %s", volume.device, said)
        finally:
            self._looked_after.discard(volume.volume_id)
        if said:
            complained[volume.volume_id] = said
        else:
            complained.pop(volume.volume_id, None)

    def _unserved(self, volumes: Sequence[Volume]) -> Iterator[Volume]:
        for each in volumes:
            try:
                if self._host.is_attached(each) and not self._host.is_served(each):
                    yield each
            except OSError as error:
                log.warning("%s: %s", each.device, error)


def _check_together(volume: Volume, other: Volume) -> None:
    """Whether both may be staged here, on one LUN. Raises Refused."""
    if (volume.read_only and other.read_only) or (volume.shared and other.shared):
        return
    raise Refused(
        Code.FAILED_PRECONDITION,
        f"volume {volume.volume_id}: its LUN is that of volume {other.volume_id}, which is staged "
        f"at {other.staging}; make one PersistentVolume of the two",
    )
