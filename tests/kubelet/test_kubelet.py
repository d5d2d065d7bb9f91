"""The CSI plugin under a kubelet: it registers, and pods get LUNs as file systems and as block
devices, while plugin and kubelet are started anew.

The kubelet, containerd and, in the guest, the devices are real. The API behind the kubelet is
``api.py``; volumes and claims are bound as a cluster's controllers would leave them.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from iserblk.csi.server import NAME
from tests.cli.commands import serving
from tests.kubelet import api, loops
from tests.kubelet.api import Cluster, Object
from tests.kubelet.node import (
    HERE,
    HOSTNAME,
    IMAGE,
    SECRET,
    USER,
    Containerd,
    Kubelet,
    Plugin,
    prepared,
    run,
    wait_for,
)
from tests.lab.guest.attached import MIB, RUN, connected, servers
from tests.support.target import IQN

STORAGE = "storage.k8s.io/v1"
SIZE = 64 * MIB
FS, RAW = "database", "raw"


@dataclass
class Node:
    """All that runs; ``kubelet`` and ``plugin`` may be replaced."""

    place: Path
    luns: Path
    url: str
    cluster: Cluster
    containerd: Containerd
    kubelet: Kubelet
    plugin: Plugin
    server: str

    def wait(self, condition: Any) -> None:
        wait_for(condition, self.containerd, self.kubelet)

    def attached(self) -> list[str]:
        return [*loops.attached(self.luns)] if HERE else connected()

    def nothing_left(self) -> None:
        """Of any volume."""
        assert self.attached() == []
        records = self.luns / "records"
        if not HERE:
            assert servers() == []
            assert [path.name for path in RUN.iterdir() if path.is_dir()] == ["csi"]
            records = RUN / "csi"
        assert {path.suffix for path in records.iterdir()} == {".lock"}

    def end_plugin(self) -> None:
        self.plugin.end()

    def start_again(self) -> None:
        """Kubelet and plugin, while pods run."""
        self.kubelet.kill()
        self.end_plugin()
        self.plugin = a_plugin(self.place, self.luns)
        self.kubelet = Kubelet(self.place, self.containerd, self.server)


def a_plugin(place: Path, luns: Path) -> Plugin:
    return Plugin(place / "kubelet", place / "plugin.log", luns)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    scratch = tmp_path_factory.mktemp("node")
    luns = scratch / "luns"
    luns.mkdir()
    for name in ("0", "1"):
        with (luns / name).open("wb") as file:
            file.truncate(SIZE)
    cluster = Cluster()
    declare(cluster)
    http = api.serving(cluster)
    server = f"http://127.0.0.1:{http.server_port}"
    with ExitStack() as stack:
        for end in (http.server_close, http.shutdown, cluster.end):
            stack.callback(end)
        url = stack.enter_context(a_target(luns, scratch))
        if HERE:
            stack.callback(loops.detach_all, luns)  # after a failure
        place = stack.enter_context(prepared(scratch))
        containerd = Containerd(place)
        plugin = a_plugin(place, luns)
        kubelet = Kubelet(place, containerd, server)
        made = Node(place, luns, url, cluster, containerd, kubelet, plugin, server)
        stack.callback(made.end_plugin)
        yield made
        pods, _ = cluster.all(api.Place("v1", "pods", "", ""))
        for found in pods:  # after a failure
            delete_pod(made, found["metadata"]["name"])
        made.kubelet.end()


@contextmanager
def a_target(luns: Path, scratch: Path) -> Iterator[str]:
    """A target with the files in ``luns``, where there are devices for its LUNs. Yields its URL."""
    if HERE:
        yield f"iser://127.0.0.1/{IQN}"
        return
    accounts = scratch / "accounts"
    accounts.write_text(f"{USER}:{SECRET}\n")
    accounts.chmod(0o600)
    words = ["target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--chap-accounts", accounts]
    for file in sorted(luns.iterdir()):
        words += ["--lun", file]
    with serving(*words, log=scratch / "target.log") as target:
        yield target.url


def declare(cluster: Cluster) -> None:
    """As docs/kubernetes/iserblk.yaml."""
    cluster.put(
        STORAGE,
        "csidrivers",
        NAME,
        spec={
            "attachRequired": False,
            "podInfoOnMount": False,
            "fsGroupPolicy": "File",
            "volumeLifecycleModes": ["Persistent"],
        },
    )
    cluster.put(
        "v1",
        "secrets",
        "array-chap",
        "kube-system",
        type="Opaque",
        data={"user": base64(USER), "password": base64(SECRET)},
    )


def base64(text: str) -> str:
    return b64encode(text.encode()).decode()


def provide(cluster: Cluster, name: str, url: str, mode: str) -> None:
    """A volume on the LUN ``url``, and a claim, bound to each other."""
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "",
        "volumeMode": mode,
        "volumeName": name,
        "resources": {"requests": {"storage": f"{SIZE}"}},
    }
    status = {
        "phase": "Bound",
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": f"{SIZE}"},
    }
    uid = cluster.put("v1", "persistentvolumeclaims", name, "default", spec=spec, status=status)
    cluster.put(
        "v1",
        "persistentvolumes",
        name,
        spec={
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": f"{SIZE}"},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "volumeMode": mode,
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": "default",
                "name": name,
                "uid": uid,
            },
            "csi": {
                "driver": NAME,
                "volumeHandle": name,
                **({"fsType": "ext4"} if mode == "Filesystem" else {}),
                "volumeAttributes": {"url": url, "io-timeout": "300"},
                "nodeStageSecretRef": {"namespace": "kube-system", "name": "array-chap"},
            },
        },
        status={"phase": "Bound"},
    )


def start_pod(cluster: Cluster, name: str, script: str, **container: Any) -> str:
    """A pod with the claim ``name``, whose shell runs ``script``. Returns its uid."""
    return cluster.put(
        "v1",
        "pods",
        name,
        "default",
        spec={
            "nodeName": HOSTNAME,
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "dnsPolicy": "Default",
            "schedulerName": "default-scheduler",
            "securityContext": {},
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}],
            "containers": [
                {
                    "name": "one",
                    "image": IMAGE,
                    "imagePullPolicy": "Never",
                    "command": ["/bin/busybox", "sh", "-c", script],
                    "resources": {},
                    "terminationMessagePath": "/dev/termination-log",
                    "terminationMessagePolicy": "File",
                    **container,
                }
            ],
        },
        status={"phase": "Pending", "qosClass": "BestEffort"},
    )


def pod(cluster: Cluster, name: str) -> Object | None:
    return cluster.find("v1", "pods", name, "default")


def is_running(cluster: Cluster, name: str) -> bool:
    found = pod(cluster, name)
    assert found is not None
    phase = found["status"]["phase"]
    assert phase in ("Pending", "Running"), found["status"]
    return bool(phase == "Running")


def delete_pod(node: Node, name: str) -> None:
    """Delete it, and wait until the kubelet has unpublished and unstaged its volume."""
    node.cluster.delete(api.Place("v1", "pods", "default", name), grace_s=1)
    node.wait(lambda: pod(node.cluster, name) is None)
    node.wait(lambda: node.attached() == [])


def test_the_kubelet_registers_the_plugin(node: Node) -> None:
    def driver() -> Object | None:
        found = node.cluster.find(STORAGE, "csinodes", HOSTNAME)
        drivers = (found or {}).get("spec", {}).get("drivers") or []
        return next((each for each in drivers if each["name"] == NAME), None)

    node.wait(driver)
    found = driver()
    assert found is not None and found["nodeID"] == HOSTNAME
    devices = 8 if HERE else len([*Path("/sys/block").glob("nbd[0-9]*")])
    assert found["allocatable"]["count"] == devices
    annotations = node.cluster.find("v1", "nodes", HOSTNAME)
    assert annotations is not None
    assert NAME in annotations["metadata"]["annotations"]["csi.volume.kubernetes.io/nodeid"]


def test_a_file_system(node: Node) -> None:
    """A new LUN gets a file system; the pod's file outlives kubelet, plugin and pod."""
    provide(node.cluster, FS, f"{node.url}/0", "Filesystem")
    write = "echo written by the pod > /data/file && /bin/busybox sync && /bin/busybox sleep 86400"
    mounts = [{"name": "data", "mountPath": "/data"}]
    uid = start_pod(node.cluster, FS, write, volumeMounts=mounts)
    node.wait(lambda: is_running(node.cluster, FS))
    volume = node.kubelet.root / "pods" / uid / "volumes" / "kubernetes.io~csi" / FS
    file = volume / "mount" / "file"
    node.wait(lambda: file.exists() and file.read_text() == "written by the pod\n")
    attached = node.attached()
    assert len(attached) == 1
    containers = node.containerd.containers()

    said = node.kubelet.log.stat().st_size
    node.start_again()
    mounted = f'MountVolume.SetUp succeeded for volume "{FS}"'

    def set_up_again() -> bool:
        with node.kubelet.log.open(encoding="utf-8", errors="replace") as log:
            log.seek(said)
            return mounted in log.read()

    node.wait(set_up_again)  # staged and published once more, under the running pod
    assert node.attached() == attached
    assert node.containerd.containers() == containers
    assert is_running(node.cluster, FS)
    assert file.read_text() == "written by the pod\n"

    delete_pod(node, FS)
    assert not volume.exists()
    staging = node.kubelet.root / "plugins/kubernetes.io/csi/pv" / FS / "globalmount"
    node.wait(lambda: not staging.exists())
    node.nothing_left()

    read = "/bin/busybox cp /data/file /data/copy && /bin/busybox sleep 86400"
    uid = start_pod(node.cluster, FS, read, volumeMounts=mounts)
    copy = (
        node.kubelet.root / "pods" / uid / "volumes" / "kubernetes.io~csi" / FS / "mount" / "copy"
    )
    node.wait(lambda: copy.exists() and copy.read_text() == "written by the pod\n")
    delete_pod(node, FS)
    node.nothing_left()


def test_a_block_device(node: Node) -> None:
    provide(node.cluster, RAW, f"{node.url}/1", "Block")
    script = (
        "echo written by the pod | /bin/busybox dd of=/dev/raw bs=512 conv=sync,fsync"
        " && /bin/busybox sleep 86400"
    )
    devices = [{"name": "data", "devicePath": "/dev/raw"}]
    start_pod(node.cluster, RAW, script, volumeDevices=devices)
    node.wait(lambda: is_running(node.cluster, RAW))
    lun = node.luns / "1"
    node.wait(lambda: lun.read_bytes()[:18] == b"written by the pod")
    assert len(node.attached()) == 1
    delete_pod(node, RAW)
    node.nothing_left()
    assert f"{node.place}/" not in run("losetup", "--list", "--noheadings", "--output", "BACK-FILE")
    assert os.stat(lun).st_size == SIZE
