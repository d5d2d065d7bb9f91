"""The node service's calls: what they do, that they may come again, and after a plugin that was
killed in the middle of one."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iserblk.csi import messages
from iserblk.csi.messages import message
from iserblk.csi.node import Node
from iserblk.csi.refusals import Code, Refused
from iserblk.csi.volumes import Records, Volume
from tests.csi.fake_host import DEVICES, FakeHost, Killed
from tests.csi.kubelet import (
    OTHER,
    STAGING,
    TARGET,
    URL,
    capability,
    expand,
    publish,
    stage,
    stats,
    unpublish,
    unstage,
)
from tests.support.until import until_blocking

SECRET = "twelve letters"
DEVICE = f"{STAGING}-one/device"  # of a block volume


@pytest.fixture
def host() -> FakeHost:
    return FakeHost(URL, OTHER)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "csi", patience_s=0)


@pytest.fixture
def node(host: FakeHost, records: Records) -> Node:
    return Node("worker-1", host, records)


def refused(code: Code, call: Callable[[Any], Any], request: Any) -> str:
    with pytest.raises(Refused) as caught:
        call(request)
    assert caught.value.code is code, caught.value.words
    assert "\n" not in caught.value.words
    return caught.value.words


def nothing_left(host: FakeHost, records: Records) -> None:
    assert (host.attached, host.mounts, host.paths) == ({}, {}, set())
    assert records.all() == []


def test_the_life_of_a_file_system(node: Node, host: FakeHost, records: Records) -> None:
    for _ in range(2):
        node.stage(stage())
        assert host.attached == {"/dev/nbd0": URL} and host.luns[URL] == "ext4"
    for _ in range(2):
        node.publish(publish())
        assert host.mounts[f"{TARGET}-one"][0].number == "43:0"
        assert len(host.mounts[f"{TARGET}-one"]) == 1
    usage, inodes = node.stats(stats(f"{TARGET}-one")).usage
    assert usage.total >= usage.used > 0 and usage.unit == messages.BYTES
    assert inodes.unit == messages.INODES
    for _ in range(2):
        node.unpublish(unpublish())
    for _ in range(2):
        node.unstage(unstage())
        nothing_left(host, records)
    node.stage(stage())
    assert host.formats == 1  # what is on it stays


def test_the_life_of_a_block_device(node: Node, host: FakeHost, records: Records) -> None:
    how = capability(None)
    for _ in range(2):
        node.stage(stage(how=how))
        (shown,) = host.mounts[DEVICE]
        assert shown.number == "43:0" and list(host.mounts) == [DEVICE]
    node.publish(publish(how=how))
    assert host.mounts[f"{TARGET}-one"][0].number == "43:0"
    (usage,) = node.stats(stats(f"{TARGET}-one")).usage
    assert (usage.total, usage.unit) == (1 << 30, messages.BYTES)
    assert host.luns[URL] == "" and host.formats == 0
    node.unpublish(unpublish())
    node.unstage(unstage())
    nothing_left(host, records)


class KillableRecords(Records):
    """The plugin may be killed before and behind each change of them, too."""

    def __init__(self, directory: Path, host: FakeHost) -> None:
        super().__init__(directory, patience_s=0)
        self._host = host

    def write(self, path: Path, text: str) -> None:
        with self._host.change():
            super().write(path, text)

    def remove(self, volume_id: str) -> None:
        with self._host.change():
            super().remove(volume_id)


@pytest.mark.parametrize("fs", ["xfs", None])
def test_killed_anywhere_and_called_again(fs: str | None, tmp_path: Path) -> None:
    """Between any two changes of the machine or the records; then another plugin gets the same
    call."""
    how = capability(fs)
    url = URL.replace("://", "://worker@")
    asked = stage(how=how)
    asked.secrets.update({"user": "worker", "password": SECRET})

    def life(node: Node) -> list[tuple[Callable[[Any], Any], Any]]:
        return [
            (node.stage, asked),
            (node.publish, publish(how=how, readonly=fs is not None)),
            (node.unpublish, unpublish()),
            (node.unstage, unstage()),
        ]

    at = 0
    while True:
        host = FakeHost(url, OTHER)
        directory = tmp_path / f"{at}"
        records = KillableRecords(directory, host)
        host.left = at
        killed = 0
        for number in range(4):
            try:
                call, request = life(Node("worker-1", host, records))[number]
                call(request)
            except Killed:
                killed += 1
                host.left = None
                call, request = life(Node("worker-1", host, records))[number]
                call(request)
            if number < 2:
                assert list(host.attached.values()) == [url]
            if number == 1:
                (mounted,) = host.mounts[f"{TARGET}-one"]
                assert mounted.read_only is (fs is not None)
        nothing_left(host, records)
        assert {path.suffix for path in directory.iterdir()} == {".lock"}
        assert host.luns[url] == (fs or "")
        if not killed:
            break
        at += 1
    assert at > 20


@pytest.mark.parametrize("fs", ["xfs", None])
def test_killed_while_staging_and_then_unstaged(fs: str | None, tmp_path: Path) -> None:
    """The orchestrator may give the volume up."""
    asked = stage(how=capability(fs))
    asked.secrets.update({"user": "worker", "password": SECRET})
    at = 0
    while True:
        host = FakeHost(URL.replace("://", "://worker@"))
        directory = tmp_path / f"{at}"
        host.left = at
        try:
            Node("worker-1", host, KillableRecords(directory, host)).stage(asked)
        except Killed:
            pass
        else:
            break
        host.left = None
        records = KillableRecords(directory, host)
        Node("worker-1", host, records).unstage(unstage())
        nothing_left(host, records)
        assert {path.suffix for path in directory.iterdir()} == {".lock"}
        at += 1
    assert at > 8


def test_killed_behind_mkfs_and_written_by_another_node(
    node: Node, host: FakeHost, records: Records
) -> None:
    """The record says that mkfs has begun; the LUN has a file system, which is not made again."""
    host.left = 4  # attached; mkfs has ended
    with pytest.raises(Killed):
        node.stage(stage())
    assert [volume.formatting for volume in records.all()] == [True]
    host.left = None
    assert host.luns[URL] == "ext4"
    made = host.formats
    node.stage(stage())
    assert host.formats == made
    assert [volume.formatting for volume in records.all()] == [False]


def test_two_volumes_have_two_devices(node: Node, host: FakeHost) -> None:
    node.stage(stage("one"))
    node.stage(stage("two", OTHER))
    assert host.attached == {"/dev/nbd0": URL, "/dev/nbd1": OTHER}


def test_a_device_that_another_program_has_taken_meanwhile(node: Node, host: FakeHost) -> None:
    host.foreign = {"/dev/nbd0"}
    node.stage(stage())
    assert host.attached["/dev/nbd1"] == URL


def test_there_is_no_free_device(node: Node, host: FakeHost, records: Records) -> None:
    host.attached = {f"/dev/nbd{index}": "another" for index in range(DEVICES)}
    refused(Code.FAILED_PRECONDITION, node.stage, stage())
    assert records.all() == []


def test_a_target_that_is_away(node: Node, host: FakeHost, records: Records) -> None:
    host.refusal = Refused(Code.UNAVAILABLE, "array.example:3260: no answer")
    refused(Code.UNAVAILABLE, node.stage, stage())
    nothing_left(host, records)
    host.refusal = None
    node.stage(stage(url=OTHER))  # it was not staged, so it may be another one now


@pytest.mark.parametrize(
    ("mode", "fs", "options"),
    [
        (messages.SINGLE_NODE_WRITER, "ext4", {"reserve": "exclusive"}),
        (messages.SINGLE_NODE_SINGLE_WRITER, None, {"reserve": "exclusive"}),
        (messages.SINGLE_NODE_MULTI_WRITER, "ext4", {"reserve": "exclusive"}),
        (messages.SINGLE_NODE_READER_ONLY, "ext4", {}),
        (messages.MULTI_NODE_READER_ONLY, "ext4", {}),
        (messages.MULTI_NODE_SINGLE_WRITER, None, {}),
        (messages.MULTI_NODE_MULTI_WRITER, None, {"shared": "yes"}),
    ],
)
def test_access_modes(
    mode: int, fs: str | None, options: dict[str, str], node: Node, host: FakeHost, records: Records
) -> None:
    host.luns[URL] = fs or ""
    node.stage(stage(how=capability(fs, mode)))
    (volume,) = records.all()
    assert volume.options == options
    readers = (messages.SINGLE_NODE_READER_ONLY, messages.MULTI_NODE_READER_ONLY)
    assert volume.read_only is (mode in readers)


def test_options_of_the_user_come_first(node: Node, records: Records) -> None:
    node.stage(
        stage(
            reserve="none",
            io_timeout="120",
            **{"csi.storage.k8s.io/pod.name": "web-0"},
        )
    )
    (volume,) = records.all()
    assert volume.options == {"reserve": "none", "io-timeout": "120"}


def test_chap(node: Node, records: Records, tmp_path: Path) -> None:
    asked = stage()
    asked.secrets["user"] = "worker"
    asked.secrets["password"] = SECRET
    asked.secrets["target-password"] = "of the target"
    host = FakeHost(URL.replace("://", "://worker@"))
    node = Node("worker-1", host, records)
    node.stage(asked)
    (volume,) = records.all()
    assert volume.urls == (URL.replace("://", "://worker@"),)
    assert records.secret(volume).read_text() == f"{SECRET}\nof the target\n"
    assert records.secret(volume).stat().st_mode & 0o777 == 0o600
    record = next((tmp_path / "csi").glob("*.json")).read_text()
    assert SECRET not in record and "of the target" not in record
    node.unstage(unstage())
    assert not list((tmp_path / "csi").glob("*.secret"))


@pytest.mark.parametrize(
    "change",
    [
        {"url": ""},
        {"url": "iser://array.example/iqn.2026-11.example:disk"},
        {"url": "array.example"},
        {"url": f"iser://worker%{SECRET}@array.example/iqn.2026-11.example:disk/3"},
        {"chap_secret_file": "/etc/secret"},
        {"isid": "800000000001"},
        {"url": f"{URL}?isid=800000000001"},
        {"url": f"{URL}\0"},
        {"io_timeout": "1\0"},
        {"io_time": "3"},
        {"portals": "given,discover"},
    ],
)
def test_attributes_that_are_wrong(change: dict[str, str], node: Node, records: Records) -> None:
    words = refused(Code.INVALID_ARGUMENT, node.stage, stage(**{"url": URL, **change}))
    assert SECRET not in words
    assert records.all() == []


@pytest.mark.parametrize(
    "secrets",
    [
        {"user": "worker"},
        {"user": "a%b", "password": SECRET},
        {"user": "a\nb", "password": SECRET},
        {"target-password": SECRET},
        {"user": "worker", "password": f"{SECRET}\nanother line"},
    ],
)
def test_secrets_that_are_wrong(secrets: dict[str, str], node: Node) -> None:
    asked = stage()
    asked.secrets.update(secrets)
    assert SECRET not in refused(Code.INVALID_ARGUMENT, node.stage, asked)


@pytest.mark.parametrize(
    "how",
    [
        message("csi.v1.VolumeCapability")(),
        capability("ext4", 0),
        capability("ext4", 99),
        capability("ntfs"),
        capability("ext4", messages.MULTI_NODE_MULTI_WRITER),
        capability("ext4", messages.MULTI_NODE_SINGLE_WRITER),
    ],
)
def test_capabilities_that_are_wrong(how: Any, node: Node) -> None:
    refused(Code.INVALID_ARGUMENT, node.stage, stage(how=how))


@pytest.mark.parametrize("field", ["volume_id", "staging_target_path", "volume_capability"])
def test_what_is_missing(field: str, node: Node) -> None:
    asked = stage()
    asked.ClearField(field)
    assert field in refused(Code.INVALID_ARGUMENT, node.stage, asked)


def test_staged_in_another_way(node: Node, host: FakeHost) -> None:
    node.stage(stage())
    refused(Code.ALREADY_EXISTS, node.stage, stage(url=OTHER))
    refused(Code.INVALID_ARGUMENT, node.publish, publish(how=capability(None)))
    node.unstage(unstage(staging="/elsewhere"))  # it is not there
    assert host.attached and f"{STAGING}-one" in host.mounts
    node.stage(stage())


def test_another_file_system(node: Node, host: FakeHost, records: Records) -> None:
    host.luns[URL] = "xfs"
    assert "xfs" in refused(Code.FAILED_PRECONDITION, node.stage, stage())
    nothing_left(host, records)
    host.luns[URL] = "partitions"
    refused(Code.FAILED_PRECONDITION, node.stage, stage())
    nothing_left(host, records)


def test_an_empty_lun_that_is_to_be_read_only(node: Node, host: FakeHost, records: Records) -> None:
    how = capability("ext4", messages.MULTI_NODE_READER_ONLY)
    refused(Code.FAILED_PRECONDITION, node.stage, stage(how=how))
    nothing_left(host, records)
    assert host.formats == 0


def test_something_else_is_mounted_there(node: Node, host: FakeHost) -> None:
    node.stage(stage("two", OTHER))
    host.mounts[f"{STAGING}-one"] = host.mounts[f"{STAGING}-two"]
    refused(Code.FAILED_PRECONDITION, node.stage, stage())
    del host.mounts[f"{STAGING}-one"]
    node.stage(stage())
    host.mounts[f"{TARGET}-one"] = host.mounts[f"{STAGING}-two"]
    refused(Code.ALREADY_EXISTS, node.publish, publish())


@pytest.mark.parametrize("fs", ["btrfs", None])
def test_staged_again_while_its_server_and_target_are_away(
    fs: str | None, node: Node, host: FakeHost, records: Records
) -> None:
    """Nothing is taken from the pod, whose requests wait."""
    how = capability(fs)
    node.stage(stage(how=how))
    node.publish(publish(how=how))
    host.refusal = Refused(Code.UNAVAILABLE, "no answer")
    refused(Code.UNAVAILABLE, node.stage, stage(how=how))
    assert host.attached == {"/dev/nbd0": URL} and len(records.all()) == 1
    host.refusal = None
    node.stage(stage(how=how))
    assert host.attached == {"/dev/nbd0": URL}


def test_what_a_killed_plugin_has_left_of_secrets(
    node: Node, records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_volume: object) -> None:
        raise Killed

    asked = stage()
    asked.secrets.update({"user": "worker", "password": SECRET})
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(records, "put", killed)
        node.stage(asked)
    (secret,) = (tmp_path / "csi").glob("*.secret")
    secret.with_name(f"{secret.name}.new").write_text(SECRET)
    node.unstage(unstage())
    assert {path.suffix for path in (tmp_path / "csi").iterdir()} == {".lock"}


@pytest.mark.parametrize("fs", ["ext4", None])
@pytest.mark.parametrize("text", [None, "{}"])
def test_the_record_is_gone(
    fs: str | None, text: str | None, node: Node, host: FakeHost, records: Records, tmp_path: Path
) -> None:
    """Its mount tells the device."""
    how = capability(fs)
    node.stage(stage(how=how))
    node.publish(publish(how=how))
    (record,) = (tmp_path / "csi").glob("*.json")
    if text is None:
        record.unlink()
    else:
        record.write_text(text)
    node.unpublish(unpublish())
    node.unstage(unstage())
    nothing_left(host, records)
    assert not record.exists()


@pytest.mark.parametrize("fs", ["btrfs", None])
def test_staged_again_without_its_record(
    fs: str | None, node: Node, host: FakeHost, records: Records, tmp_path: Path
) -> None:
    """Its LUN is not attached a second time."""
    how = capability(fs)
    node.stage(stage("two", OTHER))
    node.stage(stage(how=how))
    node.publish(publish(how=how))
    for record in (tmp_path / "csi").glob("*.json"):
        if '"volume_id": "one"' in record.read_text():
            record.unlink()
    host.refusal = Refused(Code.UNAVAILABLE, "no answer")
    refused(Code.UNAVAILABLE, node.stage, stage(how=how))  # nothing is taken from the pod
    host.refusal = None
    node.stage(stage(how=how))
    node.publish(publish(how=how))
    assert host.attached == {"/dev/nbd0": OTHER, "/dev/nbd1": URL}
    assert {volume.device for volume in records.all()} == set(host.attached)


def test_without_its_record_nothing_is_removed_from_a_file_system(
    node: Node, host: FakeHost, records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's file may have the name that a block volume's device has."""
    node.stage(stage())
    (record,) = (tmp_path / "csi").glob("*.json")
    record.unlink()
    unmounted: list[str] = []

    def unmount(path: str) -> None:
        unmounted.append(path)
        FakeHost.unmount(host, path)

    monkeypatch.setattr(host, "unmount", unmount)
    node.unstage(unstage())
    assert unmounted == [f"{STAGING}-one"]
    nothing_left(host, records)


