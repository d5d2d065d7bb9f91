"""Mistakes of a user, a target or the system, in every program that takes a URL.

Each ends in one line that names the thing, with the exit status of its kind, and loses no data.
tests/test_url.py and tests/test_iserblk_options.py have URLs and options in detail,
test_every_command.py and test_target.py what single commands refuse, test_interrupted.py signals
and closed streams.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from iserblk.nbd.kernel.programs import nbdkit_environment
from tests.cli.commands import COMMAND, bad, environment, good
from tests.cli.ways import FUSE, WAYS, ended, one_line
from tests.support.fuse import need_fuse, running_mount
from tests.support.nbdkit import need, running_nbd
from tests.support.target import END_S, IQN, ROOT, TargetProcess, running_target

GIB = 1 << 30
SIZE = 4 * GIB + 8192  # LUN 0, a sparse file: offsets and lengths beyond 32 bits

# The target's command, with disks that say they are tapes (SPC-4 table 148).
TAPES = """
import runpy
from iserblk.scsi import inquiry
inquiry.DISK = 1
runpy.run_module("tests.support.serve", run_name="__main__")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(files: Path) -> Iterator[TargetProcess]:
    """LUN 0 is large, LUN 1 read-only."""
    (files / "read-only").write_bytes(b"written once" * 4096)
    specs = [f"{files}/large:size={SIZE}", f"{files}/read-only:ro"]
    with running_target(specs, files / "log") as process:
        yield process


@pytest.fixture(scope="module")
def url(target: TargetProcess) -> str:
    return target.url


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "place"
    directory.mkdir()
    return directory


@pytest.fixture
def rest(url: str, files: Path) -> Iterator[None]:
    """Check after each test that the target still serves, and that the read-only file has not
    changed."""
    yield
    good("info", f"{url}/0")
    assert (files / "read-only").read_bytes() == b"written once" * 4096


# --- every program says the same ---------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_refuses_alike(way: str, url: str, place: Path, rest: None) -> None:
    need("nbdkit")
    need_fuse()
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        silent = f"iser://127.0.0.1:{reserved.getsockname()[1]}/{IQN}/0"
        for text, status, words in (
            (f"{url}/0?colour=blue", 7, "colour"),
            (f"{url}/0?style=stream&rcap=verbs", 27, "style=stream"),
            (silent, 4, "Connection refused; is the target listening there?"),
            (f"{url}/7", 21, "no LUN 7"),
        ):
            line = one_line(ended(WAYS[way].call(text, place)), WAYS[way].status(status))
            assert line.startswith(WAYS[way].prefix)
            assert words in line
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("way", ["info", "copy from", "mount", "nbdkit"])
def test_a_lun_that_is_no_disk(way: str, place: Path, tmp_path: Path) -> None:
    need("nbdkit")
    need_fuse()
    (tmp_path / "tape").write_bytes(bytes(1 << 20))
    tapes = [sys.executable, "-c", TAPES, "127.0.0.1:0", IQN, str(tmp_path / "tape")]
    with running(tapes, tmp_path / "log") as (process, ready):
        for text, status, words in (
            (f"{ready}/0", 27, "LUN 0 is no disk but a tape; name another LUN"),
            (ready, 21, "no disks for us"),
        ):
            line = one_line(ended(WAYS[way].call(text, place)), WAYS[way].status(status))
            assert words in line
        process.terminate()
        assert process.wait(END_S) == 0
    assert list(place.iterdir()) == []


