"""The subjects that are measured: each is a front-end, and the target behind it if there is one.

A subject's opener starts its servers on the section's ExitStack and returns an Endpoint. The
subjects of a section share two targets, our target and tgtd, each with its own backing file.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from benchlib import load, proc
from benchlib.goals import NBDKIT, SERVER
from benchlib.load import ClientUse, Job, Measurement
from benchlib.network import TARGET_ADDRESS, Network
from benchlib.servers import Absent, Server, run
from iserblk.options import Options

OUR_IQN = "iqn.2026-11.example:bench"
PEER_IQN = "iqn.2026-11.example:peer"
GATE_IQN = "iqn.2026-11.example:gate"
THREADS = 32  # the greatest depth of the jobs
_JOURNAL = Options().journal  # bytes

T = TypeVar("T")

_TOP = Path(__file__).resolve().parents[2]
_PLUGINS = Path(__file__).resolve().parent / "plugins"
_FLOOR = Path(__file__).resolve().parent / "floor.c"
ISAL = Path("/usr/include/isa-l/crc.h")
_BIND_TRIES = 5
_HANG_S = 10.0


@dataclass(slots=True)
class Endpoint:
    """One subject, ready for jobs.

    ``client`` is the name of the process that makes the load; ``servers`` are the other processes,
    by name. ``command(job, seconds)`` is the client's command line; ``parse(output, job, seconds)``
    reads its output.
    """

    client: str
    command: Callable[[Job, float], Sequence[str]]
    parse: Callable[[str, Job, float], Measurement]
    servers: dict[str, Server] = field(default_factory=dict)

    def run(self, job: Job, seconds: float) -> tuple[Measurement, ClientUse]:
        """Run one job. Raises JobFailed."""
        use = load.run_client(self.command(job, seconds), seconds)
        return self.parse(use.output, job, seconds), use


class Bench:
    """The servers of one section, started when a subject first needs them."""

    def __init__(
        self, stack: ExitStack, directory: Path, ours: Path, theirs: Path, mtu: int = 0
    ) -> None:
        """``directory`` takes logs, sockets and mount points; the two files back the disks.
        ``mtu``: MTU of the link between two network namespaces, for targets and for clients; 0: all
        use the loopback device."""
        self._stack = stack
        self._mtu = mtu
        self._directory = directory
        self._ours = ours
        self._theirs = theirs
        self._once: dict[str, Any] = {}

    def path(self, name: str) -> Path:
        return self._directory / name

    def _network(self) -> Network:
        return self.once("network", lambda: Network(self._stack, self._mtu))

    @property
    def address(self) -> str:
        """The address on which targets listen."""
        return TARGET_ADDRESS if self._mtu else "127.0.0.1"

    def at_client(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` at the clients' end. Raises Absent."""
        return [*self._network().client, *command] if self._mtu else [*command]

    def start(
        self,
        name: str,
        command: Sequence[str],
        stop_signal: signal.Signals = signal.SIGTERM,
        environment: dict[str, str] | None = None,
        target: bool = False,
    ) -> Server:
        """Start a server at the clients' end, or with ``target`` at the targets' end. It ends with
        the section. Raises Absent."""
        if target and self._mtu:
            command = [*self._network().target, *command]
        else:
            command = self.at_client(command)
        server = Server(
            name, command, self._directory, environment=environment, stop_signal=stop_signal
        )
        return self._stack.enter_context(server)

    def mount_point(self, name: str, directory: bool = True) -> Path:
        """An empty directory or file. At the end it is unmounted, if its server died mounted."""
        path = self.path(name)
        if directory:
            path.mkdir()
        else:
            path.touch()
        self._stack.callback(unmount, path)
        return path

    def our_target(self, busy_poll: bool = True) -> tuple[Server, str]:
        """Our target and its URL; with default options, or without busy polling. Raises Absent."""
        if busy_poll:
            return self.once("ours", partial(self._start_our_target, "target", self._ours))
        return self.once("ours-no-poll", self._start_sleepy_target)

    def _start_sleepy_target(self) -> tuple[Server, str]:
        file = self._ours.with_name("ours-no-poll")  # two targets do not serve one file
        shutil.copyfile(self._ours, file)
        self._stack.callback(file.unlink)
        return self._start_our_target("target-no-poll", file, "--busy-poll", "0")

    def tgtd(self) -> tuple[Server, str]:
        """tgtd and the URL of its disk. Raises Absent."""
        return self.once("tgtd", self._start_tgtd)

    @property
    def file(self) -> Path:
        """What backs our disk."""
        return self._ours

    def size(self) -> int:
        return self._ours.stat().st_size

    def once(self, name: str, start: Callable[[], T]) -> T:
        """The result of ``start``, which is called once for each ``name``; its Absent is raised
        again for every later caller."""
        found = self._once.get(name)
        if found is None:
            try:
                found = start()
            except Absent as error:
                found = error
            self._once[name] = found
        if isinstance(found, Absent):
            raise found
        return cast(T, found)

    def _start_our_target(self, name: str, file: Path, *options: str) -> tuple[Server, str]:
        server, url = self.start_target(name, [f"{file}:wce=1"], *options)
        return server, f"{url}/0"

    def start_target(self, name: str, luns: Sequence[str], *options: str) -> tuple[Server, str]:
        """Our target with LUNs as its ``--lun`` names them, and its URL, without a LUN. Raises
        Absent."""
        command = iserblk("target", "--listen", f"{self.address}:0", "--iqn", OUR_IQN, *options)
        for lun in luns:
            command += ["--lun", lun]
        server = self.start(name, command, target=True)
        portal = server.wait_until(lambda: ready_url(server)).removeprefix("iser://").split("/")[0]
        return server, f"iser://{portal}/{OUR_IQN}"

    def _start_tgtd(self) -> tuple[Server, str]:
        sbin = Path(peer("tgt")) / "usr/sbin"
        # A control socket of its own: a tgtd that is not ours may use the default path.
        environment = {"TGT_IPC_SOCKET": str(self.path("tgtd.ipc"))}

        def admin(*arguments: str) -> None:
            run("tgtadm", [str(sbin / "tgtadm"), "--lld", "iscsi", *arguments], environment)

        for _ in range(_BIND_TRIES):
            portal = (self.address, proc.free_port())
            command = [str(sbin / "tgtd"), "-f", "--iscsi", f"portal={portal[0]}:{portal[1]}"]
            # tgtd ignores SIGTERM while it has targets, and has no data to lose: KILL.
            server = self.start("tgtd", command, signal.SIGKILL, environment, target=True)
            bound = server.wait_until(partial(_listens, server))
            if bound == {portal}:
                break
            server.stop()  # tgtd uses 0.0.0.0:3260 if its port was taken meanwhile
        else:
            raise Absent(f"tgtd listens on {bound}, not on the free port that it was given")
        admin("--op", "new", "--mode", "target", "--tid", "1", "-T", PEER_IQN)
        admin("--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", "1",
              "-b", str(self._theirs))  # fmt: skip
        admin("--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL")
        return server, f"iscsi://{portal[0]}:{portal[1]}/{PEER_IQN}/1"


