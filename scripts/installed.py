"""Installs iserblk on a Debian system, uses it, upgrades it with LUNs in use, and removes it again.

    python3 installed.py [--first-file] [--wheel FILE.whl] [--package FILE.deb]

For a system that is thrown away afterwards: scripts/distros --installed makes bare roots for it,
and carries this file and what it installs into them. It needs root and apt, and no checkout. The
wheel is installed in each way that users have: into a virtual environment, by pipx, by pip for
one user, and by uv. Each way, and the package, goes through these steps:

    install   doctor speaks of no checkout
    first     file that is served, copied to, and compared; a line says how long that and the
              install took. With --first-file the steps up to here, and the last, are all
    export    NBD; nbdinfo, nbdcopy and qemu-img use it. `iserblk copy --verify`, there and back
    mount     with FUSE, if need be after doing what the program says is missing
    upgrade   to a later version, while clients write through NBD and through a mount: the old
              servers go on, with the files of another version
    target    is replaced by one of the later version, under the old servers
    hand-over (root) of a device's connections to a server of the later version
    successor of the NBD server, at the same socket; then of the mount
    remove    while a server runs, which goes on, and ends in order
    left      nothing: files, packages, processes, mounts and users are those of before

The later version is the same one with another number. The kernel's NBD client is not part of it, as
not every machine has one: in the hand-over, qemu-io is in its place (tests/lab/guest has both). A
line for each step says how it ended. Exit status: 0 all steps passed, 1 not.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import filecmp
import hashlib
import os
import pwd
import re
import select
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
SIZE = 32 * MIB  # of a LUN
BLOCK = 256 << 10  # that the witness writes at a time
BLOCKS = 16
READY_S = 300.0  # emulated machines are slow
END_S = 300.0
COMMAND_S = 1800.0  # pip may have to compile
IQN = "iqn.2026-11.example:disk"
USER = "someone"
# What these steps need, and iserblk does not bring. The second line is what the program asks for
# where FUSE is missing.
PACKAGES = ("ca-certificates", "python3-venv", "python3-pip", "pipx", "libnbd-bin", "qemu-utils",
            "fuse3", "gcc", "libc6-dev", "pkg-config", "libfuse3-dev", "python3-dev")  # fmt: skip
WORK = Path("/srv/installed")  # for what these steps themselves make
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Failed(Exception):
    """A step did not do what it has to."""


def check(good: object, said: str) -> None:
    if not good:
        raise Failed(said)


# --- what is run, and as which user ---------------------------------------------------------------


class Account:
    """A user of the system, with an environment of its own and nothing of the caller's, but for
    the settings of the network."""

    def __init__(self, name: str) -> None:
        entry = pwd.getpwnam(name)
        self.name, self.home = name, Path(entry.pw_dir)
        self._ids: dict[str, Any] = {
            "user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": [entry.pw_gid],
        }  # fmt: skip
        self.runtime = Path("/run") if name == "root" else Path(f"/run/user/{entry.pw_uid}")
        places = [f"{self.home}/.local/bin", f"{self.home}/programs", PATH]
        self.environment = {
            **{name: value for name, value in os.environ.items() if _of_network(name)},
            **{"HOME": str(self.home), "USER": name, "LANG": "C.UTF-8", "PATH": ":".join(places)},
            **{"UV_PYTHON_DOWNLOADS": "never", "UV_PYTHON": "/usr/bin/python3"},
            **{
                "UV_NATIVE_TLS": "1",
                "UV_NO_PROGRESS": "1",
                "UV_CACHE_DIR": f"{self.home}/.cache/uv",
            },
        }
        if name != "root":
            self.environment["XDG_RUNTIME_DIR"] = str(self.runtime)

    def own(self, path: Path) -> Path:
        os.chown(path, self._ids["user"], self._ids["group"])
        return path

    def ended(self, *words: object, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in words], input=text, capture_output=True, text=True,
            check=False, cwd="/", env=self.environment, timeout=COMMAND_S,
            **self._ids,
        )  # fmt: skip

    def run(self, *words: object, status: int = 0) -> str:
        """What it prints. Raises Failed."""
        done = self.ended(*words)
        if done.returncode != status:
            line = " ".join(map(str, words))
            raise Failed(f"`{line}` ended with {done.returncode}:\n{done.stdout[-2000:]}"
                         f"{done.stderr[-4000:]}")  # fmt: skip
        return done.stdout

    def start(
        self, words: Sequence[object], log: Path, pipes: bool = False, inherited: Sequence[int] = ()
    ) -> subprocess.Popen[str]:
        """``pipes``: to its standard input, too. What it writes to stderr goes to ``log``."""
        with log.open("a") as stderr:
            return subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=stderr, text=True, cwd="/", env=self.environment,
                pass_fds=inherited, start_new_session=True,
                **self._ids,
            )  # fmt: skip


def _of_network(name: str) -> bool:
    name = name.lower()
    return name.startswith(("pip_", "uv_", "ssl_cert")) or name.endswith("_proxy")


ROOT = Account("root")


class Server:
    """A command of iserblk that says ``ready``, in the foreground."""

    def __init__(self, account: Account, words: Sequence[object], log: Path) -> None:
        self.log = log
        self.process = account.start(words, log)
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], READY_S)[0]:
            self.kill()
            raise Failed(f"{words}: not ready after {READY_S:g} s: {log.read_text()[-2000:]}")
        word, _, self.told = self.process.stdout.readline().strip().partition(" ")
        if word != "ready":
            self.kill()
            raise Failed(f"{words}: {log.read_text()[-2000:]}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Raises Failed unless it ends in order."""
        check(self.alive, f"it has ended by itself: {self.log.read_text()[-2000:]}")
        self.process.terminate()
        status = self.process.wait(END_S)
        said = self.log.read_text()
        check(status in (0, 128 + signal.SIGTERM), f"it ended with {status}: {said[-2000:]}")
        check("Traceback" not in said, f"it had an internal error: {said[-4000:]}")

    def kill(self) -> None:
        if self.alive:
            self.process.kill()
        self.process.wait()