@pytest.mark.parametrize("fs", ["ext4", None])
def test_unstaged_without_its_record_and_killed(fs: str | None, tmp_path: Path) -> None:
    """The mount of a block volume tells the device until that is detached; of a file system, which
    keeps the device in use, a new record does."""
    how = capability(fs)
    at, killed = 0, True
    while killed:
        host = FakeHost(URL)
        directory = tmp_path / f"{at}"
        records = KillableRecords(directory, host)
        Node("worker-1", host, records).stage(stage(how=how))
        for record in directory.glob("*.json"):
            record.unlink()
        host.left, killed = at, False
        try:
            Node("worker-1", host, records).unstage(unstage())
        except Killed:
            killed, host.left = True, None
            Node("worker-1", host, records).unstage(unstage())
        nothing_left(host, records)
        at += 1
    assert at > 6


@pytest.mark.parametrize("fs", ["ext4", None])
def test_what_is_mounted_there_is_that_of_another_volume(
    fs: str | None, node: Node, host: FakeHost, records: Records
) -> None:
    """Or of this one, whose record is lost, by another URL. It stays, and tells its device."""
    how = capability(fs)
    node.stage(stage("two", OTHER, how))
    mounts = dict(host.mounts)
    place, other = (f"{STAGING}-{name}{'' if fs else '/device'}" for name in ("one", "two"))
    host.mounts[place] = mounts[place] = mounts[other]
    refused(Code.FAILED_PRECONDITION, node.stage, stage(how=how))
    assert host.mounts == mounts and host.attached == {"/dev/nbd0": OTHER}
    assert [volume.volume_id for volume in records.all()] == ["two"]


