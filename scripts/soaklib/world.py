"""All processes of a soak, and what is done to them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchlib.proc import free_port

from soaklib import plan
from soaklib.area import BLOCK, Area, Ledger
from soaklib.client import Order
from soaklib.latencies import Latencies
from soaklib.plan import Event
from soaklib.processes import START_S, Broken, ClientProcess, Command
from soaklib.relay import Relay
from soaklib.sampling import Sample, sample
from soaklib.tried import Replays, Tried, ask, replays

SIZE = 64 << 20  # of a LUN, at first
_CACHE = "16M"  # of the target, volatile: SIGKILL loses it, as a power failure does
_BLOCKS = 256  # of an area
_FIRST_VISITOR = 24  # number of its area
IO_TIMEOUT_S = 120.0
END_S = 240.0
_SAMPLE_S = 5.0
_LOOK_S = 0.25
_TERMINATED = 128 + signal.SIGTERM
_LEFT_ALONE = (0, _TERMINATED)
IQN = "iqn.2026-11.example.soak:"


@dataclass
class Record:
    """What is known of a run. ``minutes``: of each client, by number of the minute."""

    findings: list[str] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    minutes: dict[str, dict[int, Latencies]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Latencies))
    )
    happened: list[tuple[float, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tried: Tried = field(default_factory=Tried)
    replays: dict[str, Replays] = field(default_factory=dict)  # by initiator
    compared: int = 0  # blocks, at the end, in the files of the LUNs


def why_no_mount() -> str:
    """Why a mount cannot be made here; "" where it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no mount: /dev/fuse cannot be opened here (modprobe fuse; in a container, pass it)"
    if os.geteuid() and shutil.which("fusermount3") is None:
        return "no mount: fusermount3 is not installed (package fuse3), and this is not root"
    return ""