class Witness:
    """An NBD client (qemu-io) on one connection, which keeps in mind what it has written.

    ``patience``: seconds for which it waits for a server where the connection is lost; with 0 any
    loss is an error.
    """

    def __init__(self, account: Account, path: Path, export: str, log: Path, patience: int) -> None:
        words = f"driver=nbd,server.type=unix,server.path={path},export={export}"
        words += f",reconnect-delay={patience}" if patience else ""
        self._process = account.start(["qemu-io", "--image-opts", words], log, pipes=True)
        self._log = log
        self._patterns: dict[int, int] = {}
        self._turn = 0
        self._failed: BaseException | None = None

    def _do(self, command: str) -> None:
        """Raises Failed where it does not say that it has done so many operations."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if " ops; " in line:
                return
            if "ailed" in line or "rror" in line:
                break
        else:
            line = self._log.read_text()[-1000:]
        raise Failed(f"qemu-io: {command}: {line.strip()}")

    def write(self) -> None:
        """One more block, and a flush; an earlier block is read."""
        place = self._turn % BLOCKS
        pattern = self._turn % 251 + 1
        self._turn += 1
        self._do(f"write -f -P {pattern} {place * BLOCK} {BLOCK}")
        self._patterns[place] = pattern
        place = self._turn % BLOCKS
        self._do(f"read -P {self._patterns.get(place, 0)} {place * BLOCK} {BLOCK}")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """It writes all the time meanwhile, and at least once after what the block has done."""
        over = threading.Event()

        def body() -> None:
            try:
                while not over.is_set():
                    self.write()
            except BaseException as error:
                self._failed = error

        thread = threading.Thread(target=body)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(END_S)
        if self._failed is not None:
            raise self._failed
        check(not thread.is_alive(), f"a write is not answered after {END_S:g} s")
        self.write()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("quit\n")
        self._process.stdin.close()
        status = self._process.wait(END_S)
        check(status == 0, f"qemu-io ended with {status}: {self._log.read_text()[-1000:]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def compare(self, lun: Path) -> None:
        """With the file behind the LUN."""
        check(self._patterns, "nothing was written")
        with lun.open("rb") as file:
            for place in range(BLOCKS):
                expected = bytes([self._patterns.get(place, 0)]) * BLOCK
                check(file.read(BLOCK) == expected, f"{lun}: block {place} is not what was written")


# --- the ways to install --------------------------------------------------------------------------


class Way(ABC):
    """A way to install iserblk. ``bin``: the directory of its programs."""

    def __init__(self, name: str, account: Account, folder: Path) -> None:
        self.name, self.account, self.bin = name, account, folder

    @property
    def program(self) -> Path:
        return self.bin / "iserblk"

    @property
    def mount_helper(self) -> Path:
        return self.bin / "mount.iserblk"

    @abstractmethod
    def install(self, file: Path) -> None: ...

    @abstractmethod
    def upgrade(self, file: Path) -> None: ...

    @abstractmethod
    def remove(self) -> None: ...


class Venv(Way):
    """Into a virtual environment of root's, with the units of systemd."""

    def __init__(self) -> None:
        self.place = Path("/opt/iserblk")
        super().__init__("wheel, venv", ROOT, self.place / "bin")
        self._units = self.place / "share" / "iserblk" / "install-units"

    def install(self, file: Path) -> None:
        ROOT.run("python3", "-m", "venv", self.place)
        ROOT.run(self.bin / "pip", "install", file)
        ROOT.run(self._units)
        unit = Path("/etc/systemd/system/iserblk-attach@.service").read_text()
        check(f"={self.program} attach" in unit, "the unit runs another program")

    def upgrade(self, file: Path) -> None:
        ROOT.run(self.bin / "pip", "install", "--upgrade", file)
        ROOT.run(self._units)

    def remove(self) -> None:
        ROOT.run(self._units, "--remove")
        shutil.rmtree(self.place)


