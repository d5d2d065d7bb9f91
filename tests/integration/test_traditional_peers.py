"""libiscsi, QEMU and our target over Traditional iSCSI, with CHAP and digests."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.commands import iserblk, serving
from tests.support.interop import Record, package
from tests.support.spy import Spy, spying
from tests.support.target import IQN

MIB = 1 << 20
SIZE = 16 * MIB
OWN, THEIRS = ("host", "hush-hush-hush"), ("disk", "not-a-word-more")
_OWN = {"LIBISCSI_CHAP_USERNAME": OWN[0], "LIBISCSI_CHAP_PASSWORD": OWN[1]}
_THEIRS = {
    "LIBISCSI_CHAP_TARGET_USERNAME": THEIRS[0],
    "LIBISCSI_CHAP_TARGET_PASSWORD": THEIRS[1],
}
CREDENTIALS: dict[str, dict[str, str]] = {"none": {}, "one-way": _OWN, "mutual": _OWN | _THEIRS}
CHAP = tuple(CREDENTIALS)


class Setting(NamedTuple):
    """Ports of two targets: one without authentication, one with CHAP. ``folder``: for files."""

    open_port: int
    chap_port: int
    folder: Path


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("peers")
    accounts = private(folder / "accounts", ":".join(OWN) + "\n")
    secret = private(folder / "target", THEIRS[1] + "\n")
    command = ["target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--lun"]
    chap = ["--chap-accounts", accounts, "--chap-user", THEIRS[0], "--chap-secret-file", secret]
    one = serving(*command, f"{folder / 'one'}:size={SIZE}", log=folder / "log")
    two = serving(*command, f"{folder / 'two'}:size={SIZE}", *chap, log=folder / "log")
    with one as for_everybody, two as with_chap:
        ports = [
            int(each.url.split("/")[2].rpartition(":")[2]) for each in (for_everybody, with_chap)
        ]
        yield Setting(ports[0], ports[1], folder)
        for each in (for_everybody, with_chap):
            assert each.end(signal.SIGTERM) == 143


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: run scripts/setup --tests")
    return path


def run(chap: str, *command: str) -> str:
    """Run a program that must succeed, with the credentials for ``chap``; its output."""
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **CREDENTIALS[chap]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logged_in_with(spy: Spy, chap: str, digest: str = "None") -> None:
    """Check in the target's answers that it agreed to the digests and to CHAP."""
    assert f"HeaderDigest={digest}\0".encode() in spy.answered
    assert (b"AuthMethod=CHAP\0" in spy.answered) == (chap != "none")
    assert (b"CHAP_N=" + THEIRS[0].encode() + b"\0" in spy.answered) == (chap == "mutual")
    assert not any(secret.encode() in spy.asked + spy.answered for _, secret in (OWN, THEIRS))


# shows: SYSTEM-7, SYSTEM-45
@pytest.mark.parametrize("chap", CHAP)
def test_libiscsi(setting: Setting, record: Record, chap: str) -> None:
    """Its programs prefer HeaderDigest=None, whatever the URL says."""
    with spying(setting.open_port if chap == "none" else setting.chap_port) as spy:
        portal = f"iscsi://127.0.0.1:{spy.port}"
        said = run(chap, program("iscsi-ls"), "-s", portal)
        # Discovery names the port that the target listens on, and the session goes there.
        assert f"Target:{IQN} Portal:127.0.0.1:" in said
        assert "Lun:0" in said and "DIRECT_ACCESS" in said
        url = f"{portal}/{IQN}/0"
        said = run(chap, program("iscsi-inq"), url)
        assert "Product:FILE" in said.replace(" ", "") and "DIRECT_ACCESS" in said
        said = run(chap, program("iscsi-readcapacity16"), url)
        assert f"Total size:{SIZE}" in said and "LBPRZ:1" in said
        assert "SWP:0" in run(chap, program("iscsi-swp"), url)
        for mode in ((), ("-r",)):
            said = run(chap, program("iscsi-perf"), "-t", "1", "-m", "8", "-b", "64", *mode, url)
            assert "finished" in said and f"{SIZE} byte" in said
        logged_in_with(spy, chap)
    record(
        ours="target",
        peer="libiscsi's programs",
        version=package("libiscsi-bin"),
        transport=f"TCP, CHAP {chap}",
        ran="iscsi-ls, iscsi-inq, iscsi-readcapacity16, iscsi-swp, iscsi-perf",
    )


def test_libiscsi_with_a_wrong_secret(setting: Setting) -> None:
    url = f"iscsi://{OWN[0]}%loud-loud-loud@127.0.0.1:{setting.chap_port}/{IQN}/0"
    command = [program("iscsi-inq"), url]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert "uthentication" in done.stdout + done.stderr


def test_a_target_that_wants_no_secret(setting: Setting) -> None:
    """libiscsi, which has been given one, logs in without; ours does not. With the secrets for
    mutual CHAP neither does."""
    url = f"iscsi://127.0.0.1:{setting.open_port}/{IQN}/0"
    assert "DIRECT_ACCESS" in run("one-way", program("iscsi-inq"), url)
    with pytest.raises(AssertionError, match="did not return CHAP_N"):
        run("mutual", program("iscsi-inq"), url)
    for chap in ("one-way", "mutual"):
        refused = iserblk("info", url, cwd=None, **CREDENTIALS[chap])
        assert refused.returncode == 24 and "authentication failed" in refused.stderr


# QEMU's driver knows neither mutual CHAP nor data digests.
# shows: SYSTEM-45
@pytest.mark.parametrize("digest", ["None", "CRC32C"])
@pytest.mark.parametrize("chap", ["none", "one-way"])
def test_qemu_img(setting: Setting, tmp_path: Path, record: Record, chap: str, digest: str) -> None:
    """qemu-img writes a file to the LUN, reads it back, and finds no difference."""
    image, secret = tmp_path / "image", private(tmp_path / "secret", OWN[1])
    image.write_bytes(random.Random(7).randbytes(SIZE - MIB) + bytes(MIB))
    qemu_img = program("qemu-img")
    with spying(setting.open_port if chap == "none" else setting.chap_port) as spy:
        lun = f"driver=iscsi,transport=tcp,portal=127.0.0.1:{spy.port},target={IQN},lun=0"
        lun += f",header-digest={digest.lower()},initiator-name=iqn.2026-11.example:qemu"
        options = ["--image-opts"]
        if chap != "none":
            options += ["--object", f"secret,id=own,file={secret}"]
            lun += f",user={OWN[0]},password-secret=own"
        try:
            said = run("none", qemu_img, "info", *options, lun)
        except AssertionError as error:
            if "Unknown driver" in str(error) or "Unknown protocol" in str(error):
                pytest.skip("qemu-block-extra is not installed: run scripts/setup --tests")
            raise
        assert f"({SIZE} bytes)" in said
        file = f"driver=file,filename={image}"
        raw = f"driver=raw,file.{lun.replace(',', ',file.')}"
        run(
            "none", qemu_img, "convert", "-n", *options, "--target-image-opts", file, raw
        )  # fmt: skip
        said = run("none", qemu_img, "compare", *options, file, raw)
        assert "identical" in said
        logged_in_with(spy, chap, digest)
    record(
        ours="target",
        peer="QEMU's iSCSI driver",
        version=package("qemu-block-extra"),
        transport=f"TCP, header digest {digest}, CHAP {chap}",
        ran=f"qemu-img info, convert of {SIZE // MIB} MiB, compare",
    )