def with_iscsi(url: str) -> str:
    """The same LUN of our target over Traditional iSCSI."""
    return url.replace("iser://", "iscsi://", 1)


def _ours(url: str, mpa_crc: str, busy_poll: bool) -> str:
    return f"{url}?mpa-crc={mpa_crc}" + ("" if busy_poll else "&busy-poll=0")


# --- NBD ---------------------------------------------------------------------------------------


def nbd_ours(
    bench: Bench, mpa_crc: str, busy_poll: bool = True, journal: str = "", nbdkit: bool = False
) -> Endpoint:
    """Our own server; with ``nbdkit`` our plugin in nbdkit."""
    target, url = bench.our_target(busy_poll)
    url = _ours(url, mpa_crc, busy_poll) + (f"&journal={journal}" if journal else "")
    name = f"{mpa_crc}-{busy_poll}-{journal}"
    return bench.once(
        f"nbd-{name}-{nbdkit}", lambda: _nbd(bench, name, url, {"target": target}, nbdkit)
    )


def nbd_flushed(bench: Bench) -> Endpoint:
    """Ours without a journal, flushed as often as a full journal would be. The remaining difference
    to a disk with a journal is the copying."""
    without = nbd_ours(bench, mpa_crc="yes", journal="off")

    def command(job: Job, seconds: float) -> list[str]:
        return [*without.command(job, seconds), *load.fio_flushes(job, _JOURNAL)]

    return replace(without, command=command)


