"""A node of a cluster: containerd, a kubelet and the CSI plugin, as processes of this machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

from iserblk.csi.server import NAME
from tests.cli.commands import environment
from tests.lab.guest import attached
from tests.support.forking import Forked

HOSTNAME = "worker-1"
HERE = "LAB_SETUP" not in os.environ
USER, SECRET = "worker", "twelve-letters"
IMAGE = "localhost/pod:1"
_DISK = "2G"
_SLOW_S = 600

run = partial(attached.run, timeout=_SLOW_S)


@contextmanager
def prepared(scratch: Path) -> Iterator[Path]:
    """What a machine has before a kubelet runs: control groups, and a disk (a guest's own files are
    an overlay, in which no container can lie). Yields a directory on the disk. At the end, however
    it comes, no process of ours runs, and the disk is not mounted. (scripts/kubelet sees to the
    settings of the kernel.)"""
    if not os.path.ismount("/sys/fs/cgroup"):
        run("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
    disk = scratch / "disk.img"
    run("truncate", "-s", _DISK, disk)
    run("mkfs.ext4", "-q", "-F", disk)
    place = scratch / "disk"
    place.mkdir()
    run("mount", "-o", "loop", disk, place)
    try:
        yield place
    finally:
        for each in reversed(Process.started):
            each.end()
        run("umount", "--recursive", place)


def write_image(path: Path) -> None:
    """An image, as the Open Container Initiative's layout in a tar file: busybox alone, which is
    both a pod's container and, sleeping, what keeps its namespaces."""
    busybox = Path("/bin/busybox").read_bytes()
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in ("bin", "dev", "proc", "sys", "tmp", "etc", "data"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(directory)
        program = tarfile.TarInfo("bin/busybox")
        program.size, program.mode = len(busybox), 0o755
        tar.addfile(program, io.BytesIO(busybox))
    blobs: dict[str, bytes] = {}

    def blob(kind: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    layers = [blob("layer.v1.tar", layer.getvalue())]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/bin/busybox", "sleep", "86400"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layers[0]["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob("config.v1+json", json.dumps(config).encode()),
        "layers": layers,
    }
    entry = blob("manifest.v1+json", json.dumps(manifest).encode())
    entry["annotations"] = {"io.containerd.image.name": IMAGE}
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
        **{f"blobs/sha256/{digest}": data for digest, data in blobs.items()},
    }
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            file = tarfile.TarInfo(name)
            file.size = len(data)
            tar.addfile(file, io.BytesIO(data))


class Process:
    """A program that runs until it is ended. ``log``: what it has said."""

    started: ClassVar[list[Process]] = []

    def __init__(self, words: list[object], log: Path, path: str | None = None) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PATH": path or os.environ["PATH"]},
            )
        Process.started.append(self)

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self.kill()


def wait_for(condition: object, *processes: Process) -> None:
    """Until ``condition()``; fails when a process has ended, with the last lines of its log."""
    while not condition():  # type: ignore[operator]
        for each in processes:
            if not each.alive():
                lines = each.log.read_text(errors="replace").splitlines()
                raise AssertionError("\n".join([f"{each.log.name} has ended:", *lines[-30:]]))
        time.sleep(0.5)


