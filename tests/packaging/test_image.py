"""The container image, in containers of podman: as `scripts/image --check` runs it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk import __version__
from iserblk.nbd import messages as nbd
from tests.csi.kubelet import Kubelet
from tests.support.nbd_client import connected, request, write
from tests.support.podman import USER, Podman, image_archive
from tests.support.until import until_blocking

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

IQN = "iqn.2026-11.example:disk"
SIZE = 8 << 20
PLACE = "/var/lib/iserblk"
PROGRAMS = ("mount", "umount", "blkid", "modprobe", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "tini")


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    directory = tmp_path_factory.mktemp("image")
    podman = Podman(directory, image_archive(directory))
    try:
        yield podman
    finally:
        podman.remove()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that belongs to the user of the image."""
    made = tmp_path / "shared"
    made.mkdir()
    give(made)
    return made


def give(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, USER, USER)


def mapped(*pairs: tuple[Path, str]) -> tuple[object, ...]:
    """Options that show directories and files of ours in a container. A user other than root owns
    them there, too."""
    volumes = tuple(f"--volume={outside}:{inside}" for outside, inside in pairs)
    return volumes if os.geteuid() == 0 else (f"--userns=keep-id:uid={USER},gid={USER}", *volumes)


def target(*more: str, lun: str = f"disk.img:size={SIZE}") -> tuple[object, ...]:
    return ("target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--lun", lun, *more)


def test_what_is_in_it(podman: Podman) -> None:
    config = podman.inspect()
    assert config["User"] == f"{USER}:{USER}"
    assert config["StopSignal"] == "SIGTERM"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == "iserblk"
    assert labels["org.opencontainers.image.version"].startswith(__version__)
    assert len(labels["org.opencontainers.image.revision"]) == 40
    assert podman.run("--version").out == f"iserblk {__version__}\n"
    # Each machine has its own name, and its own key for reservations.
    looked = podman.run(
        "-c",
        "id -u; cat /etc/machine-id; ls /etc/iscsi/initiatorname.iscsi",
        options=("--entrypoint=/bin/sh",),
    )
    assert looked.status == 2 and looked.out == f"{USER}\n", looked
    each = f"for name in {' '.join(PROGRAMS)}; do command -v $name || echo no $name; done"
    found = podman.run("-c", each, options=("--entrypoint=/bin/sh",)).out
    assert len(found.splitlines()) == len(PROGRAMS) and "no " not in found, found


def test_doctor(podman: Podman) -> None:
    done = podman.run("doctor", "--json")
    assert (done.status, done.err) == (0, "")
    found = {each["name"]: each for each in json.loads(done.out)["findings"]}
    assert found["data path"]["status"] == "ok", found["data path"]
    assert "pyverbs" not in found["verbs"]["text"], found["verbs"]


def test_a_target_and_copies(podman: Podman, shared: Path, tmp_path: Path) -> None:
    """A file in, a LUN, and a file out, from containers that share nothing but the network."""
    files = tmp_path / "files"
    files.mkdir()
    give(files)
    source = files / "source.img"
    source.write_bytes(os.urandom(SIZE))
    source.chmod(0o644)
    with podman.running("target", *target(), options=mapped((shared, PLACE))) as serving:
        url = f"{serving.wait_ready()}/0"
        assert url.startswith("iser://")
        here = mapped((files, "/mnt"))
        done = podman.run("copy", "/mnt/source.img", url, "--verify", options=here)
        assert done.status == 0, done
        done = podman.run("doctor", url)
        assert done.status == 0 and "iSER works towards" in done.out, done
        done = podman.run("copy", url, "/mnt/back.img", options=here)
        assert done.status == 0, done
        ended = serving.stop()
        assert (ended.status, ended.out, ended.err) == (0, "", "")
    assert (files / "back.img").read_bytes() == source.read_bytes()
    assert (shared / "disk.img").read_bytes() == source.read_bytes()
    if os.geteuid() == 0:
        assert (shared / "disk.img").stat().st_uid == USER


def test_the_second_container_is_refused(podman: Podman, shared: Path, tmp_path: Path) -> None:
    """They have host names of their own, as containers have by themselves, so they are two
    initiators."""
    with podman.running("target", *target(), options=mapped((shared, PLACE))) as serving:
        url = f"{serving.wait_ready()}/0?reserve=exclusive"

        def exported(name: str) -> tuple[tuple[object, ...], tuple[object, ...]]:
            sockets = tmp_path / name
            sockets.mkdir(exist_ok=True)
            give(sockets)
            options = (f"--hostname={name}", *mapped((sockets, "/run/iserblk")))
            return ("nbd", url, "--socket", "/run/iserblk/disk.sock"), options

        words, options = exported("one")
        with podman.running("one", *words, options=options) as one:
            one.wait_ready()
            others, other_options = exported("two")
            refused = podman.run(*others, options=other_options)
            assert (refused.status, refused.out) == (28, ""), refused
            assert "reserved" in refused.err and len(refused.err.splitlines()) == 1, refused
            assert one.stop().status == 0
        with podman.running("two", *others, options=other_options) as two:
            two.wait_ready()
            assert two.stop().status == 0