def nbd_tcp(bench: Bench, nbdkit: bool = False) -> Endpoint:
    """Ours over Traditional iSCSI, on the peers' target."""
    tgtd, url = bench.tgtd()
    return _nbd(bench, "tcp", url, {"tgtd": tgtd}, nbdkit)


def _nbd(bench: Bench, name: str, url: str, target: dict[str, Server], nbdkit: bool) -> Endpoint:
    if not nbdkit:
        server, socket = nbd_server(bench, name, [url])
        return _through_nbd(socket, {SERVER: server, **target})
    server, socket = nbd_server(
        bench, f"nbdkit-{name}", [url], "--nbdkit", "--threads", str(THREADS)
    )
    server.starter = SERVER
    return _through_nbd(socket, {NBDKIT: server, **target})


def nbd_server(bench: Bench, name: str, urls: Sequence[str], *options: str) -> tuple[Server, Path]:
    """``iserblk nbd``, ready for clients, and its socket. Raises Absent."""
    socket = bench.path(f"ours-{name}.sock")
    server = bench.start(f"nbd-{name}", iserblk("nbd", *urls, "--socket", str(socket), *options))
    server.wait_until(lambda: ready_url(server))
    return server, socket


def nbd_qemu(bench: Bench) -> Endpoint:
    tgtd, url = bench.tgtd()
    socket = bench.path("qemu-nbd.sock")
    server = bench.start(
        "qemu-nbd",
        ["qemu-nbd", "-f", "raw", "-k", str(socket), "-e", "8", "-t", "--cache=none",
         "--aio=native", url],
    )  # fmt: skip
    server.wait_until(socket.exists)
    return _through_nbd(socket, {"qemu-nbd": server, "tgtd": tgtd})


def nbd_memory(bench: Bench) -> Endpoint:
    return _nbdkit(bench, "memory", ["memory", f"size={bench.size()}"])


def nbd_null(bench: Bench, sleep_us: int) -> Endpoint:
    plugin = str(_PLUGINS / "null_plugin.py")
    arguments = ["python", plugin, f"size={bench.size()}", f"sleep_us={sleep_us}"]
    return _nbdkit(bench, f"python-{sleep_us}us", arguments)


def nbd_floor(bench: Bench) -> Endpoint:
    """The system calls, copies, checksums and wake-ups of a 4 KiB read over iSER, and nothing
    else."""
    program = _floor_program(bench)
    target = bench.start("floor-target", [program, "target", str(bench.file)], target=True)
    port = target.wait_until(lambda: ready_url(target))
    return _floor(bench, "floor", "server", port, [], {"floor target": target})


def nbd_floor_tcp(bench: Bench) -> Endpoint:
    """The same over Traditional iSCSI, on the peers' target."""
    tgtd, url = bench.tgtd()
    parts = urlsplit(url)
    lun = parts.path.strip("/").split("/")
    return _floor(bench, "floor-tcp", "iscsi", parts.netloc, lun, {"tgtd": tgtd})


def _floor(
    bench: Bench, name: str, command: str, portal: str, lun: list[str], target: dict[str, Server]
) -> Endpoint:
    program = _floor_program(bench)
    socket = bench.path(f"{name}.sock")
    server = bench.start(name, [program, command, portal, str(bench.size()), str(socket), *lun])
    server.wait_until(lambda: ready_url(server))
    return _through_nbd(socket, {"floor": server, **target})


def _floor_program(bench: Bench) -> str:
    return bench.once("floor program", lambda: _compile_floor(bench))


def _compile_floor(bench: Bench) -> str:
    if not ISAL.exists():
        raise Absent("floor: libisal-dev is not installed")
    program = str(bench.path("floor-program"))
    run("gcc", ["gcc", "-O2", "-Wall", "-Werror", "-o", program, str(_FLOOR), "-lisal"])
    return program