class Pipx(Way):
    def __init__(self, account: Account) -> None:
        super().__init__("wheel, pipx", account, account.home / ".local" / "bin")

    def install(self, file: Path) -> None:
        self.account.run("pipx", "install", file)

    def upgrade(self, file: Path) -> None:
        self.account.run("pipx", "install", "--force", file)

    def remove(self) -> None:
        self.account.run("pipx", "uninstall", "iserblk")


class PipUser(Way):
    """With ``pip install --user``, against which Debian's pip warns."""

    PIP = ("python3", "-m", "pip")
    ANYWAY = "--break-system-packages"

    def __init__(self, account: Account) -> None:
        super().__init__("wheel, pip --user", account, account.home / ".local" / "bin")

    def install(self, file: Path) -> None:
        self.account.run(*self.PIP, "install", "--user", self.ANYWAY, file)

    def upgrade(self, file: Path) -> None:
        self.account.run(*self.PIP, "install", "--user", self.ANYWAY, "--upgrade", file)

    def remove(self) -> None:
        listed = self.account.run(*self.PIP, "list", "--user", "--format=freeze").split()
        names = [line.partition("==")[0] for line in listed]
        self.account.run(*self.PIP, "uninstall", "--yes", self.ANYWAY, *names)


class Uv(Way):
    def __init__(self, account: Account) -> None:
        super().__init__("wheel, uv", account, account.home / ".local" / "bin")

    def install(self, file: Path) -> None:
        self.account.run("uv", "tool", "install", file)

    def upgrade(self, file: Path) -> None:
        self.account.run("uv", "tool", "install", "--force", file)

    def remove(self) -> None:
        self.account.run("uv", "tool", "uninstall", "iserblk")


class Debian(Way):
    def __init__(self) -> None:
        super().__init__("package", ROOT, Path("/usr/bin"))

    @property
    def mount_helper(self) -> Path:
        return Path("/sbin/mount.iserblk")

    def install(self, file: Path) -> None:
        apt("install", str(file))

    def upgrade(self, file: Path) -> None:
        apt("install", str(file))

    def remove(self) -> None:
        apt("purge", "iserblk")
        apt("autoremove", "--purge")