async def test_what_was_written_is_flushed_at_the_end(podman: Podman, shared: Path) -> None:
    """A client on this machine writes through the socket, and flushes nothing; then the container
    is stopped, and after that the target is killed, which loses what it has not been told to
    flush."""
    sockets = shared / "sockets"
    sockets.mkdir()
    give(sockets)
    lun = f"disk.img:size={SIZE}:volatile-cache={SIZE}"
    with podman.running("target", *target(lun=lun), options=mapped((shared, PLACE))) as serving:
        url = f"{serving.wait_ready()}/0"
        words = ("nbd", url, "--socket", "/run/iserblk/disk.sock")
        options = mapped((sockets, "/run/iserblk"))
        with podman.running("nbd", *words, options=options) as exporting:
            assert exporting.wait_ready() == "nbd+unix:///?socket=/run/iserblk/disk.sock"
            data = os.urandom(1 << 16)
            async with await connected(sockets / "disk.sock") as client:
                await client.send(write(data, 1 << 20, cookie=1))
                assert (await client.reply()).error == 0
                await client.send(request(nbd.READ, 1 << 20, len(data), cookie=2))
                assert (await client.reply(len(data))).data == data
                assert data not in (shared / "disk.img").read_bytes()
                shown = podman.good("exec", exporting.name, "iserblk", "stats", "--json")
                assert json.loads(shown), shown
                ended = exporting.stop()
        assert (ended.status, ended.err) == (0, "")
        assert not (sockets / "disk.sock").exists()
        serving.kill()
    assert (shared / "disk.img").read_bytes()[1 << 20 :][: len(data)] == data


def test_secrets_are_files(podman: Podman, shared: Path, tmp_path: Path) -> None:
    """podman's own secrets: neither an environment nor a command line has them."""
    accounts, secret = tmp_path / "accounts", tmp_path / "secret"
    accounts.write_text("alice:twelve-letters\n")
    secret.write_text("twelve-letters\n")
    podman.good("secret", "create", "accounts", accounts)
    podman.good("secret", "create", "array", secret)
    private = f"uid={USER},gid={USER},mode=0400"
    writable = "--read-only=false"  # podman 4.3 with runc cannot show secrets in a root without
    words = target("--chap-accounts", "/run/secrets/accounts")
    options = (writable, f"--secret=accounts,{private}", *mapped((shared, PLACE)))
    with podman.running("target", *words, options=options) as serving:
        url = serving.wait_ready().replace("://", "://alice@")
        assert podman.run("info", f"{url}/0").status == 7  # no secret
        option = ("--chap-secret-file", "/run/secrets/array")
        inner = (writable, f"--secret=array,{private}")
        done = podman.run("info", f"{url}/0", "--json", *option, options=inner)
        assert done.status == 0 and str(SIZE) in done.out, done
        assert "twelve-letters" not in podman.good("container", "inspect", serving.name)
        assert serving.stop().status == 0
    podman.good("secret", "rm", "accounts", "array")


def test_a_copy_that_is_stopped_is_no_success(podman: Podman, tmp_path: Path) -> None:
    """An orchestrator would take 0 for a copy that is whole."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"iser://127.0.0.1:{silent.getsockname()[1]}/{IQN}/0"
        with podman.running("copying", "copy", url, "/tmp/disk.img") as copying:
            connection, _ = silent.accept()  # it waits for an answer now
            with connection:
                assert copying.stop().status == 143


def test_csi(podman: Podman, shared: Path) -> None:
    """Root in the container, as the manifest has it; without rights it can answer who it is."""
    words = ("csi", "--endpoint", "unix:///csi/csi.sock", "--node-id", "worker-7")
    done = podman.run(*words)
    assert done.status == 13 and len(done.err.splitlines()) == 1, done
    # Its root has no right to write to what belongs to others, and is this user without root.
    os.chown(shared, os.geteuid(), os.getegid())
    options = ("--user=0:0", f"--volume={shared}:/csi")
    with podman.running("csi", *words, options=options) as serving:
        assert serving.wait_ready() == "unix:///csi/csi.sock"
        until_blocking((shared / "csi.sock").exists)
        with Kubelet(shared / "csi.sock", "csi.v1.Identity") as kubelet:
            about = kubelet.call("GetPluginInfo")
            assert (about.name, about.vendor_version) == ("iserblk.csi", __version__)
            assert kubelet.call("Probe").ready.value
        with Kubelet(shared / "csi.sock", "csi.v1.Node") as kubelet:
            assert kubelet.call("NodeGetInfo").node_id == "worker-7"
        ended = serving.stop()
    assert (ended.status, ended.err) == (0, "")