def _nbdkit(bench: Bench, name: str, arguments: Sequence[str]) -> Endpoint:
    socket = bench.path(f"{name}.sock")
    command = ["nbdkit", "-f", "-t", str(THREADS), "-U", str(socket), *arguments]
    server = bench.start(name, command)
    server.wait_until(socket.exists)
    return _through_nbd(socket, {NBDKIT: server})


def _through_nbd(socket: Path, servers: dict[str, Server]) -> Endpoint:
    return _fio(load.fio_nbd(str(socket)), servers)


# --- FUSE --------------------------------------------------------------------------------------


def fuse_ours(bench: Bench, mpa_crc: str, busy_poll: bool = True) -> Endpoint:
    target, url = bench.our_target(busy_poll)
    url = _ours(url, mpa_crc, busy_poll)
    return _fuse(bench, f"{mpa_crc}-{busy_poll}", url, {"target": target})


def fuse_tcp(bench: Bench) -> Endpoint:
    """Ours over Traditional iSCSI, on the peers' target."""
    tgtd, url = bench.tgtd()
    return _fuse(bench, "tcp", url, {"tgtd": tgtd})


def _fuse(bench: Bench, name: str, url: str, target: dict[str, Server]) -> Endpoint:
    _need_fuse()
    mount_point = bench.mount_point(f"mount-{name}")
    server = bench.start(f"fuse-{name}", iserblk("mount", "-f", url, str(mount_point)))
    lun = url.partition("?")[0].rpartition("/")[2]
    file = mount_point / f"lun{lun}"
    server.wait_until(lambda: mounted_size(mount_point, file))
    return _fio(load.fio_file(str(file)), {"mount": server, **target})


def fuse_qemu(bench: Bench) -> Endpoint:
    _need_fuse()
    program = Path(peer("qsd")) / "usr/bin/qemu-storage-daemon"
    tgtd, url = bench.tgtd()
    portal, iqn, lun = url.removeprefix("iscsi://").split("/")
    file = bench.mount_point("qemu-fuse", directory=False)
    disk = f"driver=iscsi,node-name=disk,transport=tcp,portal={portal},target={iqn},lun={lun}"
    export = f"type=fuse,id=export,node-name=disk,mountpoint={file},writable=on,allow-other=off"
    server = bench.start(
        "qemu-storage-daemon", [str(program), "--blockdev", disk, "--export", export]
    )
    server.wait_until(lambda: mounted_size(file, file))
    return _fio(load.fio_file(str(file)), {"qemu-storage-daemon": server, "tgtd": tgtd})


def fuse_null(bench: Bench) -> Endpoint:
    _need_fuse()
    mount_point = bench.mount_point("mount-null")
    program = str(_PLUGINS / "null_fuse.py")
    server = bench.start(
        "pyfuse3-null", [sys.executable, program, str(mount_point), str(bench.size())]
    )
    file = mount_point / "null"
    server.wait_until(lambda: mounted_size(mount_point, file))
    return _fio(load.fio_file(str(file)), {"pyfuse3": server})


# --- API ---------------------------------------------------------------------------------------


def api_ours(
    bench: Bench,
    mpa_crc: str,
    busy_poll: bool = True,
    frames: str = "auto",
    connections: int = 1,
    face: str = "async",
) -> Endpoint:
    """``connections``: of the session. ``face``: of the API, see `iserblk bench`."""
    target, url = bench.our_target(busy_poll)
    url = _ours(url, mpa_crc, busy_poll) + ("" if frames == "auto" else f"&mpa-frames={frames}")
    return _api(bench, f"{url}&connections={connections}", {"target": target}, face)


def api_iscsi(bench: Bench, connections: int = 1) -> Endpoint:
    """Ours over Traditional iSCSI, on our target. ``connections``: of the session."""
    target, url = bench.our_target()
    return _api(bench, f"{with_iscsi(url)}?connections={connections}", {"target": target})


def api_tcp(bench: Bench, face: str = "async") -> Endpoint:
    """Ours over Traditional iSCSI, on the peers' target."""
    tgtd, url = bench.tgtd()
    return _api(bench, url, {"tgtd": tgtd}, face)