def apt(*words: str) -> None:
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    done = subprocess.run(
        ["apt-get", "-qq", "-y", "-o", "Dpkg::Use-Pty=0", *words, "--no-install-recommends"],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"apt-get {' '.join(words)}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


# --- a later version ------------------------------------------------------------------------------


def later_wheel(file: Path, folder: Path) -> tuple[Path, str]:
    """The same wheel with a later version number, which is the second result."""
    name, old, rest = file.name.split("-", 2)
    new = f"{old}.post1"
    made = folder / f"{name}-{new}-{rest}"
    records = []
    with (
        zipfile.ZipFile(file) as source,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for item in source.infolist():
            data = source.read(item)
            top, slash, below = item.filename.partition("/")
            if top.startswith(f"{name}-{old}."):
                item.filename = f"{name}-{new}.{top.removeprefix(f'{name}-{old}.')}{slash}{below}"
            if item.filename.endswith(".dist-info/RECORD"):
                record = item
                continue
            if item.filename.endswith(".dist-info/METADATA"):
                data = data.replace(
                    f"\nVersion: {old}\n".encode(), f"\nVersion: {new}\n".encode(), 1
                )
            elif item.filename == "iserblk/__init__.py":
                data = with_version(data.decode(), new).encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            records.append(f"{item.filename},sha256={digest},{len(data)}\n")
            target.writestr(item, data)
        target.writestr(record, "".join(records) + f"{record.filename},,\n")
    made.chmod(0o644)
    return made, new


def later_package(file: Path, folder: Path) -> tuple[Path, str]:
    """The same package with a later version; the second result is that of the program."""
    tree = folder / "package"
    ROOT.run("dpkg-deb", "--raw-extract", file, tree)
    control = tree / "DEBIAN" / "control"
    control.write_text(re.sub(r"(?m)^(Version: .*)$", r"\1+later", control.read_text()))
    (module,) = tree.rglob("iserblk/__init__.py")
    old = re.findall(r'(?m)^__version__ = "(.*)"$', module.read_text())[0]
    new = f"{old}.post1"
    module.write_text(with_version(module.read_text(), new))
    sums = tree / "DEBIAN" / "md5sums"
    name = module.relative_to(tree).as_posix()
    digest = hashlib.md5(module.read_bytes(), usedforsecurity=False).hexdigest()
    sums.write_text(re.sub(rf"(?m)^\w+(?=  {re.escape(name)}$)", digest, sums.read_text()))
    made = folder / "later.deb"
    ROOT.run("dpkg-deb", "--root-owner-group", "--build", tree, made)
    shutil.rmtree(tree)
    return made, new


def with_version(text: str, version: str) -> str:
    changed, count = re.subn(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', text)
    check(count == 1, "iserblk/__init__.py has no version")
    return changed


# --- what is there before and after ---------------------------------------------------------------

# What apt, dpkg, pip, pipx and uv keep for themselves, whatever they install; and what is these
# steps' own.
KEPT = re.compile(
    rf"/(proc|sys|dev)/|{WORK}/|/var/(cache|log|backups)/"
    r"|/var/lib/(apt|dpkg|systemd|pam|ucf|python)/"
    r"|/var/lock$|/etc/ld\.so\.cache|/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$|.*/\.cache/"
    r"|.*/\.local/(share/)?pipx/(shared|logs|\.cache|py)|.*/\.local/state/|.*/\.local/share/uv/"
    r"|.*/__pycache__/"
)


class Snapshot:
    """The system at one moment."""

    def __init__(self) -> None:
        self.files = dict(_files())
        self.packages = set(
            ROOT.run("dpkg-query", "-W", "-f", "${Package} ${Status}\n").splitlines()
        )
        self.users = {
            line
            for name in ("passwd", "group")
            for line in Path("/etc", name).read_text().split("\n")
        }
        self.mounts = {
            line.split(" ", 2)[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()
        }
        self.processes = dict(_processes())

    def changes(self, later: Snapshot) -> list[str]:
        """What is not as it was, in words."""
        said = [f"file {name}" for name in later.files.keys() - self.files.keys()]
        said += [f"file {name} is gone" for name in self.files.keys() - later.files.keys()]
        said += [f"file {name} has changed" for name in self.files.keys() & later.files.keys()
                 if self.files[name] != later.files[name]]  # fmt: skip
        for what in ("packages", "users", "mounts"):
            old, new = getattr(self, what), getattr(later, what)
            said += [f"{what}: {each}" for each in new - old]
            said += [f"{what}: gone: {each}" for each in old - new]
        said += [f"process {line}" for pid, line in later.processes.items()
                 if pid not in self.processes]  # fmt: skip
        return sorted(said)


def _files() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Files, each with what tells a change; and directories that have the project's name, but for
    those in /run, which are there until the machine stops."""
    for folder, folders, names in os.walk("/"):
        folders[:] = [name for name in folders if not KEPT.match(f"{os.path.join(folder, name)}/")]
        named = [name for name in folders if "iserblk" in name and not folder.startswith("/run")]
        for path in (os.path.join(folder, name) for name in [*names, *named]):
            if not KEPT.match(path):
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(path)
                    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
                    yield path, (found.st_mode, found.st_uid, found.st_gid, size)


def _processes() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if line:  # else it is a thread of the kernel, or has ended
                yield int(folder.name), line


# --- the steps ------------------------------------------------------------------------------------


class Report:
    """What has passed, and what not."""

    def __init__(self) -> None:
        self.good = True
        self._name = ""

    def begin(self, name: str) -> None:
        self._name = f"{name}: "

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Raises Failed, after a line that says so."""
        start = time.monotonic()
        try:
            yield
        except Exception as error:
            self.good = False
            what = str(error) if isinstance(error, Failed) else traceback.format_exc()
            say(f"{self._name}{name}: FAILED, {time.monotonic() - start:.0f} s: {what}")
            raise Failed(name) from None
        say(f"{self._name}{name}: passed, {time.monotonic() - start:.0f} s")

    def say(self, line: str) -> None:
        say(f"{self._name}{line}")


def say(line: str) -> None:
    print(f"installed: {line}", flush=True)


class Steps:
    """The steps of one way. ``later``: what is upgraded to, and its version; None: only those up to
    the first copied file."""

    def __init__(
        self, way: Way, file: Path, later: tuple[Path, str] | None, report: Report
    ) -> None:
        self._way, self._file, self._report = way, file, report
        self._later, self._new = later or (file, "")
        self._all = later is not None
        self._account = way.account
        self._folder = WORK / "steps"
        self._source = self._folder / "source"
        self._stack = contextlib.ExitStack()

    def run(self) -> None:
        """Raises Failed; what was started is ended then, and what was installed is removed."""
        shutil.rmtree(self._folder, ignore_errors=True)  # of a way that has failed
        self._folder.mkdir(parents=True, exist_ok=True)
        self._account.own(self._folder)
        self._source.write_bytes(os.urandom(SIZE // 2) + bytes(SIZE // 2))
        self._account.own(self._source)
        before = Snapshot()
        step = self._report.step
        installed = True
        try:
            start = time.monotonic()
            with step("install"):
                self._way.install(self._file)
                installing = time.monotonic() - start
                self._looks()
            start = time.monotonic()
            with step("first file"), self._stack:
                self._first()
            taken = installing + time.monotonic() - start
            self._report.say(f"to the first file, copied and compared: {taken:.0f} s")
            if self._all:
                with step("export, copy"), self._stack:
                    self._export()
                with step("mount"), self._stack:
                    self._mount()
                with self._stack:
                    self._use()
            with step("remove in use" if self._all else "remove"), self._stack:
                self._remove() if self._all else self._way.remove()
                installed = False
        finally:
            if installed:
                with contextlib.suppress(Exception):
                    self._way.remove()
        with step("nothing is left"):
            left = before.changes(Snapshot())
            check(not left, f"{len(left)} things are not as before:\n  " + "\n  ".join(left[:40]))

    def _looks(self) -> None:
        said = self._account.ended(self._way.program, "doctor").stdout
        check(re.search("data path +.*compiled", said), f"doctor: {said}")
        check("scripts/" not in said, f"doctor speaks of a checkout: {said}")

    def _version(self) -> str:
        return self._account.run(self._way.program, "--version").split()[-1]

    def _server(self, *words: object, name: str) -> Server:
        log = self._folder / f"{name}.log"
        log.write_text("")
        server = Server(self._account, [self._way.program, *words], log)
        self._stack.callback(server.kill)
        return server

    def _target(self, count: int, listen: str = "127.0.0.1:0") -> Server:
        luns = [word for number in range(count)
                for word in ("--lun", f"{self._lun(number)}:size={SIZE}")]  # fmt: skip
        return self._server("target", "--iqn", IQN, "--listen", listen, *luns, name="target")

    def _lun(self, number: int) -> Path:
        return self._folder / f"lun{number}"

    def _first(self) -> None:
        """What README.md begins with."""
        disk, run = self._lun(0), self._account.run
        pidfile = self._folder / "pid"
        self._stack.callback(disk.unlink)
        words = ("serve", disk, "--size", SIZE, "--listen", "127.0.0.1:0")
        url = run(self._way.program, *words, "--background", "--pidfile", pidfile).strip()
        self._stack.callback(_terminated, int(pidfile.read_text()))
        run(self._way.program, "copy", self._source, url)
        run(self._way.program, "compare", self._source, url)

    def _export(self) -> None:
        run, source, back = self._account.run, self._source, self._folder / "back"
        target = self._target(1)
        url = f"{target.told}/0"
        nbd = self._server("nbd", url, "--socket", self._folder / "nbd", name="nbd")
        check(run("nbdinfo", "--size", nbd.told).strip() == str(SIZE), "nbdinfo: another size")
        run("nbdcopy", "--flush", source, nbd.told)
        same(source, self._lun(0))
        run("qemu-img", "compare", "-f", "raw", "-F", "raw", source, nbd.told)
        run("nbdcopy", nbd.told, back)
        same(source, back)
        nbd.stop()
        run(self._way.program, "trim", "--all", url)
        back.unlink()
        run(self._way.program, "copy", source, url, "--verify")
        run(self._way.program, "copy", url, back, "--verify")
        same(source, back)
        target.stop()
        for each in (back, self._lun(0)):
            each.unlink()

    def _mounted(self, url: str, place: Path) -> None:
        """Mount; first do what the program says, if something is missing."""
        place.mkdir(exist_ok=True)
        self._account.own(place)
        words = [self._way.program, "mount", url, place]
        done = self._account.ended(*words)
        remedy = re.search(r"\brun (.*)", done.stderr)
        if done.returncode and remedy:
            say(f"  as the program says: {remedy[1]}")
            self._account.run(*shlex.split(remedy[1]))
            done = self._account.ended(*words)
        check(done.returncode == 0, f"mount: {done.stderr}")
        self._stack.callback(ROOT.ended, "umount", "-l", place)

    def _mount(self) -> None:
        place = self._folder / "luns"
        target = self._target(1)
        self._mounted(f"{target.told}/0", place)
        run = self._account.run
        run("dd", f"if={self._source}", f"of={place}/lun0", "bs=1M", "conv=fsync,notrunc")
        run("cmp", self._source, place / "lun0")
        run(self._way.program, "umount", place)
        same(self._source, self._lun(0))
        run(self._way.mount_helper, f"{target.told}/0", place)
        run("cmp", self._source, place / "lun0")
        run(self._way.program, "umount", place)
        target.stop()
        self._lun(0).unlink()

    def _use(self) -> None:
        """The upgrade, and what comes after it. LUN 0 is the witness's, by NBD; LUN 1 is copied to,
        by NBD; LUN 2 is mounted; LUN 3 is that of a device."""
        account, program, step = self._account, self._way.program, self._report.step
        path, place = self._folder / "nbd", self._folder / "luns"
        metrics = self._folder / "metrics"
        with step("LUNs in use"):
            old = self._version()
            target = self._target(4)
            words = ("nbd", target.told, "--socket", path, "--metrics", metrics)
            nbd = self._server(*words, name="nbd-old")
            self._mounted(f"{target.told}/2", place)
            witness = self._witness(path, "lun0", patience=300)
            log = self._folder / "nbdcopy.log"
            copying = account.start(
                ["nbdcopy", "--flush", "-", f"nbd+unix:///lun1?socket={path}"], log, pipes=True
            )
            self._stack.callback(copying.kill)
            data = self._source.read_bytes()
            assert copying.stdin is not None
            feed = os.fdopen(os.dup(copying.stdin.fileno()), "wb")
            self._stack.callback(feed.close)
            copying.stdin.close()
            feed.write(data[: SIZE // 4])
            feed.flush()
            device = None
            if account is ROOT:
                line = Path(f"/proc/{target.process.pid}/cmdline").read_text()
                python = line.partition("\0")[0]
                device = Device(f"{target.told}/3", python, self._folder, self._stack)
            account.run(program, "stats")  # all processes have loaded the modules of that
        with step("upgrade in use"):
            with witness.writing():
                self._way.upgrade(self._later)
            check(self._version() == self._new, f"{self._version()}, and not {self._new}")
            # Old servers, new files.
            check(target.alive and nbd.alive, "a server has ended with the upgrade")
            feed.write(data[SIZE // 4 :])
            feed.close()
            check(copying.wait(END_S) == 0, log.read_text()[-2000:])
            check(served_version(metrics) == old, "the metrics are not those of the old server")
            account.run(program, "stats", metrics, "--json")
            self._write_file(place / "lun2", 0, 8)
        with step("target replaced"):
            with witness.writing():
                target.stop()
                address = target.told.removeprefix("iser://").partition("/")[0]
                target = self._target(4, address)
            self._write_file(place / "lun2", 8, SIZE // MIB - 8)
        if device is not None:
            with step("hand-over"):
                device.hand_over()
        with step("successors"):
            with witness.writing():
                nbd.stop()
                nbd = self._server(*words, name="nbd-new")
            check(served_version(metrics) == self._new, "the metrics are those of an old server")
            account.run(program, "umount", place)
            self._mounted(f"{target.told}/2", place)
            account.run("cmp", self._source, place / "lun2")
            account.run(program, "umount", place)
            witness.end()
            nbd.stop()
            target.stop()
        with step("verify"):
            witness.compare(self._lun(0))
            same(self._source, self._lun(1))
            same(self._source, self._lun(2))
            if device is not None:
                device.witness.compare(self._lun(3))
            for number in range(4):
                self._lun(number).unlink()

    def _write_file(self, file: Path, first: int, count: int) -> None:
        """A part of the source, in MiB, to the mounted LUN."""
        self._account.run(
            "dd", f"if={self._source}", f"of={file}", "bs=1M", "conv=fsync,notrunc",
            f"skip={first}", f"seek={first}", f"count={count}",
        )  # fmt: skip

    def _witness(self, path: Path, export: str, patience: int) -> Witness:
        log = self._folder / "qemu-io.log"
        witness = Witness(self._account, path, export, log, patience)
        self._stack.callback(witness.kill)
        return witness

    def _remove(self) -> None:
        path, metrics = self._folder / "nbd", self._folder / "metrics"
        target = self._target(1)
        words = ("nbd", f"{target.told}/0", "--socket", path, "--metrics", metrics)
        nbd = self._server(*words, name="nbd")
        witness = self._witness(path, "", patience=0)
        # What serves them is loaded some time after the start; it must be there until then.
        check(served_version(metrics) == self._new, "the metrics are not those of the server")
        self._account.run(self._way.program, "stats")  # so must the target's
        with witness.writing():
            self._way.remove()
        check(not self._way.program.exists(), f"{self._way.program} is still there")
        check(served_version(metrics) == self._new, "the metrics are not those of the server")
        self._account.run("nbdinfo", "--size", nbd.told)
        witness.end()
        nbd.stop()
        target.stop()
        witness.compare(self._lun(0))


class Device:
    """The server of a device as `iserblk attach` starts it, and its successor as `attach --replace`
    does; qemu-io is in the place of the kernel. ``python``: what runs iserblk."""

    def __init__(self, url: str, python: str, folder: Path, stack: contextlib.ExitStack) -> None:
        self._words = [f"uri={url}", "metrics=off"]
        self._python, self._stack = python, stack
        self._log = folder / "serving.log"
        self._home = Path("/run/iserblk/nbd0")
        check(not self._home.exists(), f"{self._home} is in use")
        self._home.mkdir(mode=0o700, parents=True)
        stack.callback(shutil.rmtree, self._home)
        self._server = self._started("listen")
        self.witness = Witness(ROOT, self._home / "socket", "", folder / "device.log", 0)
        stack.callback(self.witness.kill)
        self.witness.write()

    def _started(self, how: str) -> subprocess.Popen[str]:
        read_end, write_end = os.pipe()
        words = [self._python, "-P", "-m", "iserblk.nbd.kernel.serving"]
        words += [f"{self._home}/socket", str(write_end), how, *self._words]
        with os.fdopen(read_end, "rb") as pipe:
            try:
                process = ROOT.start(words, self._log, inherited=[write_end])
            finally:
                os.close(write_end)
            self._stack.callback(process.kill)
            said = pipe.read(len(b"ready"))
        check(said == b"ready", f"serving {how}: {said.decode()}: {self._log.read_text()[-2000:]}")
        return process

    def hand_over(self) -> None:
        """To a server of the version that is installed now; then both are ended."""
        check(self._server.poll() is None, "the server of the device has ended")
        with self.witness.writing():
            successor = self._started("take")
            status = self._server.wait(END_S)
            check(status == 0, f"the old server of the device ended with {status}")
        self.witness.end()
        status = successor.wait(END_S)
        check(status == 0, f"the successor ended with {status}")


def _terminated(pid: int) -> None:
    """End a process that is no child of this one, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            check(select.select([handle], [], [], END_S)[0], f"process {pid} does not end")
        finally:
            os.close(handle)


def same(one: Path, two: Path) -> None:
    check(filecmp.cmp(one, two, shallow=False), f"{one} and {two} differ")


def served_version(path: Path) -> str:
    """The version of the server whose metrics are at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(END_S)
        sock.connect(str(path))
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with sock.makefile("rb") as file:
            said = file.read().decode()
    found = re.search(r'^iserblk_process_info\{.*version="([^"]*)"', said, re.MULTILINE)
    if found is None:
        raise Failed(f"no metrics at {path}: {said[:500]}")
    return found[1]


# --- all of it ------------------------------------------------------------------------------------


def prepared(package: Path | None) -> Account:
    """Install what the steps need, and make the user for them."""
    apt("update")
    apt("install", *PACKAGES)
    apt("autoremove", "--purge")  # what was left before is not left by iserblk
    if package is not None:
        leave_traces(package)
    try:
        pwd.getpwnam(USER)
    except KeyError:
        ROOT.run("useradd", "--create-home", "--shell", "/bin/bash", USER)
    account = Account(USER)
    account.runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    account.own(account.runtime)
    if not (account.home / "uv" / "bin" / "uv").exists():
        account.run("python3", "-m", "venv", account.home / "uv")
        account.run(account.home / "uv" / "bin" / "pip", "install", "--only-binary", ":all:", "uv")
    # Alone: beside it is the python3 of its environment, which is not to come first in PATH.
    link = account.home / "programs" / "uv"
    if not link.is_symlink():
        link.parent.mkdir()
        link.symlink_to(account.home / "uv" / "bin" / "uv")
    return account


def leave_traces(package: Path) -> None:
    """Install what the package depends on, and purge that again: users and files that systemd, for
    one, leaves behind are there before the package is, then."""
    before = installed_packages()
    apt("satisfy", ROOT.run("dpkg-deb", "--field", package, "Depends").strip())
    apt("purge", *sorted(installed_packages() - before))


def installed_packages() -> set[str]:
    said = ROOT.run("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n")
    return {name for state, _, name in (line.partition(" ") for line in said.splitlines())
            if state == "installed"}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--package", type=Path)
    parser.add_argument("--first-file", action="store_true")
    given = parser.parse_args(arguments)
    if given.wheel is None and given.package is None:
        parser.error("give --wheel FILE.whl, --package FILE.deb, or both")
    if os.geteuid() != 0:
        parser.error("run it as root, on a system that is thrown away afterwards")
    if not Path("/dev/fuse").exists():
        parser.error("there is no /dev/fuse: run modprobe fuse")
    if shutil.which("iserblk") or Path("/opt/iserblk").exists():
        parser.error("iserblk is installed here: use a system without it")
    WORK.mkdir(mode=0o755, parents=True, exist_ok=True)
    report = Report()
    try:
        with report.step("prepared"):
            user = prepared(given.package and given.package.resolve())
        whole = not given.first_file
        ways: list[tuple[Way, Path, tuple[Path, str] | None]] = []
        if given.wheel is not None:
            wheel = given.wheel.resolve()
            later = later_wheel(wheel, WORK) if whole else None
            ways += [(way, wheel, later) for way in (Venv(), Pipx(user), PipUser(user), Uv(user))]
        if given.package is not None:
            package = given.package.resolve()
            ways.append((Debian(), package, later_package(package, WORK) if whole else None))
        for way, file, later in ways:
            report.begin(way.name)
            with contextlib.suppress(Failed):
                Steps(way, file, later, report).run()
    except Failed:
        pass
    finally:
        shutil.rmtree(WORK)
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