def lose_record(tmp_path: Path) -> None:
    (record,) = (tmp_path / "csi").glob("*.json")
    record.unlink()


def test_a_detach_that_fails_without_a_record(
    node: Node, host: FakeHost, records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volume can be unstaged again, or staged again, by whatever options: no device is left
    over, nor attached a second time."""

    def fails(_path: str) -> None:
        raise Refused(Code.INTERNAL, "iserblk detach: killed")

    for again in ("unstage", "stage", "by hand"):
        node.stage(stage())
        lose_record(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(host, "detach", fails)
            refused(Code.INTERNAL, node.unstage, unstage())
        assert host.attached == {"/dev/nbd0": URL} and not host.mounts
        if again == "by hand":
            host.attached.clear()
            host.served.clear()
            node.stage(stage())
        elif again == "stage":
            other = stage(staging="/elsewhere")
            assert "iserblk detach /dev/nbd0" in refused(
                Code.FAILED_PRECONDITION, node.stage, other
            )
            node.stage(stage(reserve="none"))
            assert host.attached == {"/dev/nbd0": URL} and host.mounts
            (volume,) = records.all()
            assert volume.options["reserve"] == "none" and volume.fs == "ext4"
        node.unstage(unstage())
        nothing_left(host, records)


def test_unstaged_without_its_record_while_it_is_published(
    node: Node, host: FakeHost, records: Records, tmp_path: Path
) -> None:
    node.stage(stage())
    node.publish(publish())
    lose_record(tmp_path)
    assert f"{TARGET}-one" in refused(Code.FAILED_PRECONDITION, node.unstage, unstage())
    assert f"{STAGING}-one" in host.mounts
    node.unpublish(unpublish())
    node.unstage(unstage())
    nothing_left(host, records)


def test_a_file_system_that_is_in_use_is_no_block_volume(
    node: Node, host: FakeHost, records: Records, tmp_path: Path
) -> None:
    """Its record was lost: what was asked for at first is not known."""
    node.stage(stage())
    node.publish(publish())
    lose_record(tmp_path)
    refused(Code.FAILED_PRECONDITION, node.unstage, unstage())
    mounts = {place: list(mounted) for place, mounted in host.mounts.items()}
    words = refused(Code.FAILED_PRECONDITION, node.stage, stage(how=capability(None)))
    assert f"mounted at {STAGING}-one" in words and host.mounts == mounts
    node.unpublish(unpublish())
    node.unstage(unstage())
    node.stage(stage(how=capability(None)))
    node.unstage(unstage())
    nothing_left(host, records)


def test_a_target_path_that_its_mount_has_under_another_name(
    node: Node, host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it is a link; the mount has the path that this leads to."""
    how = capability("ext4", messages.SINGLE_NODE_SINGLE_WRITER)
    node.stage(stage(how=how))
    node.publish(publish(how=how))
    lose_record(tmp_path)
    node.stage(stage(how=how))
    mounted = host.mounted
    link = "/link/pod"
    monkeypatch.setattr(
        host, "mounted", lambda path: mounted(f"{TARGET}-one" if path == link else path)
    )
    node.publish(publish(how=how, path=link))
    refused(Code.FAILED_PRECONDITION, node.publish, publish(how=how, path="/other"))


@pytest.mark.parametrize("fs", ["ext4", None])
def test_a_second_target_path_without_the_record_of_the_first(
    fs: str | None, node: Node, host: FakeHost, records: Records, tmp_path: Path
) -> None:
    """The mounts tell where it is published."""
    how = capability(fs, messages.SINGLE_NODE_SINGLE_WRITER)
    node.stage(stage(how=how))
    node.publish(publish(how=how))
    lose_record(tmp_path)
    node.stage(stage(how=how))
    refused(Code.FAILED_PRECONDITION, node.publish, publish(how=how, path="/other"))
    node.publish(publish(how=how))
    node.unpublish(unpublish())
    node.publish(publish(how=how, path="/other"))
    assert [volume.targets for volume in records.all()] == [("/other",)]


def test_a_record_of_a_version_that_knew_less(node: Node, records: Records, tmp_path: Path) -> None:
    """The volume is in use while the plugin is replaced by its successor."""
    node.stage(stage())
    (record,) = (tmp_path / "csi").glob("*.json")
    fields = json.loads(record.read_text())
    del fields["read_only_at"], fields["alone"]
    record.write_text(json.dumps(fields))
    assert [volume.device for volume in records.all()] == ["/dev/nbd0"]


@pytest.mark.parametrize(
    ("mode", "fs", "several"),
    [
        (messages.SINGLE_NODE_WRITER, "ext4", False),
        (messages.SINGLE_NODE_READER_ONLY, "ext4", False),
        (messages.SINGLE_NODE_SINGLE_WRITER, "ext4", False),
        (messages.SINGLE_NODE_SINGLE_WRITER, None, False),
        (messages.SINGLE_NODE_MULTI_WRITER, "ext4", True),
        (messages.MULTI_NODE_READER_ONLY, "ext4", True),
        (messages.MULTI_NODE_SINGLE_WRITER, None, True),
        (messages.MULTI_NODE_MULTI_WRITER, None, True),
    ],
)
@pytest.mark.parametrize("readonly", [False, True])
def test_a_second_target_path(
    mode: int, fs: str | None, several: bool, readonly: bool, node: Node, host: FakeHost
) -> None:
    """The second table of NodePublishVolume; also where the second one is asked for in another
    way."""
    host.luns[URL] = fs or ""
    how = capability(fs, mode)
    node.stage(stage(how=how))
    for _ in range(2):
        node.publish(publish(how=how))
    other = publish(how=how, path="/other", readonly=readonly and fs is not None)
    if several:
        node.publish(other)
        assert f"{TARGET}-one" in host.mounts
    else:
        refused(Code.FAILED_PRECONDITION, node.publish, other)
        assert "/other" not in host.mounts
        node.unpublish(unpublish())
        node.publish(other)
    assert "/other" in host.mounts


def test_alone_with_what_was_published_for_several(node: Node) -> None:
    """A second request with another capability is refused, in either order."""
    many = capability("ext4", messages.SINGLE_NODE_MULTI_WRITER)
    alone = capability("ext4", messages.SINGLE_NODE_SINGLE_WRITER)
    node.stage(stage(how=many))
    for first, second in ((many, alone), (alone, many)):
        node.publish(publish(how=first))
        refused(Code.FAILED_PRECONDITION, node.publish, publish(how=second, path="/other"))
        node.unpublish(unpublish())


@pytest.mark.parametrize("reserve", ["exclusive", "none"])
def test_two_volumes_on_one_lun(reserve: str, node: Node, host: FakeHost, records: Records) -> None:
    """Through another portal, too; the first goes on."""
    node.stage(stage("one", reserve=reserve))
    again = URL.replace("array.example", "other.example")
    assert "volume one" in refused(
        Code.FAILED_PRECONDITION, node.stage, stage("two", again, reserve=reserve)
    )
    assert host.attached == {"/dev/nbd0": URL}
    assert [volume.volume_id for volume in records.all()] == ["one"]


def test_another_initiator_may_have_another_lun_of_that_number(node: Node, host: FakeHost) -> None:
    """Where the target shows each initiator its own; the identifiers tell."""
    again = URL.replace("array.example", "other.example")
    host.luns[again], host.sizes[again] = "", 1 << 30
    node.stage(stage("one", initiator_name="iqn.2026-11.example:one"))
    node.stage(stage("two", again, initiator_name="iqn.2026-11.example:two"))
    assert host.attached == {"/dev/nbd0": URL, "/dev/nbd1": again}


def test_two_volumes_on_one_lun_that_has_two_names(
    node: Node, host: FakeHost, records: Records
) -> None:
    """The LUN's identifiers tell."""
    host.same = {URL, OTHER}
    node.stage(stage("one", reserve="none"))
    refused(Code.FAILED_PRECONDITION, node.stage, stage("two", OTHER, reserve="none"))
    assert host.attached == {"/dev/nbd0": URL} and host.luns[OTHER] == ""
    node.unstage(unstage())
    nothing_left(host, records)
    host.attached = {"/dev/nbd0": URL}  # by hand
    words = refused(Code.FAILED_PRECONDITION, node.stage, stage("two", OTHER, reserve="none"))
    assert "/dev/nbd0" in words and host.attached == {"/dev/nbd0": URL}


@pytest.mark.parametrize(
    "mode", [messages.MULTI_NODE_READER_ONLY, messages.MULTI_NODE_MULTI_WRITER]
)
def test_two_volumes_that_may_share_a_lun(mode: int, node: Node, host: FakeHost) -> None:
    host.same = {URL, OTHER}
    how = capability(None, mode)
    node.stage(stage("one", how=how))
    node.stage(stage("two", OTHER, how=how))
    assert host.attached == {"/dev/nbd0": URL, "/dev/nbd1": OTHER}


def test_a_reader_beside_a_writer(node: Node, host: FakeHost) -> None:
    host.same = {URL, OTHER}
    node.stage(stage("one", reserve="none"))
    readers = capability("ext4", messages.MULTI_NODE_READER_ONLY)
    refused(Code.FAILED_PRECONDITION, node.stage, stage("two", OTHER, readers))


def test_mkfs_fails_and_the_plugin_lives(node: Node, host: FakeHost, records: Records) -> None:
    """What mkfs has left is erased: the next attempt, on any node, finds an empty LUN."""
    host.failing = True
    how = capability("xfs")
    refused(Code.INTERNAL, node.stage, stage(how=how))
    assert host.luns[URL] == ""
    nothing_left(host, records)
    host.failing = False
    node.stage(stage(how=how))


@pytest.mark.logs("what mkfs has left stays")
@pytest.mark.parametrize("another", [False, True])
def test_what_mkfs_has_left_cannot_be_erased(
    another: bool, node: Node, host: FakeHost, records: Records, tmp_path: Path
) -> None:
    """Then it is remembered, for this LUN alone."""
    host.failing = host.unwritable = True
    asked = stage(how=capability("xfs"))
    asked.secrets.update({"user": "worker", "password": SECRET})
    host.luns = {url.replace("://", "://worker@"): "" for url in host.luns}
    refused(Code.INTERNAL, node.stage, asked)
    assert host.attached == {} and host.mounts == {}
    assert not list((tmp_path / "csi").glob("*.secret"))
    host.failing = host.unwritable = False
    if another:
        host.luns[OTHER.replace("://", "://worker@")] = "half"
        asked.volume_context["url"] = OTHER
        refused(Code.FAILED_PRECONDITION, node.stage, asked)
    else:
        node.stage(asked)
        node.unstage(unstage())
    nothing_left(host, records)


@pytest.mark.logs("what mkfs has left stays")
def test_killed_before_it_is_remembered_what_mkfs_has_left(tmp_path: Path) -> None:
    at, killed = 0, True
    while killed:
        host = FakeHost(URL)
        host.failing = host.unwritable = True
        records = KillableRecords(tmp_path / f"{at}", host)
        host.left, killed = at, False
        asked = stage(how=capability("xfs"))
        try:
            Node("worker-1", host, records).stage(asked)
        except Killed:
            killed = True
        except Refused:
            pass
        host.left, host.failing, host.unwritable = None, False, False
        Node("worker-1", host, records).stage(asked)
        assert host.luns[URL] == "xfs"
        at += 1
    assert at > 10


def test_a_target_path_where_binding_has_failed(
    node: Node, host: FakeHost, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet takes that for final, and does not unpublish it."""

    def fails(*_: object) -> None:
        raise Refused(Code.INTERNAL, "mount: failed")

    how = capability("ext4", messages.SINGLE_NODE_SINGLE_WRITER)
    node.stage(stage(how=how))
    with monkeypatch.context() as patched:
        patched.setattr(host, "bind", fails)
        refused(Code.INTERNAL, node.publish, publish(how=how, readonly=True))
    node.publish(publish(how=how, path="/other"))
    (volume,) = records.all()
    assert (volume.targets, volume.read_only_at) == (("/other",), ())


def test_published_from_another_staging_path(node: Node) -> None:
    node.stage(stage())
    refused(Code.FAILED_PRECONDITION, node.publish, publish(staging="/elsewhere"))
    asked = publish()
    asked.ClearField("staging_target_path")
    refused(Code.FAILED_PRECONDITION, node.publish, asked)


def test_published_before_it_is_staged(node: Node) -> None:
    refused(Code.FAILED_PRECONDITION, node.publish, publish())


def test_read_only(node: Node, host: FakeHost) -> None:
    node.stage(stage())
    node.publish(publish(readonly=True))
    assert host.mounts[f"{TARGET}-one"][-1].read_only
    node.publish(publish(readonly=True))
    refused(Code.ALREADY_EXISTS, node.publish, publish())
    node.unpublish(unpublish())
    node.publish(publish())
    refused(Code.ALREADY_EXISTS, node.publish, publish(readonly=True))
    assert not host.mounts[f"{TARGET}-one"][-1].read_only
    block = capability(None)
    node.stage(stage("two", OTHER, block))
    refused(Code.FAILED_PRECONDITION, node.publish, publish("two", block, readonly=True))


@pytest.mark.parametrize("fs", ["ext4", None])
def test_unstaged_while_it_is_published(
    fs: str | None, node: Node, host: FakeHost, records: Records
) -> None:
    node.stage(stage(how=capability(fs)))
    node.publish(publish(how=capability(fs)))
    refused(Code.FAILED_PRECONDITION, node.unstage, unstage())
    assert host.attached and len(records.all()) == 1
    node.unpublish(unpublish())
    node.unstage(unstage())
    nothing_left(host, records)


@pytest.mark.logs("unstaged without a server")
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("fs", ["ext4", None])
def test_unstaged_behind_the_end_of_its_server(
    fs: str | None,
    away: bool,
    node: Node,
    host: FakeHost,
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the kernel has in its cache is written. Without a target it is as lost as it would be
    with the server."""
    node.stage(stage(how=capability(fs)))
    host.served.clear()
    if away:
        host.refusal = Refused(Code.UNAVAILABLE, "no answer")
    served: list[bool] = []

    def unmount(path: str) -> None:
        served.append("/dev/nbd0" in host.served)
        FakeHost.unmount(host, path)

    monkeypatch.setattr(host, "unmount", unmount)
    node.unstage(unstage())
    assert set(served) == {not away}
    nothing_left(host, records)


def test_two_calls_at_once(node: Node, records: Records) -> None:
    with records.locked("one"):
        refused(Code.ABORTED, node.stage, stage())
        node.stage(stage("two", OTHER))


def test_growing(node: Node, host: FakeHost) -> None:
    refused(Code.NOT_FOUND, node.expand, expand(1))
    node.stage(stage())
    node.publish(publish())
    assert node.expand(expand(1 << 30)).capacity_bytes == 1 << 30
    assert host.grown == [f"{STAGING}-one"]
    refused(Code.OUT_OF_RANGE, node.expand, expand(1 << 31))
    host.sizes[URL] = 1 << 31
    assert node.expand(expand(1 << 31)).capacity_bytes == 1 << 31
    refused(Code.OUT_OF_RANGE, node.expand, expand(1, limit=1 << 30))


def test_no_statistics_of_what_is_not_there(node: Node) -> None:
    refused(Code.NOT_FOUND, node.stats, stats("/nowhere"))
    node.stage(stage())
    refused(Code.NOT_FOUND, node.stats, stats("/nowhere"))
    refused(Code.INVALID_ARGUMENT, node.stats, stats(""))
    node.stage(stage("two", OTHER))
    refused(Code.NOT_FOUND, node.stats, stats(f"{STAGING}-two"))


def no_memory(*_: object) -> bool:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def looked_after(node: Node, complained: dict[str, str]) -> None:
    for thread in node.look_after(complained):
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.logs("its server ")
def test_a_server_that_has_ended_gets_a_successor(node: Node, host: FakeHost) -> None:
    node.stage(stage())
    host.served.clear()
    assert node.stats(stats(f"{STAGING}-one")).volume_condition.abnormal
    complained: dict[str, str] = {}
    host.refusal = Refused(Code.UNAVAILABLE, "no answer")
    looked_after(node, complained)
    looked_after(node, complained)
    assert complained == {"one": "no answer"}
    host.refusal = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host, "attach", no_memory)
        looked_after(node, complained)  # it goes on
    assert "Cannot allocate" in complained["one"]
    looked_after(node, complained)
    assert host.served == {"/dev/nbd0"} and complained == {}
    assert not node.stats(stats(f"{STAGING}-one")).volume_condition.abnormal


@pytest.mark.logs("its server ")
def test_a_target_that_is_away_keeps_no_other_volume_waiting(
    node: Node, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not keep requests for ever."""
    node.stage(stage("one"))
    node.stage(stage("two", OTHER))
    host.served.clear()
    back = threading.Event()

    def attach(volume: Volume, secret: Path) -> bool:
        assert volume.urls != (URL,) or back.wait(60)
        return FakeHost.attach(host, volume, secret)

    monkeypatch.setattr(host, "attach", attach)
    complained: dict[str, str] = {}
    begun = node.look_after(complained)
    try:
        until_blocking(lambda: host.served == {"/dev/nbd1"})
        assert len(begun) == 2
        assert node.look_after(complained) == []  # the first one's is under way
    finally:
        back.set()
        for each in begun:
            each.join(60)
    assert host.served == {"/dev/nbd0", "/dev/nbd1"}


def test_about_the_node(node: Node) -> None:
    about = node.info(None)
    assert (about.node_id, about.max_volumes_per_node) == ("worker-1", DEVICES)
    found = {each.rpc.type for each in node.capabilities(None).capabilities}
    assert {messages.STAGE_UNSTAGE_VOLUME, messages.EXPAND_VOLUME} <= found