@contextmanager
def running(words: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server of any kind; yields what it printed behind ``ready``."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(),
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        word, _, ready = process.stdout.readline().strip().partition(" ")
        assert word == "ready", log.read_text()
        yield process, ready
    finally:
        process.kill()
        process.communicate()


# --- ports that speak something else -----------------------------------------------------------


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """A server that reads, sends ``answer`` and closes; None: closes at once. Yields a URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    connection, _ = server.accept()
                    with connection:
                        if answer is not None:
                            connection.recv(1000)
                            connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"iser://127.0.0.1:{server.getsockname()[1]}/{IQN}/0"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "closed the connection during MPA start-up"),
        (b"", "closed the connection during MPA start-up"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a web server answers there, no target: correct"),
        (b"MPA ID Rep Frame\x60\x01\0\0", "rejected"),
        (b"MPA ID Req Frame\x40\x01\0\0", "initiator"),
        (b"MPA ID Rep Frame\x40\x01\0\4\0\0\0\0" + b"\0\2xx" * 20, "ULPDU"),
    ],
)
def test_a_port_that_speaks_something_else(answer: bytes | None, words: str) -> None:
    with answering(answer) as portal:
        line = bad(4, "info", portal)
    assert words in line
    assert line.count("127.0.0.1:") == line.count("iscsi://") + 1
    assert line.count("MPA: ") <= 1


def test_a_portal_that_rejects_all() -> None:
    """It is one of Traditional iSCSI, whatever it has against the login."""
    with answering(b"\x3f" + bytes(47)) as portal:
        line = bad(5, "info", portal)
    assert "rejected the login request" in line and "then write iscsi:// for iser://" in line


def test_a_port_that_says_nothing() -> None:
    """A port that is silent to MPA and to logins."""
    impatient = (
        "from iserblk.cli.main import main\n"
        "from iserblk.initiator.connecting import reach, speakers\n"
        "reach.CONNECT_TIMEOUT_S = reach.LOGIN_TIMEOUT_S = speakers.ANSWER_S = 0.2; main()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        portal = f"iser://127.0.0.1:{server.getsockname()[1]}/{IQN}/0"
        line = one_line(ended([sys.executable, "-c", impatient, "info", portal]), 8)
    assert "sent no MPA Reply within 0.2 s: is it an iSER portal?" in line
    assert "with style=stream: no login within 0.2 s" in line


# --- URLs that are none --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("info {}", 7, "the // behind its scheme is missing; write iser://HOST/"),
        ("attach {}", 7, "the // behind its scheme is missing"),
        ("attach {} /dev/nbd0", 7, "the // behind its scheme is missing"),
        ("copy {} {at}/file", 7, "the // behind its scheme is missing"),
        ("copy README.md {}", 7, "the // behind its scheme is missing"),
        ("target --iqn iqn.2026-11.example:a --lun {}", 7, "the // behind its scheme is missing"),
        ("mount {} {at}", 1, "the // behind its scheme is missing"),
        ("mount iser://h/iqn.2026-11.example:a {}", 1, "a URL stands in place of the mount point"),
        ("umount {}", 1, "a URL stands in place of the mount point"),
        ("detach {}", 7, "a URL stands in place of the device"),
        ("stats {}", 7, "a URL stands in place of the device"),
        ("{}", 7, "No such command"),
        ("discover {}", 7, "write HOST[:PORT], or a URL"),
        ("doctor {}", 7, "write HOST[:PORT], or a URL"),
        ("doctor host {}", 7, "write HOST[:PORT], or a URL"),
        ("doctor --html {}", 7, "--html needs a FILE in front of the URL"),
        ("doctor --html {at}/f {}", 7, "write HOST[:PORT], or a URL"),
        ("nbd {} --socket {at}/s", 7, "the // behind its scheme is missing"),
    ],
)
def test_a_secret_in_what_is_no_url_is_not_shown(
    words: str, status: int, said: str, place: Path
) -> None:
    """A slash is missing: each command says so, or what is in the wrong place, without the
    secret."""
    need_fuse()
    wrong = f"iser:/user%hush@host/{IQN}/0"
    line = bad(status, *words.replace("{}", wrong).replace("{at}", str(place)).split(" "))
    assert said in line
    assert "hush" not in line
    assert list(place.iterdir()) == []


# --- missing things ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "way", "status"),
    [
        ("click", "info", 1),
        ("trio", "info", 1),
        ("trio", "nbd", 1),
        ("trio", "nbd --nbdkit", 1),
        ("trio", "mount", 2),
        ("trio", "fuse_mount", 2),
        ("trio", "nbdkit", 1),
        ("crc32c", "info", 1),
        ("crc32c", "nbdkit", 1),
        ("rich", "top", 1),
        ("pyfuse3", "mount", 2),
        ("pyfuse3", "mount -f", 2),
        ("pyfuse3", "fuse_mount", 2),
    ],
)
def test_a_missing_package(
    package: str, way: str, status: int, url: str, place: Path, tmp_path: Path
) -> None:
    need("nbdkit")
    absent = f"raise ModuleNotFoundError('No module named {package}', name='{package}')"
    (tmp_path / f"{package}.py").write_text(absent)
    if package == "crc32c":  # it stands for a compiled module
        hide = "import sys\nsys.modules['iserblk._crc'] = None\n"
        (tmp_path / "sitecustomize.py").write_text(hide)
    call = WAYS[way].call(f"{url}/0", place) if way in WAYS else [*COMMAND, way]
    # nbdkit's message differs where another Python (a .venv, say) comes before its own.
    path = nbdkit_environment()["PATH"]
    line = one_line(ended(call, PYTHONPATH=f"{tmp_path}:{ROOT}", PATH=path), status)
    assert package in line
    assert "run scripts/setup" in line
    assert list(place.iterdir()) == []


def hidden(directory: str, command: str) -> subprocess.CompletedProcess[str]:
    """``command``, to run with an empty ``directory``, in a mount namespace of its own."""
    if os.geteuid():
        pytest.skip(f"a mount namespace without {directory} needs root")
    trial = subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True, text=True, check=False, timeout=60
    )
    if trial.returncode:
        pytest.skip(f"no mount namespaces here: {trial.stderr.strip()}")
    return ended(
        ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {directory} && {command}"]
    )


def test_no_fuse_device(url: str, place: Path) -> None:
    done = hidden("/dev", f"exec {' '.join(FUSE)} {url}/0 {place}")
    assert "no /dev/fuse: run modprobe fuse" in one_line(done, 2)


def test_no_nbdkit(url: str, tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    command = f"PATH={tmp_path} exec {' '.join(COMMAND)} nbd {url}/0 --socket {tmp_path}/s --nbdkit"
    done = hidden("/usr/sbin", command)
    assert "nbdkit is missing: run scripts/setup" in one_line(done, 1)


# --- read-only LUNs ----------------------------------------------------------------------------


def test_a_read_only_lun_is_not_written(url: str, tmp_path: Path, rest: None) -> None:
    (tmp_path / "small").write_bytes(b"x" * 512)
    lun = f"{url}/1"
    for words in (
        ("copy", tmp_path / "small", lun),
        ("trim", lun, "--all"),
        ("bench", lun, "--rw", "randwrite", "--destroy"),
    ):
        assert "read-only" in bad(13, *words)


def test_a_read_only_lun_through_fuse(url: str, place: Path, rest: None) -> None:
    need_fuse()
    with running_mount([f"{url}/1"], place):
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC):
            with pytest.raises(OSError, match="Read-only file system"):
                os.open(place / "lun1", flags)
        assert (place / "lun1").read_bytes() == b"written once" * 4096


@pytest.mark.parametrize("by", ["iserblk", "nbdkit"])
def test_a_read_only_lun_through_nbd(by: str, url: str, tmp_path: Path, rest: None) -> None:
    nbd = pytest.importorskip("nbd", reason="libnbd's Python module: python3-libnbd")
    need(*(["nbdkit"] if by == "nbdkit" else []))
    with running_nbd(by, [f"{url}/1"], tmp_path) as uri:
        client = nbd.NBD()
        client.connect_uri(uri)
        assert client.is_read_only()
        client.set_strict_mode(0)  # send the request anyway
        for request in (
            lambda: client.pwrite(b"x" * 512, 0),
            lambda: client.trim(4096, 0),
            lambda: client.zero(4096, 0),
        ):
            with pytest.raises(nbd.Error) as caught:
                request()  # type: ignore[no-untyped-call]
            assert caught.value.errno == "EPERM"
        client.shutdown()


# --- the edges of a LUN ------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["iserblk", "nbdkit"])
def test_edges_through_nbd(by: str, url: str, files: Path, tmp_path: Path, rest: None) -> None:
    nbd = pytest.importorskip("nbd", reason="libnbd's Python module: python3-libnbd")
    need(*(["nbdkit"] if by == "nbdkit" else []))
    with running_nbd(by, [f"{url}/0"], tmp_path) as uri:
        client = nbd.NBD()
        client.connect_uri(uri)
        client.set_strict_mode(0)  # let the server judge
        client.pwrite(b"before", SIZE - 6)
        for request in (
            lambda: client.pread(1, SIZE),
            lambda: client.pread(512, SIZE - 511),
            lambda: client.pread(1, (1 << 63) - 1),
            lambda: client.pwrite(b"x", SIZE),
            lambda: client.pwrite(b"x" * 7, SIZE - 6),
            lambda: client.trim(4 * GIB - 1, 8194),
            lambda: client.zero(4 * GIB - 1, 8194),
            lambda: client.trim(1, SIZE),
        ):
            with pytest.raises(nbd.Error):
                request()  # type: ignore[no-untyped-call]
        assert client.pread(6, SIZE - 6) == b"before"
        client.pwrite(b"unaligned", 4 * GIB - 5)  # across 32 bits
        assert client.pread(11, 4 * GIB - 6) == b"\0unaligned\0"
        client.zero(4 * GIB - 1, 1)  # the largest length that NBD has
        assert client.pread(11, 4 * GIB - 6) == b"\0\0\0\0\0\0gned\0"
        client.pwrite(b"kept", SIZE - 8192)
        client.trim(4 * GIB - 1, 0)
        assert client.pread(4, SIZE - 8192) == b"kept"
        assert client.pread(6, SIZE - 6) == b"before"
        client.shutdown()
    assert (files / "large").stat().st_size == SIZE


def test_edges_through_fuse(url: str, files: Path, place: Path, rest: None) -> None:
    need_fuse()
    with running_mount([f"{url}/0"], place):
        fd = os.open(place / "lun0", os.O_RDWR | os.O_TRUNC)
        try:
            os.pwrite(fd, b"before", SIZE - 6)
            assert os.pread(fd, 0, 0) == os.pread(fd, 10, SIZE) == b""
            assert os.pread(fd, 10, SIZE - 6) == b"before"
            assert os.pwrite(fd, b"", 5) == 0
            with pytest.raises(OSError, match="No space left"):
                os.pwrite(fd, b"x", SIZE)
            assert os.pwrite(fd, b"ORE---", SIZE - 3) == 3
            assert os.pread(fd, 10, SIZE - 6) == b"befORE"
            with pytest.raises(OSError, match="File too large"):
                os.ftruncate(fd, SIZE + 1)
            os.ftruncate(fd, 4 * GIB - 1)  # changes nothing
            os.pwrite(fd, b"unaligned", 4 * GIB - 5)
            assert os.pread(fd, 11, 4 * GIB - 6) == b"\0unaligned\0"
            os.fsync(fd)
        finally:
            os.close(fd)
        with pytest.raises(PermissionError):
            os.unlink(place / "lun0")
    assert (files / "large").stat().st_size == SIZE


def test_edges_of_trim(url: str, rest: None) -> None:
    lun = f"{url}/0"
    good("trim", lun, "--length", 4 * GIB - 1)
    good("trim", lun, "--offset", SIZE)
    good("trim", lun, "--offset", 1, "--length", 0)
    for words in (["--offset", SIZE + 1], ["--offset", 8193, "--length", 4 * GIB]):
        assert f"has {SIZE} bytes" in bad(7, "trim", lun, *words)


# --- mount points ------------------------------------------------------------------------------


def test_mount_points(url: str, place: Path, tmp_path: Path) -> None:
    need_fuse()
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with running_mount([f"{url}/0"], place):
        for at, words in (
            (tmp_path / "missing", "no such directory"),
            (tmp_path / "file", "not a directory"),
            (tmp_path / "full", "not empty"),
            ("", "mount point is empty"),
            (place, "mounted there already"),
        ):
            assert words in bad(1, "mount", f"{url}/1", at)
        with (place / "lun0").open("rb"):
            assert "target is busy" in bad(32, "umount", place)
        assert os.listdir(place) == ["lun0"]
    assert "no LUNs are mounted there" in bad(1, "umount", place)
    assert "no LUNs are mounted there" in bad(1, "umount", tmp_path / "missing")
    assert os.listdir(tmp_path / "full") == ["precious"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("colour", "-o colour: unknown option"),
        ("colour=blue", "unknown option 'colour'"),
        ("ro=yes", "ro takes no value"),
        ("io-timeout", "has no value"),
        ("io-timeout=soon", "give seconds"),
        ("uid=root", "must be a number"),
        ("umask=999", "octal digits"),
    ],
)
def test_mount_options(options: str, words: str, url: str, place: Path) -> None:
    need_fuse()
    assert words in bad(1, "mount", url, place, "-o", options)
