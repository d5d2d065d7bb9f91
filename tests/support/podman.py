"""Containers of the image that scripts/image builds, run by podman in a storage of its own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.forking import ROOT

GIVEN = "ISERBLK_IMAGE"
USER = 3260  # of the image
LIMIT_S = 240.0
DESCRIPTORS = 4096
# What is tried, in this order: where podman cannot do its usual, cgroups are not delegated, are of
# both versions at once (which crun refuses), or no overlay can be below the directory of tests.
_WAYS = [
    (["--storage-driver", storage, *runtime], run)
    for storage in ("overlay", "vfs")
    for runtime, run in (([], []), ([], ["--cgroups=disabled"]), (["--runtime", "runc"], []))
]


_NOT_RUN = (125, 126, 127)  # of podman: the container did not start


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def image_archive(directory: Path) -> Path:
    """The archive that ISERBLK_IMAGE names (`scripts/image --check` does), else a new one. Skips
    where none can be built."""
    given = os.environ.get(GIVEN)
    programs = ("podman",) if given else ("podman", "buildah", "mmdebstrap")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if given:
        return Path(given)
    done = subprocess.run(
        [str(ROOT / "scripts" / "image"), "--output", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = directory.glob("*.oci.tar")
    return archive


def _program(directory: Path, words: list[str]) -> list[str]:
    """podman, with its storage in ``directory``."""
    places = ["--root", str(directory / "storage"), "--runroot", str(directory / "run")]
    return ["podman", *places, *words]


class Podman:
    """``image``: the name in the storage. Containers have the network of this machine, so that
    targets on its loopback interface are reached; and a root directory that nothing can write to,
    and no rights (capabilities), unless the test says otherwise."""

    def __init__(self, directory: Path, archive: Path) -> None:
        """Skips, with podman's own words, where podman can run no container on this machine; fails
        there if ISERBLK_IMAGE is to be checked."""
        self._words, self._run_words = list[str](), list[str]()
        self.image, driver, said = "", "", ""
        reasons: list[str] = []  # in the order of _WAYS
        self._mounted = directory
        self._count = 0
        for words, self._run_words in _WAYS:
            if words[1] != driver:  # each has a storage of its own
                if driver:
                    self.remove()
                driver = words[1]
                self._mounted = directory / driver / "storage" / driver
                self._words = _program(directory / driver, words)
                loaded = self.call("load", "--input", archive)
                said = loaded.err
                # "Loaded image: NAME", or "Loaded image(s): NAME"
                self.image = loaded.out.strip().rpartition(" ")[2] if loaded.status == 0 else ""
            self._words = _program(directory / driver, words)
            if self.image:
                done = self.run("--version")
                if done.status not in _NOT_RUN:
                    return
                said = done.err
            reasons.append(said.strip())
        self.remove()
        reason = f"podman runs no container here: {'; '.join(dict.fromkeys(reasons))}"
        if GIVEN in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)

    def remove(self) -> None:
        """The storage and what runs in it."""
        self.call("rm", "--all", "--force", "--time", "0")
        self.call("rmi", "--all", "--force")
        if self._mounted.exists():  # podman has made it a mount of its own
            subprocess.run(["umount", self._mounted], check=False, capture_output=True)

    def call(self, *words: object) -> Ended:
        done = subprocess.run(
            [*self._words, *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def good(self, *words: object) -> str:
        done = self.call(*words)
        assert done.status == 0, done
        return done.out

    def words(self, *arguments: object, options: tuple[object, ...] = ()) -> list[str]:
        """Of the command line that runs ``iserblk`` with ``arguments``."""
        usual = ["--rm", "--network=host", "--read-only", "--cap-drop=all"]
        usual += ["--security-opt=no-new-privileges"]
        # podman's own limits may be more than this user, or a root without that right, can have.
        # With fewer descriptors than DESCRIPTORS a server warns that there is less room.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = DESCRIPTORS if hard < 0 else min(DESCRIPTORS, hard)
        usual += [f"--ulimit=nofile={most}:{most}", "--ulimit=nproc=4096:4096"]
        return [
            *self._words,
            "run",
            *usual,
            *self._run_words,
            *map(str, options),
            self.image,
            *map(str, arguments),
        ]

    def run(self, *arguments: object, options: tuple[object, ...] = ()) -> Ended:
        """``iserblk`` with ``arguments``, to its end. ``options``: of `podman run`."""
        done = subprocess.run(
            self.words(*arguments, options=options),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def running(
        self, name: str, *arguments: object, options: tuple[object, ...] = ()
    ) -> Iterator[Running]:
        """A container that serves until a signal."""
        self._count += 1  # podman may still be about to remove one of the same name
        name = f"{name}-{self._count}"
        running = Running(self, name, self.words(*arguments, options=(f"--name={name}", *options)))
        try:
            yield running
        finally:
            running.kill()

    def inspect(self) -> dict[str, Any]:
        """The image's configuration."""
        found = json.loads(self.good("image", "inspect", self.image))
        config: dict[str, Any] = found[0]["Config"]
        return config


class Running:
    """A container. ``url``: what is behind `ready` in its output, if ``wait_ready`` was called."""

    def __init__(self, podman: Podman, name: str, words: list[str]) -> None:
        self._podman = podman
        self.name = name
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> str:
        """What it can be reached by, as it prints that."""
        assert self.process.stdout is not None
        word, _, url = self.process.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise AssertionError(self.process.communicate(timeout=LIMIT_S))
        return url

    def stop(self) -> Ended:
        """As `podman stop` does by itself: the image's signal, and SIGKILL ten seconds after that,
        which would make the status 137."""
        self._podman.good("stop", self.name)
        return self.ended()

    def ended(self) -> Ended:
        out, err = self.process.communicate(timeout=LIMIT_S)
        return Ended(self.process.returncode, out, err)

    def kill(self) -> None:
        """At once, as by a power failure."""
        if self.process.poll() is None:
            self._podman.call("kill", "--signal", "KILL", self.name)
            self.process.kill()
        self.process.communicate()