class World:
    def __init__(self, directory: Path, seed: int, say: Callable[[str], None]) -> None:
        self.record = Record()
        self._directory = directory
        self._seed = seed
        self._say = say
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._commands: dict[str, Command] = {}  # in the order in which they have to be started
        self._clients: dict[str, ClientProcess] = {}
        self._visitors: dict[str, tuple[ClientProcess, bool]] = {}
        self._orders: dict[str, Order] = {}
        self._luns: dict[str, int] = {}  # client → number of its LUN
        self._sizes: dict[str, int] = {}  # client → size of it, as the client says
        ports = [free_port() for _ in range(2)]
        self._listen = [f"127.0.0.1:{port}" for port in ports]
        self._relays = [Relay(port) for port in ports]
        self._ready: set[str] = set()  # clients that have begun
        self._metrics: dict[str, Path] = {}  # initiator → where it serves them
        self._mountpoint = directory / "mnt"
        self._socket = directory / "nbd.sock"
        self._sampler = threading.Thread(target=self._sample_all, daemon=True)
        why = why_no_mount()
        self._mounts = not why
        if why:
            self.record.left_out.append(why)
        self.record.left_out.append(
            "no device, and so no hand-over to a successor of its server: that needs root and the"
            " kernel's nbd (scripts/test tries it in a virtual machine)"
        )

    # --- what there is -----------------------------------------------------------------------

    @property
    def restarts(self) -> Sequence[tuple[str, str]]:
        """A server of NBD that is killed may lose what its clients have not flushed, and nobody
        is left who could tell them."""
        both = [(what, whom) for what in ("kill", "term") for whom in ("target", "gateway")]
        return [*both, ("term", "nbd")]

    @property
    def visitors(self) -> Sequence[str]:
        return ["api", "nbd", *(["file"] if self._mounts else [])]

    def now(self) -> float:
        return time.monotonic() - self._began

    def lun(self, number: int) -> Path:
        return self._directory / f"lun{number}"

    def urls(self, number: int, scheme: str, options: str = "") -> list[str]:
        ports = [relay.port for relay in self._relays]
        return [f"{scheme}://127.0.0.1:{port}/{IQN}target/{number}{options}" for port in ports]

    def start(self) -> None:
        """Raises Broken."""
        for number in range(3):
            with self.lun(number).open("wb") as file:
                file.truncate(SIZE)
        listen = [word for place in self._listen for word in ("--listen", place)]
        luns = [f"{self.lun(number)}:volatile-cache={_CACHE}" for number in range(3)]
        luns = [word for lun in luns for word in ("--lun", lun)]
        timeout = f"{IO_TIMEOUT_S:g}"
        self._command("target", ["target", "--iqn", f"{IQN}target", *listen, *luns], _LEFT_ALONE)
        words = ["--io-timeout", timeout, "--connections", "2"]
        words += ["--metrics", self._serves("nbd", "m.nbd")]
        self._command(
            "nbd", ["nbd", *self.urls(0, "iser"), "--socket", str(self._socket), *words],
            _LEFT_ALONE,
        )  # fmt: skip
        options = f"?io-timeout={timeout}&metrics={quote(self._serves('gateway', 'm.gateway'))}"
        behind = " ".join(self.urls(2, "iser", options))
        place = f"127.0.0.1:{free_port()}"
        words = ["--iqn", f"{IQN}gateway", "--listen", place, "--lun", behind]
        self._command("gateway", ["target", *words], _LEFT_ALONE)
        if self._mounts:
            self._mountpoint.mkdir(exist_ok=True)
            options = f"io-timeout={timeout},connections=2,error-recovery-level=2"
            options += f",metrics={self._serves('mount', 'm.mount')}"
            urls = self.urls(1, "iscsi")
            self._command(
                "mount", ["mount", "-f", *urls, str(self._mountpoint), "-o", options], (0,)
            )
            self._client("file", "file", [self._file()], 1, 2)
        self._client("nbd", "nbd", [str(self._socket)], 0, 4, connections=3)
        self._client("blocking", "blocking", self.urls(2, "iscsi"), 2, 2)
        self._client("trio", "trio", self.urls(2, "iser"), 2, 3)
        self._client("gateway", "blocking", [f"iser://{place}/{IQN}gateway/0"], 2, 2)
        self._sampler.start()
        until = self.now() + START_S
        while not self._clients.keys() <= self._ready:
            if self.now() > until:
                late = ", ".join(sorted(self._clients.keys() - self._ready))
                raise Broken(f"{late}: not at work {START_S:.0f} s after the start")
            self.wait(self.now() + _LOOK_S)
        self._began = time.monotonic()  # the plan begins here

    def _serves(self, name: str, short: str) -> str:
        self._metrics[name] = self._directory / short
        return str(self._metrics[name])

    def _file(self) -> str:
        (name,) = os.listdir(self._mountpoint)
        return str(self._mountpoint / name)

    def _command(self, name: str, words: list[str], statuses: Sequence[int]) -> None:
        log = self._directory / f"{name}.log"
        self._commands[name] = Command(name, words, log, statuses)
        self._commands[name].start()

    def _client(
        self, name: str, face: str, places: list[str], lun: int, count: int, connections: int = 1
    ) -> None:
        taken = sum(len(each.areas) for each in self._orders.values())
        areas = [(number + 1, number * _BLOCKS * BLOCK) for number in range(taken, taken + count)]
        name = f"client {name}"
        metrics = (
            "" if face in ("nbd", "file") else self._serves(name, name.replace("client ", "c."))
        )
        order = self._order(name, face, places, areas, connections=connections, metrics=metrics)
        self._orders[name] = order
        self._luns[name] = lun
        self._clients[name] = self._begin(name, order)

    def _order(
        self, name: str, face: str, places: list[str], areas: list[tuple[int, int]], **more: Any
    ) -> Order:
        state = self._directory / f"{name.replace(' ', '-')}.areas"
        seed = f"{self._seed} {name} {len(self.record.happened)}"
        return Order(name, face, places, areas, _BLOCKS, seed, IO_TIMEOUT_S, str(state), **more)

    def _begin(self, name: str, order: Order) -> ClientProcess:
        log = self._directory / f"{name.replace(' ', '-')}.log"
        return ClientProcess(name, order.words(), log, self._hear)

    def _hear(self, name: str, said: dict[str, Any]) -> None:
        with self._lock:
            for kind, words in (("wrong", "data is wrong"), ("failed", "failed")):
                if kind in said:
                    self._found(f"{name}: {words}: {said[kind]}")
            if "ready" in said:
                self._ready.add(name)
            if "latencies" in said:
                minute = int(self.now() // 60)
                self.record.minutes[name][minute].merge(Latencies(said["latencies"]))
                self._sizes[name] = said["size"]

    def _found(self, text: str) -> None:
        self.record.findings.append(text)
        self._say(text)

    def find(self, text: str) -> None:
        with self._lock:
            self._found(text)

    def _tried(self, do: Callable[[], object]) -> None:
        try:
            do()
        except Broken as error:
            self.find(str(error))

    def _sample_all(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            at_s = self.now()
            processes: list[tuple[str, Command | ClientProcess]] = []
            processes += [*self._commands.items(), *self._clients.items()]
            for name, process in processes:
                if process.is_running and (found := sample(process.pid, at_s)) is not None:
                    self.record.samples[name].append(found)
                    self._count(name, process)

    def _count(self, name: str, process: Command | ClientProcess) -> None:
        if name in self._metrics:
            self.record.tried.note(name, process.pid, ask(self._metrics[name]))

    # --- what happens ------------------------------------------------------------------------

    def wait(self, until_s: float) -> None:
        """Raises Broken where a process has ended meanwhile."""
        while True:
            for command in self._commands.values():
                command.check()
            for client in self._clients.values():
                if not client.is_running:
                    client.ended(END_S)  # says how, where that was not in order
                    raise Broken(f"{client.name} ended by itself")
            left = until_s - self.now()
            if left <= 0:
                return
            time.sleep(min(left, _LOOK_S))

    def do(self, event: Event) -> None:
        """Raises Broken."""
        self.record.happened.append((self.now(), event.words()))
        if event.kind == plan.PORTAL:
            self._portal(event)
        elif event.kind == plan.RESTART:
            self._restart(event)
        elif event.kind == plan.GROW:
            path = self.lun(int(event.whom))
            os.truncate(path, path.stat().st_size + event.number)
        else:
            self._visit(event)

    def _portal(self, event: Event) -> None:
        relays = [self._relays[int(number) - 1] for number in event.whom.split("+")]
        begin, end = {
            "cut": (Relay.cut, Relay.back),
            "away": (Relay.away, Relay.back),
            "stall": (Relay.stall, Relay.go_on),
        }[event.what]
        for relay in relays:
            begin(relay)
        self.wait(self.now() + event.for_s)
        for relay in relays:
            end(relay)

    def _restart(self, event: Event) -> None:
        command = self._commands[event.whom]
        self._count(event.whom, command)
        if event.what == "kill":
            command.kill()
        else:
            command.end(END_S)
        time.sleep(event.for_s)
        command.start()

    def _visit(self, event: Event) -> None:
        """A client that has an area as all clients of its kind, one after the other."""
        whom, dies = event.whom, event.what == "kill"
        self._see_off(whom)
        number = _FIRST_VISITOR + ["api", "nbd", "file"].index(whom)
        lun, face, places = {
            "api": (2, "blocking", self.urls(2, "iser")),
            "nbd": (0, "nbd", [str(self._socket)]),
            "file": (1, "file", [self._file()] if self._mounts else []),
        }[whom]
        name = f"visitor {whom}"
        order = self._order(
            name, face, places, [(number + 1, number * _BLOCKS * BLOCK)],
            steps=event.number, dies=dies, ledger=str(self._directory / f"{whom}.ledger"),
            connections=2,
        )  # fmt: skip
        self._luns[name] = lun
        self._visitors[whom] = (self._begin(name, order), dies)

    def _see_off(self, whom: str) -> None:
        if whom in self._visitors:
            process, dies = self._visitors.pop(whom)
            self._tried(partial(process.ended, END_S, killed=dies))

    # --- the end -----------------------------------------------------------------------------

    def end(self) -> None:
        """Everything ends in order, and what is on the LUNs is compared."""
        self._over.set()
        for relay in self._relays:
            relay.go_on()
            relay.back()
        for name, command in self._commands.items():
            self._count(name, command)
        for name, client in self._clients.items():
            self._count(name, client)
        for whom in [*self._visitors]:
            self._see_off(whom)
        for client in self._clients.values():
            client.stop()
        for client in self._clients.values():
            self._tried(partial(client.ended, END_S))
        for name in reversed(self._commands):
            self._tried(partial(self._commands[name].end, END_S))
        self._compare_all()
        self._compare_sizes()
        for log in sorted(self._directory.glob("*.log")):
            if "Traceback" in log.read_text(errors="replace"):
                self.find(f"{log.name} has a traceback")
        for name in self._metrics:
            log = self._directory / f"{name.replace(' ', '-')}.log"
            self.record.replays[name] = replays(log.read_bytes()) if log.exists() else Replays()

    def _compare_all(self) -> None:
        areas = []
        for name in self._clients:
            path = Path(self._orders[name].state)
            if path.exists():
                areas += [(name, each) for each in _areas(path)]
        for index, whom in enumerate(("api", "nbd", "file")):
            ledger = self._directory / f"{whom}.ledger"
            if ledger.exists():
                number = _FIRST_VISITOR + index
                area = Area(number + 1, number * _BLOCKS * BLOCK, _BLOCKS)
                areas.append((f"visitor {whom}", Ledger(area, ledger.read_bytes()).area))
        for name, area in areas:
            with self.lun(self._luns[name]).open("rb") as file:
                file.seek(area.offset)
                data = file.read(area.blocks * BLOCK)
            self.record.compared += area.blocks
            for text in area.wrong(0, data):
                self.find(f"{name}: data is wrong: in the file of its LUN, at the end: {text}")

    def _compare_sizes(self) -> None:
        for name in self._clients:
            size = self.lun(self._luns[name]).stat().st_size
            if name in self._sizes and self._sizes[name] != size and name != "client nbd":
                self.find(
                    f"{name}: says that its LUN has {self._sizes[name]} bytes, which has {size}"
                )

    def close(self) -> None:
        """Nothing is left mounted or running, however the run has ended."""
        self._over.set()
        for process, _ in self._visitors.values():
            process.kill()
        for client in self._clients.values():
            client.kill()
        for name in reversed(self._commands):
            self._commands[name].kill()
        for relay in self._relays:
            relay.close()
        if _is_mounted(self._mountpoint):
            words = ["fusermount3", "-u", "-z"] if os.geteuid() else ["umount", "-l"]
            subprocess.run([*words, str(self._mountpoint)], check=False)
        with contextlib.suppress(OSError):
            self._mountpoint.rmdir()


def _is_mounted(path: Path) -> bool:
    """Also where nobody answers any more."""
    lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    return str(path) in [line.split()[1] for line in lines]


def _areas(path: Path) -> list[Area]:
    found = []
    for each in json.loads(path.read_text()):
        area = Area(each["owner"], each["offset"], len(each["newest"]))
        area.newest, area.flushed = each["newest"], each["flushed"]
        area.may_have_lost()
        found.append(area)
    return found