def api_gateway(bench: Bench, front: str, behind: str) -> Endpoint:
    """Ours, to a gateway of ours. ``front``, ``behind``: iser or tcp; over TCP tgtd is behind."""
    target, url = bench.our_target() if behind == "iser" else bench.tgtd()
    name = f"gateway-{behind}"  # both fronts are on one port
    gateway, here = bench.once(name, lambda: _start_gateway(bench, name, url))
    server = {"target" if behind == "iser" else "tgtd": target}
    return _api(
        bench, here if front == "iser" else with_iscsi(here), {"gateway": gateway, **server}
    )


def _start_gateway(bench: Bench, name: str, url: str) -> tuple[Server, str]:
    listen = f"{bench.address}:0"
    command = iserblk("target", "--listen", listen, "--iqn", GATE_IQN, "--lun", url)
    server = bench.start(name, command, target=True)
    return server, f"{server.wait_until(lambda: ready_url(server))}/0"


def _api(bench: Bench, url: str, target: dict[str, Server], face: str = "async") -> Endpoint:
    def command(job: Job, seconds: float) -> list[str]:
        return bench.at_client(iserblk(*load.iserblk_bench_arguments(job, url, seconds, face)))

    def parse(output: str, _job: Job, _seconds: float) -> Measurement:
        return load.parse_iserblk_bench(output)

    return Endpoint("iserblk bench", command, parse, target)


def api_iscsi_perf(bench: Bench) -> Endpoint:
    tgtd, url = bench.tgtd()

    def command(job: Job, seconds: float) -> list[str]:
        return bench.at_client(load.iscsi_perf_command(job, url, seconds))

    return Endpoint("iscsi-perf", command, load.parse_iscsi_perf, {"tgtd": tgtd})


def api_floor_tcp(bench: Bench) -> Endpoint:
    """What a read over Traditional iSCSI cannot do without, and nothing else."""
    tgtd, url = bench.tgtd()
    parts = urlsplit(url)
    program = _floor_program(bench)

    def command(job: Job, seconds: float) -> list[str]:
        size, lun = str(bench.size()), parts.path.strip("/").split("/")
        shape = [str(job.block), str(job.depth), str(seconds)]
        return bench.at_client([program, "load", parts.netloc, size, *lun, *shape])

    return Endpoint("floor", command, load.parse_floor, {"tgtd": tgtd})


# --- shared ------------------------------------------------------------------------------------


def iserblk(*arguments: str) -> list[str]:
    """A command line of iserblk, as scripts/setup installed it."""
    return [str(_TOP / ".venv/bin/iserblk"), *arguments]


def ready_url(server: Server) -> str | None:
    """The URL of the server's `ready URL` line, or None until it is there."""
    for line in server.said().splitlines():
        if line.startswith("ready "):
            return line.split()[1]
    return None


def peer(name: str) -> str:
    """The directory where scripts/peers has unpacked the peer. Raises Absent with its reason."""
    return run("scripts/peers", [str(_TOP / "scripts/peers"), name]).strip()


def is_mounted(mount_point: Path) -> bool:
    # Not os.path.ismount: a file system whose server hangs would hang us, too.
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    return any(line.split()[1] == str(mount_point) for line in mounts.splitlines())


def mounted_size(mount_point: Path, file: Path) -> int:
    """Bytes of the file once it is mounted; 0 until then. Raises Absent if the server hangs."""
    if not is_mounted(mount_point):
        return 0
    command = ["stat", "--format=%s", str(file)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_HANG_S)
    except subprocess.TimeoutExpired:
        raise Absent(f"{mount_point.name} is mounted, but does not answer") from None
    return int(done.stdout or 0)


def unmount(mount_point: Path) -> None:
    if is_mounted(mount_point):
        subprocess.run(["fusermount3", "-u", "-z", str(mount_point)], check=False)


def _need_fuse() -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Absent("/dev/fuse is missing, or may not be opened")


def _fio(engine: list[str], servers: dict[str, Server]) -> Endpoint:
    def command(job: Job, seconds: float) -> list[str]:
        return load.fio_command(job, engine, seconds)

    return Endpoint("fio", command, lambda output, job, _: load.parse_fio(output, job), servers)


def _listens(server: Server) -> set[tuple[str, int]]:
    found = set()
    for pid in server.pids:
        found |= proc.listening(pid)
    return found
