"""Python programs of ours as processes that need not start Python: forked from one that imports
what they need once.

A start takes half a second of a processor, and in an emulated guest 5 to 20; there are thousands
in the tests. What is forked is a process like any other, with its own standard streams,
environment and directory. Its command line, as /proc and ps have it, is that of a start, without
the options of Python itself (it stands where the forking process had its own, and is cut if it
does not fit there).

The servers that a forked ``attach`` starts are forked, too, and the commands of a forked ``csi``.
Those of what was started (tests/cli/commands.py, COMMAND) are started.

    python3 -m tests.support.forking SOCKET SPACE        (a descriptor: SOCK_SEQPACKET; spaces)

Each message to SOCKET is a JSON object with ``module``, ``arguments``, ``directory``,
``environment``, ``namespace``, ``session`` (it begins a new one) and ``kept`` (numbers of
descriptors); with it, as SCM_RIGHTS, come the three standard streams, a socket for the answers, and
the descriptors that are kept. Answers are decimal numbers: the new process, and, when that has
ended, its status as of waitpid.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, Any, TypeAlias

from tests.support import setns

ROOT = Path(__file__).resolve().parents[2]
Output: TypeAlias = IO[bytes] | IO[str] | int
_MESSAGE = 1 << 18
_DESCRIPTORS = 32  # that come with a message
_OUT_OF_THE_WAY = 500  # descriptors from here on are none that a process was given by number
_SPACE = 8192  # bytes, for the command line


class Forked:
    """As subprocess.Popen, as far as it goes, with text. stdin is /dev/null.

    ``stdout`` and ``stderr`` are there where they were asked for with subprocess.PIPE.
    ``namespace``: the name of a network namespace that it is to run in; "": in ours. ``orders``:
    where the forking process hears of it, if not in one of this process's own."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdout: Output,
        stderr: Output,
        namespace: str = "",
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
        orders: socket.socket | None = None,
    ) -> None:
        order = {
            "module": module,
            "arguments": [*arguments],
            "directory": str(cwd or Path.cwd()),
            "environment": dict(env),
            "namespace": namespace,
            "session": start_new_session,
            "kept": [*pass_fds],
        }
        self.args = [module, *arguments]
        self.returncode: int | None = None
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as given:
            given.enter_context(theirs)
            nothing = given.enter_context(open(os.devnull, "rb"))
            self.stdout, out = _output(stdout, given)
            self.stderr, err = _output(stderr, given)
            descriptors = [nothing.fileno(), out, err, theirs.fileno(), *pass_fds]
            orders = orders or _forking_process()
            socket.send_fds(orders, [json.dumps(order).encode()], descriptors)
        self.pid = self._number()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                status = self._number()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._answers.close()
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait, then read its output: only for processes whose output fits into a pipe."""
        self.wait(timeout)
        said = []
        for stream in (self.stdout, self.stderr):
            if stream is None or stream.closed:
                said.append("")
            else:
                with stream:
                    said.append(stream.read())
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        answer = self._answers.recv(64)
        assert answer, "the process that forks has ended"
        return int(answer)


def _output(wish: Output, given: ExitStack) -> tuple[IO[str] | None, int]:
    """(our end of a pipe, or None; the process's descriptor). ``given`` closes what we opened."""
    if wish != subprocess.PIPE:
        return None, wish if isinstance(wish, int) else wish.fileno()
    read_end, write_end = os.pipe()
    given.callback(os.close, write_end)
    return os.fdopen(read_end, encoding="utf-8"), write_end


def run(
    module: str,
    arguments: Sequence[str] = (),
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout: float | None,
    pass_fds: Sequence[int] = (),
    orders: socket.socket | None = None,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, with its output captured as text."""
    with TemporaryFile() as out, TemporaryFile() as err:
        process = Forked(
            module, arguments, env=env, cwd=cwd, stdout=out, stderr=err, pass_fds=pass_fds,
            orders=orders,
        )  # fmt: skip
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess(process.args, code, *said)


@functools.cache
def _forking_process() -> socket.socket:
    """The socket of the forking process, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forking", str(theirs.fileno()), " " * _SPACE],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    process.returncode = 0  # else Popen warns that the process was not waited for
    atexit.register(ours.close)
    return ours


# --- the process that forks --------------------------------------------------------------------


_STARTING = ("iserblk.nbd.kernel.server", "iserblk.csi.host")  # modules that start others
_START = [sys.executable, "-P", "-m"]
_FUSE = ["fuse_mount.mount", "fuse_mount.serving"]
_ATTACH = ["iserblk.cli.main", "iserblk.cli.attach", "iserblk.cli.detach"]
# What is behind a module that is run, and need not be imported more than once.
_BEHIND = {
    "fuse_mount": _FUSE,
    "tests.fuse_mount.fake_mount": _FUSE,
    "tests.nbd.kernel.faked": _ATTACH,
    "iserblk.nbd.kernel.serving": ["iserblk.nbd.kernel.succession", "iserblk.nbd.serving"],
    # (Not what opens disks: it opens fakes.)
    "tests.contract.fake_server": [
        *("tests.support.fake_disk", "iserblk.cli.main", "iserblk.cli.background"),
        *("iserblk.cli.options", "iserblk.nbd.server", "iserblk.named.resolving"),
    ],
    "tests.support.serve": ["tests.support.target_here", "tests.support.census"],
}


def _import_what_is_behind(module: str, arguments: Sequence[str]) -> None:
    names = _BEHIND.get(module, [])
    if module == "iserblk.cli":
        main = importlib.import_module("iserblk.cli.main")
        names = [f"iserblk.cli.{word}" for word in arguments if word in main.COMMANDS][:1]
        names += _FUSE if "mount" in arguments else []
        names += ["iserblk.csi.host"] if "csi" in arguments else []
    for name in names:
        if name not in sys.modules:
            with suppress(ImportError):  # the child says so
                importlib.import_module(name)
            gc.collect()
            gc.freeze()  # else a child's first collection would touch, and so copy, every object


def _serve(orders: socket.socket) -> list[str]:
    """Returns in each child: module and arguments. Ends with the other side of the socket."""
    interrupt = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes in _wait
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for_children = socket.socket(fileno=_out_of_the_way(theirs.detach()))
    while True:
        ready, _, _ = select.select([orders, ours], [], [])
        message, descriptors, _flags, _address = socket.recv_fds(ready[0], _MESSAGE, _DESCRIPTORS)
        if not message:
            sys.exit()
        order = json.loads(message)
        _import_what_is_behind(order["module"], order["arguments"])
        if not os.fork():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    orders.close()
    ours.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    descriptors = [_out_of_the_way(each) for each in descriptors]
    streams, answers, given = descriptors[:3], descriptors[3], descriptors[4:]
    child = os.fork()
    if child:
        for_children.close()
        _wait(child, answers, [*streams, *given])
    os.close(answers)
    if order["session"]:
        os.setsid()
    for number, descriptor in zip([0, 1, 2, *order["kept"]], [*streams, *given], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, interrupt)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    if order["namespace"]:
        setns.enter(order["namespace"])
    if _entitle([sys.executable, "-m", order["module"], *order["arguments"]]):
        _fork_what_is_started(for_children)
    return [order["module"], *order["arguments"]]


def _out_of_the_way(descriptor: int) -> int:
    """The same with a number that no process is given."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    os.close(descriptor)
    return moved


def _entitle(words: Sequence[str]) -> bool:
    """Make ``words`` the command line of this process. False: the system does not say where."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, numbers[45:47])  # proc(5): the fields 48 and 49
    if end - begin < _SPACE:
        return False
    line = os.fsencode("\0".join([*words, ""]))[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, line, len(line))
    return True


def _fork_what_is_started(orders: socket.socket) -> None:
    """Let the forking process, which hears of it through ``orders``, fork the programs of ours that
    this process wants to start."""
    modules = [sys.modules[each] for each in _STARTING if each in sys.modules]
    if not modules:
        orders.close()
        return

    def begin(words: Sequence[str], **options: Any) -> Forked | subprocess.Popen[Any]:
        if [*words[:3]] != _START:
            return subprocess.Popen(words, **options)
        assert options.pop("stdin") == options.pop("stdout") == subprocess.DEVNULL
        options["cwd"] = Path(options["cwd"])
        with open(os.devnull, "wb") as nothing:
            return Forked(
                words[3], words[4:], env=os.environ, stdout=nothing, stderr=2, orders=orders,
                **options,
            )  # fmt: skip

    def run_to_its_end(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if [*words[:3]] != _START:
            return subprocess.run(words, **options)  # noqa: PLW1510
        assert options["capture_output"] and options["text"] and not options["check"]
        return run(
            words[3], words[4:], env=os.environ, timeout=None, pass_fds=options["pass_fds"],
            orders=orders,
        )  # fmt: skip

    instead = {**vars(subprocess), "Popen": begin, "run": run_to_its_end}
    for each in modules:
        each.subprocess = SimpleNamespace(**instead)  # type: ignore[attr-defined]


def _wait(child: int, answers: int, streams: Sequence[int]) -> None:
    """Report the child's number and, at its end, its status. Does not return."""
    try:
        for stream in (0, 1, 2, *streams):
            os.close(stream)  # else their readers would not see the end of the stream
        os.write(answers, str(child).encode())
        os.write(answers, str(os.waitpid(child, 0)[1]).encode())
    finally:
        os._exit(0)


class _Ending:
    """Ends a forked process, after all that it has to do at its end.

    What Python does behind that goes through all objects, most of which the process shares with the
    forking one until then: three quarters of the processor time of a short command are for that."""

    def __init__(self) -> None:
        self.status: int | None = None
        # Of such functions the first is called last.
        atexit.register(self._end)

    def _end(self) -> None:
        if self.status is not None:
            with suppress(OSError, ValueError):  # Python tries it again, and says so
                for stream in (sys.stdout, sys.stderr):
                    if stream is not None and not stream.closed:
                        stream.flush()
                os._exit(self.status)


def _main() -> None:
    ending = _Ending()
    module, *sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            ending.status = (end.code or 0) & 0xFF
        raise
    ending.status = 0


if __name__ == "__main__":
    _main()