class Containerd(Process):
    def __init__(self, place: Path) -> None:
        self.socket = place / "containerd.sock"
        programs = Path(os.environ["KUBELET_RUNTIME"])
        self._ctr = [programs / "usr/bin/ctr", "--address", self.socket, "--namespace", "k8s.io"]
        path = f"{programs}/usr/bin:{programs}/usr/sbin:{os.environ['PATH']}"
        config = place / "containerd.toml"
        config.write_text(
            f"""
version = 2
root = "{place}/containerd"
state = "{place}/containerd.run"
[grpc]
  address = "{self.socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{IMAGE}"
  disable_apparmor = true
  restrict_oom_score_adj = true  # in a container, root may not lower it
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
"""
        )
        super().__init__(
            [programs / "usr/bin/containerd", "--config", config], place / "containerd.log", path
        )
        wait_for(self.socket.is_socket, self)
        image = place / "image.tar"
        write_image(image)
        run(*self._ctr, "images", "import", image)

    def containers(self) -> list[str]:
        return run(*self._ctr, "containers", "list", "--quiet").split()

    def end(self) -> None:
        """Containers would outlive it: those that a failure has left end first."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            for name in self.containers() if self.alive() else ():
                run(*self._ctr, "tasks", "delete", "--force", name, timeout=60)
        super().end()


class Kubelet(Process):
    """``server``: the URL of the API. ``root``: its directory."""

    def __init__(self, place: Path, runtime: Containerd, server: str) -> None:
        self.root = place / "kubelet"
        kubeconfig = place / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "lab", "cluster": {"server": server}}],
                    "contexts": [{"name": "lab", "context": {"cluster": "lab"}}],
                    "current-context": "lab",
                }
            )
        )
        none = "0%"  # of nothing is evicted
        config = place / "kubelet.json"
        config.write_text(
            json.dumps(
                {
                    "apiVersion": "kubelet.config.k8s.io/v1beta1",
                    "kind": "KubeletConfiguration",
                    "authentication": {
                        "anonymous": {"enabled": True},
                        "webhook": {"enabled": False},
                    },
                    "authorization": {"mode": "AlwaysAllow"},
                    "address": "127.0.0.1",
                    "cgroupsPerQOS": False,
                    "enforceNodeAllocatable": [],
                    "contentType": "application/json",
                    "evictionHard": {
                        "memory.available": none,
                        "nodefs.available": none,
                        "nodefs.inodesFree": none,
                        "imagefs.available": none,
                    },
                    "failSwapOn": False,
                    # Of cAdvisor, which knows no file system of the guest's.
                    "featureGates": {"LocalStorageCapacityIsolation": False},
                    "makeIPTablesUtilChains": False,
                    "runtimeRequestTimeout": "10m",
                    "syncFrequency": "10s",
                    "volumePluginDir": str(place / "volume-plugins"),
                }
            )
        )
        super().__init__(
            [
                *(os.environ["KUBELET"], "--config", config, "--kubeconfig", kubeconfig),
                *("--container-runtime", "remote", "--hostname-override", HOSTNAME),
                *("--container-runtime-endpoint", f"unix://{runtime.socket}"),
                *("--node-ip", address(), "--root-dir", self.root, "--v", "3"),
            ],
            place / "kubelet.log",
        )


def address() -> str:
    """One of this machine's: a kubelet takes none of the loopback interface."""
    for line in run("ip", "-4", "-o", "address", "show", "scope", "global").splitlines():
        return line.split()[3].partition("/")[0]
    raise AssertionError("this machine has no address but that of the loopback interface")


class Plugin:
    """``iserblk csi``, where docs/kubernetes/iserblk.yaml has it below ``root``; where there are no
    NBD devices, with loop devices for the files in ``luns``."""

    def __init__(self, root: Path, log: Path, luns: Path) -> None:
        socket = root / "plugins" / NAME / "csi.sock"
        registry = root / "plugins_registry"
        for each in (socket.parent, registry):
            each.mkdir(parents=True, exist_ok=True)
        module = "iserblk.cli"
        words = ["csi", "--node-id", HOSTNAME, "--endpoint", f"unix://{socket}"]
        words += ["--register", str(registry)]
        if HERE:
            module, words = "tests.kubelet.loops", [str(socket), str(registry), str(luns)]
        with log.open("ab") as output:
            self._process = Forked(
                module, words, env=environment(), stdout=subprocess.PIPE, stderr=output
            )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == f"ready unix://{socket}\n", log.read_text()

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=_SLOW_S)
        assert self._process.returncode == 0
