"""systemd as the first process of namespaces of its own, with our units as Debian's package has
them: nothing of it reaches this machine, which may have another first process.

Inside, /etc, /usr, /home, /root, /run and /var/lib are as here, or empty, and what is written there
vanishes; /usr/bin/iserblk runs this checkout. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.programs import SLOW_S
from tests.support.target import ROOT
from tests.support.until import until_blocking

SYSTEMD = Path("/lib/systemd/systemd")
USER = "alice"  # of the machine, with a home directory and a process
UID = 61234
_UNITS = "/run/units"
_LOG = "/run/log-of-services"
# Other units are not looked for; these are what units of services need by default.
_TARGETS = ("basic", "default", "remote-fs", "shutdown", "sysinit", "umount")
_NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--cgroup")
# $1: this checkout, $2: a directory for what is written, $3: a new group of processes, $4: a file
# for what the manager says, $5: what to run inside, $6: own or not, the network.
_OUTSIDE = """
mount --make-rprivate /
# A copy of what other tests have mounted would keep it in use when they unmount it.
while read -r _ _ _ _ place _; do
  case $1/ in "$place"/*) continue ;; esac
  case $place in /tmp/* | /var/tmp/* | /run/* | /mnt/*) echo "$place" ;; esac
done </proc/self/mountinfo | sort -r | while read -r place; do umount --lazy "$place"; done
mkdir "$2/groups"
mount -t cgroup2 none "$2/groups"
mkdir "$2/groups/$3"
echo $$ >"$2/groups/$3/cgroup.procs"
"""
_INSIDE = f"""
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 none "$2"
for place in etc usr; do
  mkdir -p "$2/$place/upper" "$2/$place/work"
done
mkdir "$2/run" "$2/usr/upper/lib" "$2/usr/upper/lib/checkout"
mkdir "$2/checkout"
mount --rbind "$1" "$2/checkout"
for place in etc usr; do
  mount -t overlay none /$place \\
    -o "lowerdir=/$place,upperdir=$2/$place/upper,workdir=$2/$place/work"
done
mount --rbind "$2/checkout" /usr/lib/checkout
for place in home root var/lib run; do
  mount -t tmpfs -o mode=755 none /$place
done
if [ "$6" = own ]; then # a network
  mount -t sysfs none /sys
  ip link set lo up
else
  umount --recursive --quiet /sys/fs/cgroup || true
fi
mount -t cgroup2 none /sys/fs/cgroup
printf '#!/bin/sh\\nexec %s -P -m iserblk.cli "$@"\\n' /usr/lib/checkout/.venv/bin/python \\
  >/usr/bin/iserblk
chmod 755 /usr/bin/iserblk
mkdir -p {_UNITS} /run/lock /run/none /var/lib/private
for target in {" ".join(_TARGETS)}; do
  printf '[Unit]\\nDescription=%s\\nDefaultDependencies=no\\n' $target >{_UNITS}/$target.target
done
mount --make-rshared / # as containers have it: a helper's mount of credentials comes to its unit
mount --bind "$4" /dev/console # where the first process tells what it does
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=tests SYSTEMD_PROC_CMDLINE= \\
  SYSTEMD_UNIT_PATH={_UNITS} SYSTEMD_GENERATOR_PATH=/run/none \\
  SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/run/none \\
  {SYSTEMD} --log-target=console --log-color=no --show-status=no
"""


class Manager:
    """A systemd that runs. Paths in the methods are as it sees them."""

    def __init__(self, directory: Path, environment: Mapping[str, str], network: bool) -> None:
        """``environment``: of all services, beside what their units give them. ``network``: it has
        a network of its own, which leads nowhere."""
        self._group = f"iserblk-tests-{os.getpid()}-{directory.name}"
        self._log = directory / "manager"
        self._directory = directory
        place = directory / "inside"
        place.mkdir()
        inside = f"set -eu\n{_INSIDE}"
        namespaces = (*_NAMESPACES, "--net") if network else _NAMESPACES
        words = ["sh", "-euc", f'{_OUTSIDE}exec unshare {" ".join(namespaces)} sh -c "$5" sh "$@"']
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", *words, "sh", ROOT, place, self._group, self._log, inside,
                 "own" if network else "not"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._first = 0
        try:
            until_blocking(lambda: self._ended() or self._running())
            if self._ended():
                pytest.skip(f"requires namespaces for a systemd: {self._log.read_text().strip()}")
            self._set_up(environment)
        except BaseException:
            self.end()
            raise

    def path(self, place: str) -> Path:
        """A place inside, from here."""
        return Path(f"/proc/{self._first}/root{place}")

    def run(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program inside, as root and outside of all units."""
        done = subprocess.run(
            ["nsenter", f"--target={self._first}", "--mount", "--pid", "--uts", "--ipc", "--net",
             "--cgroup", "--wd=/", *map(str, words)],
            capture_output=True, text=True, check=False, timeout=SLOW_S,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{done}\n{self.said()}"
        return done

    def start(self, unit: str) -> None:
        """Start a unit; it is ready then, or has ended in order."""
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "start", unit)

    def stop(self, unit: str) -> None:
        """Stop a unit. It must have ended as its file allows."""
        self.run("systemctl", "stop", unit)
        result = self.run("systemctl", "show", "--property=Result", "--value", unit).stdout.strip()
        assert result == "success", f"{unit}: {result}\n{self.said()}"

    def drop_in(self, unit: str, *lines: str) -> None:
        """Lines of [Service] for one unit or instance."""
        place = self.path(f"{_UNITS}/{unit}.d")
        place.mkdir(exist_ok=True)
        (place / "tests.conf").write_text("\n".join(("[Service]", *lines, "")))

    def said(self) -> str:
        """What the manager and the services have said."""
        log = self.path(_LOG)
        return self._log.read_text() + (log.read_text() if log.exists() else "")

    def end(self) -> None:
        """Kill all that runs inside."""
        if self._first and not self._ended():
            os.kill(self._first, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        script = 'mount -t cgroup2 none "$1/groups"; find "$1/groups/$2" -depth -type d -delete'
        subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", self._directory / "inside",
             self._group],
            check=False,
        )  # fmt: skip

    # --- how it comes to be ----------------------------------------------------------------

    def _set_up(self, environment: Mapping[str, str]) -> None:
        units = self.path(_UNITS)
        subprocess.run([ROOT / "debian" / "units", ROOT / "scripts" / "systemd", units], check=True)
        assignments = [f"Environment={name}={value}" for name, value in environment.items()]
        output = (f"StandardOutput=append:{_LOG}", f"StandardError=append:{_LOG}")
        self.drop_in("service", *output, *assignments)
        with self.path("/etc/passwd").open("a") as file:
            file.write(f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/sh\n")
            file.write(f"iserblk:x:{UID + 1}:{UID + 1}::/var/lib/iserblk:/usr/sbin/nologin\n")
        with self.path("/etc/group").open("a") as file:
            file.write(f"{USER}:x:{UID}:\niserblk:x:{UID + 1}:\n")
        self.path("/etc/iserblk").mkdir(exist_ok=True)
        self.path(f"/home/{USER}").mkdir(mode=0o755)
        self.run("chown", f"{UID}:{UID}", f"/home/{USER}")
        self.run("systemctl", "daemon-reload")

    def _running(self) -> bool:
        """Whether the manager takes orders."""
        own = self._process.pid
        for child in Path(f"/proc/{own}/task/{own}/children").read_text().split():
            try:
                if Path(f"/proc/{child}/comm").read_text() == "systemd\n":
                    self._first = int(child)
                    return self.path("/run/systemd/private").exists()
            except OSError:  # a program of the script has ended meanwhile
                continue
        return False

    def _ended(self) -> bool:
        return self._process.poll() is not None


@contextmanager
def running_manager(
    directory: Path, environment: Mapping[str, str], *, network: bool = True
) -> Iterator[Manager]:
    """A Manager. Skips the test where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("requires root, for a systemd in namespaces")
    for program in (SYSTEMD, "unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"requires {program}: run scripts/setup --tests")
    manager = Manager(directory, environment, network)
    try:
        yield manager
    finally:
        manager.end()
