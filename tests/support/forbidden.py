"""Tries what a confined service has no need of, and prints how each attempt ended: a JSON object of
``done``, ``absent`` (there is nothing here to try it with) or the name of an error.

    /usr/bin/python3 forbidden.py PID

PID: of a process of another user. No attempt does any harm where it succeeds. Needs only the
standard library."""

import ctypes
import errno
import json
import mmap
import os
import pwd
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PTRACE_ATTACH = 16
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_AF_ALG = 38
_PERSONALITY = 0x0040000  # ADDR_NO_RANDOMIZE
_SCRIPT = "#!/bin/sh\n"
_NUMBERS = {  # of system calls: asm/unistd_64.h, and that of arm64
    "x86_64": {"init_module": 175, "bpf": 321, "keyctl": 250, "perf_event_open": 298,
               "io_uring_setup": 425, "kexec_load": 246},
    "aarch64": {"init_module": 105, "bpf": 280, "keyctl": 219, "perf_event_open": 241,
                "io_uring_setup": 425, "kexec_load": 104},
}  # fmt: skip


class Absent(Exception):
    """There is nothing to try it with."""


def _need(result: int) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _call(name: str, *words: object) -> None:
    """A function of the C library."""
    _need(getattr(_LIBC, name)(*words))


def _system_call(name: str, *words: int) -> None:
    numbers = _NUMBERS.get(os.uname().machine)
    if numbers is None:
        raise Absent
    _need(_LIBC.syscall(ctypes.c_long(numbers[name]), *map(ctypes.c_long, words)))


def _write(place: str) -> None:
    path = Path(place, "written-by-a-test")
    path.write_text("")
    path.unlink()


def _read(place: str) -> None:
    if not Path(place).read_bytes():  # what is hidden may be a file that is empty
        raise FileNotFoundError(errno.ENOENT, "there is nothing in it")


def _open(place: str, flags: int = os.O_RDONLY) -> None:
    os.close(os.open(place, flags | os.O_CLOEXEC))


def _own_directory() -> str:
    """A directory that the service may write."""
    for place in (os.environ.get("STATE_DIRECTORY"), os.environ.get("RUNTIME_DIRECTORY"), "/tmp"):
        if place and os.access(place, os.W_OK):
            return place
    raise Absent


def _disk() -> None:
    """Open a disk of the machine, which is no NBD device."""
    for entry in sorted(Path("/sys/class/block").iterdir()):
        if not entry.name.startswith(("nbd", "ram", "zram")) and Path("/dev", entry.name).exists():
            return _open(f"/dev/{entry.name}")
    if any(Path("/sys/class/block").iterdir()) and not Path("/dev/kmsg").exists():
        raise PermissionError(errno.EPERM, "no disk is visible")
    raise Absent


def _made(path: str) -> None:
    """Make a device file for this machine's kernel log, and remove it."""
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 11))
    os.unlink(path)


def _set_user_id() -> None:
    path = os.path.join(_own_directory(), "set-user-id")
    Path(path).write_text("")
    try:
        os.chmod(path, 0o4755)
    finally:
        os.unlink(path)


def _run_what_was_written() -> None:
    path = os.path.join(_own_directory(), "program")
    Path(path).write_text(_SCRIPT)
    os.chmod(path, 0o755)
    try:
        _, status = os.waitpid(os.posix_spawn(path, [path], {}), 0)
    finally:
        os.unlink(path)
    if status:
        raise PermissionError(errno.EACCES, "it did not run")


