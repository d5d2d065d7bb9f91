"""Builds a kubelet from the distribution's source package, with the distribution's Go, in a cache;
and unpacks a container runtime beside it. Nothing is installed.

    CACHE/source       the source package, unpacked, and its version
    CACHE/go           the compiler
    CACHE/objects      what the compiler keeps: an interrupted build goes on
    CACHE/kubelet      the program
    CACHE/runtime      containerd and runc
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lablib.archive import Absent, Archive, call
from lablib.archive import cache as cache_of_the_lab

_RELEASE = "bookworm"
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_DOWNLOAD_S = 1800
_UNPACK_S = 600
_TAIL_LINES = 20
# Code for clouds' disks and for Docker, which is half of a kubelet and of no use here.
_WITHOUT = "providerless,dockerless"
# A version before 1.0.2 calls a function of the run-time by a signature that Go 1.18 has changed.
_REFLECT2 = "vendor/github.com/modern-go/reflect2"
_PACKAGE = "k8s.io/kubernetes"  # built in GOPATH mode: its go.mod is not what Go 1.19 would write


def say(text: str) -> None:
    print(f"kubelet: {text}", file=sys.stderr, flush=True)


def cache() -> Path:
    """The directory that outlives runs. It is created if it is missing."""
    directory = cache_of_the_lab().parent / "kubelet"
    directory.mkdir(exist_ok=True)
    return directory


@contextmanager
def _making(name: str) -> Iterator[None]:
    """Lock ``name`` in the cache: the second process finds what the first has made."""
    with (cache() / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another scripts/kubelet makes the {name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _made(name: str, fill: Callable[[Path, Path], None]) -> Path:
    """``name`` in the cache; made by ``fill``, which gets an empty directory to fill and another
    one for what it needs no longer. It is there once it is complete."""
    place = cache() / name
    if not place.exists():
        for left in cache().glob(f"{name}.part.*"):
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}.part.", dir=cache()))
        try:
            (scratch / "new").mkdir()
            (scratch / "other").mkdir()
            fill(scratch / "new", scratch / "other")
            (scratch / "new").rename(place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return place


def a_kubelet(jobs: int) -> Path:
    """The program; built with ``jobs`` compilers at once if the cache has none. Raises Absent."""
    program = cache() / "kubelet"
    if program.exists():
        return program
    _check_release()
    with _making("kubelet"):
        if not program.exists():
            source = _made("source", _fetch_source)
            go = _made("go", _fetch_go)
            _build(source, go, program, jobs)
    return program


def a_runtime() -> Path:
    """A directory with containerd and runc, as in ``/``. Raises Absent."""
    with _making("runtime"):
        return _made(
            "runtime", lambda new, scratch: Archive(scratch).unpack(["containerd", "runc"], new)
        )


def _check_release() -> None:
    release = Path("/etc/os-release").read_text(encoding="utf-8")
    if f"VERSION_CODENAME={_RELEASE}\n" not in release:
        raise Absent(
            "a kubelet can be built of Debian 12's source package only: that of other releases "
            "has no kubelet, or needs packages that Debian has not; use a Debian 12"
        )


def _fetch_source(new: Path, scratch: Path) -> None:
    """Unpack the source package kubernetes into ``new``, laid out as a GOPATH."""
    archive = call(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)",
         "Created-By: Packages"],
        _UNPACK_S,
    )  # fmt: skip
    found = re.search(rf"^{_RELEASE} main (\S+)$", archive, re.MULTILINE)
    if found is None:
        raise Absent(f"apt reads no archive of Debian {_RELEASE}: add one to its sources")
    signed = f"[signed-by={_KEYS}] " if _KEYS.exists() else ""
    lists = scratch / "lists"
    (lists / "partial").mkdir(parents=True)
    (scratch / "sources.list").write_text(
        f"deb-src {signed}{found.group(1)} {_RELEASE} main\n", encoding="utf-8"
    )
    options = [
        *("-o", f"Dir::Etc::sourcelist={scratch}/sources.list", "-o", "Dir::Etc::sourceparts=-"),
        *("-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={scratch}"),
        *(["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []),
    ]
    say("downloading the source package kubernetes")
    call(["apt-get", *options, "-qq", "update"], _DOWNLOAD_S)
    call(
        ["apt-get", *options, "-qq", "source", "--download-only", "kubernetes"],
        _DOWNLOAD_S,
        cwd=scratch,
    )
    (description,) = scratch.glob("*.dsc")
    tree = new / "src" / _PACKAGE
    tree.parent.mkdir(parents=True)
    call(["dpkg-source", "--no-check", "-x", str(description), str(tree)], _UNPACK_S)
    (new / "version").write_text(description.name.partition("_")[2].removesuffix(".dsc"))
    if not (tree / "vendor").is_dir():
        raise Absent(f"the source package {description.name} has no vendor directory")
    _renew_reflect2(tree, scratch)


def _renew_reflect2(tree: Path, scratch: Path) -> None:
    """Take the package that the distribution has of a module that its Go is too new for."""
    if any((tree / _REFLECT2).glob("go_above_118*")):
        return
    root = scratch / "packages"
    Archive(scratch).unpack(["golang-github-modern-go-reflect2-dev"], root)
    shutil.rmtree(tree / _REFLECT2)
    shutil.copytree(root / "usr/share/gocode/src/github.com/modern-go/reflect2", tree / _REFLECT2)


def _fetch_go(new: Path, scratch: Path) -> None:
    archive = Archive(scratch)
    name = next(each for each in archive.dependencies("golang-go") if each.startswith("golang-1"))
    archive.unpack([name, f"{name.removesuffix('-go')}-src"], new)


def _build(source: Path, go: Path, program: Path, jobs: int) -> None:
    version = (source / "version").read_text()
    say(f"building the kubelet of {version}: 10 minutes of a processor")
    (root,) = (go / "usr" / "lib").glob("go-*")
    upstream = re.sub(r"^.*\+really|-.*$", "", version)
    stamp = f"{_PACKAGE}/vendor/k8s.io/component-base/version.gitVersion=v{upstream}"
    log = cache() / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [
                *("nice", "-n", "10", root / "bin" / "go", "build", "-trimpath"),
                *("-p", str(jobs), "-tags", _WITHOUT, "-o", program.with_suffix(".new")),
                *("-ldflags", f"-s -w -X {stamp}", f"{_PACKAGE}/cmd/kubelet"),
            ],
            cwd=source,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(cache()),
                "GOROOT": str(root),
                "GOPATH": str(source),
                "GOCACHE": str(cache() / "objects"),
                "GOFLAGS": "",
                "GO111MODULE": "off",
                "CGO_ENABLED": "0",
                "GOMAXPROCS": str(jobs),
            },
        )
    if done.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        for line in lines[-_TAIL_LINES:]:
            say(line)
        raise Absent(f"the kubelet could not be built: all that the compiler said is in {log}")
    program.with_suffix(".new").rename(program)