def _trace() -> None:
    """Trace a process of our own."""
    child = os.fork()
    if not child:
        signal.pause()
    try:
        _call("ptrace", _PTRACE_ATTACH, child, None, None)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _in_a_child(attempt: Callable[[], None]) -> None:
    """What changes the process that does it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            attempt()
        except OSError as error:
            os.write(writer, str(error.errno).encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 16)
    os.close(reader)
    os.waitpid(child, 0)
    if said:
        raise OSError(int(said), os.strerror(int(said)))


def _mount() -> None:
    _call("mount", b"none", b"/mnt", b"tmpfs", 0, None)
    _call("umount2", b"/mnt", 0)


def _executable_memory() -> None:
    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC):
        pass


def _sysctl(name: str) -> None:
    """Write what is there already."""
    path = Path("/proc/sys", name)
    path.write_text(path.read_text())


def _socket(family: int, kind: int, protocol: int = 0) -> None:
    socket.socket(family, kind, protocol).close()


def attempts(other: int) -> dict[str, Callable[[], None]]:
    """All by name. ``other``: a process of another user."""
    return {
        "write /etc": lambda: _write("/etc"),
        "write /usr": lambda: _write("/usr"),
        "write /var/lib": lambda: _write("/var/lib"),
        "read a secret of another user": lambda: _read("/home/alice/secret"),
        "read a secret of root": lambda: _read(f"{pwd.getpwuid(0).pw_dir}/secret"),
        "read /etc/shadow": lambda: _read("/etc/shadow"),
        "send raw packets": lambda: _socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        "listen to all packets": lambda: _socket(socket.AF_PACKET, socket.SOCK_RAW),
        "another family of sockets": lambda: _socket(_AF_ALG, socket.SOCK_SEQPACKET),
        "load a module": lambda: _system_call("init_module", 0, 0, 0),
        "load a program for the kernel": lambda: _system_call("bpf", 0, 0, 0),
        "load another kernel": lambda: _system_call("kexec_load", 0, 0, 0, 0),
        "use a key ring": lambda: _system_call("keyctl", 0, -3, 0),
        "count events": lambda: _system_call("perf_event_open", 0, 0, -1, -1, 0),
        "use io_uring": lambda: _system_call("io_uring_setup", 0, 0),
        "trace a process": _trace,
        "see a process of another user": lambda: _read(f"/proc/{other}/environ"),
        "send a signal to another user": lambda: os.kill(other, 0),
        "mount": _mount,
        "change the root directory": lambda: _in_a_child(lambda: os.chroot("/")),
        "a namespace of users": lambda: _in_a_child(lambda: _call("unshare", _CLONE_NEWUSER)),
        "a namespace of mounts": lambda: _in_a_child(lambda: _call("unshare", _CLONE_NEWNS)),
        "another personality": lambda: _in_a_child(lambda: _call("personality", _PERSONALITY)),
        "run as another user": lambda: _in_a_child(lambda: os.setuid(1)),
        "run as the same user": lambda: _in_a_child(lambda: os.setuid(os.geteuid())),
        "memory to write and to execute": _executable_memory,
        "run a program that it wrote": _run_what_was_written,
        "a program with rights of its owner": _set_user_id,
        "real-time scheduling": lambda: _in_a_child(
            lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        ),
        "set a clock": lambda: _call("clock_settime", 1, (ctypes.c_long * 2)(0, 0)),
        "change the host's name": lambda: socket.sethostname(socket.gethostname()),
        "change a setting of the kernel": lambda: _sysctl("kernel/printk_ratelimit"),
        "make a group of processes": lambda: os.rmdir(_new("/sys/fs/cgroup/of-a-test")),
        "read the kernel's log": lambda: _call("klogctl", 10, None, 0),
        "open the kernel's log": lambda: _open("/dev/kmsg"),
        "open a disk": _disk,
        "make a device": lambda: _made(os.path.join(_own_directory(), "device")),
        "restart the machine": lambda: _call("reboot", 0x1234),  # no command that there is
    }


def _new(place: str) -> str:
    os.mkdir(place)
    return place


def main() -> None:
    ended = {}
    for name, attempt in attempts(int(sys.argv[1])).items():
        try:
            attempt()
        except Absent:
            ended[name] = "absent"
        except OSError as error:
            ended[name] = errno.errorcode.get(error.errno or 0, "?")
        else:
            ended[name] = "done"
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
