"""scripts/lab itself: output and exit status, and its errors when no guest can run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from lablib import __main__ as command_line
from lablib import acceleration, host, kernel, user_mode, vm
from lablib.host import path, why_not
from lablib.setups import SETUPS
from lablib.wish import Wish

from tests.support.target import ROOT
from tests.support.until import until_blocking

SCRIPT = str(ROOT / "scripts" / "lab")
CONSOLE_OF_A_PANIC = "Kernel panic - not syncing: sysrq triggered crash"


def lab(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, check=False)


def descendants(process: int) -> list[int]:
    """The processes that it has started, those of these, and so on."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [pid for child in map(int, children) for pid in (child, *descendants(child))]


@pytest.fixture
def guests(request: pytest.FixtureRequest) -> None:
    """Skip where no guest can run."""
    if request.config.getoption("--no-lab"):
        pytest.skip("needs a virtual machine, and --no-lab")
    reason = why_not("none")
    if reason is not None:
        pytest.skip(f"no virtual machine: {reason}")


def test_the_list_names_every_set_up() -> None:
    done = lab("--list")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.decode().splitlines()] == list(SETUPS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--setup", "frobnicate", "true"], "no set-up is called frobnicate"),
        (["--setup", "none"], "no COMMAND"),
        (["--forward", "80", "true"], "--forward 80"),
        (["--timeout", "0", "true"], "--timeout"),
        (["--memory", "2X", "true"], "--memory 2X"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str) -> None:
    done = lab(*arguments)
    assert done.returncode == 7
    assert words in done.stderr.decode()


# pytest, where whatever starts a guest ends it.
WITHOUT_GUESTS = """\
import sys
import pytest
sys.path.insert(0, "scripts")
from tests.lab import guests
guests.Guest = None
sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_no_guest_is_started_for_tests_that_are_skipped() -> None:
    """They are the only ones of their set-up."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GUESTS, "tests/lab/guest/test_siw_lio_net_copy.py"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0 and " 2 skipped in" in done.stdout, done.stdout
    assert "takes minutes: runs with --long only" in done.stdout


@pytest.mark.parametrize("lib", ["lib", "usr/lib"])
def test_a_kernel_has_modules_where_its_release_puts_them(
    lib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages of Debian 13 have no /lib, which is a link to /usr/lib there."""

    class FakeArchive:
        def __init__(self, scratch: Path) -> None: ...

        def dependencies(self, package: str) -> dict[str, str]:
            return {"linux-image-6.12.1-amd64": "6.12.1-1"}

        def unpack(self, packages: list[str], directory: Path) -> None:
            (directory / "boot").mkdir(parents=True)
            (directory / "boot" / "vmlinuz-6.12.1-amd64").touch()
            (directory / lib / "modules" / "6.12.1-amd64").mkdir(parents=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", path())
    monkeypatch.setattr(kernel, "Archive", FakeArchive)
    found = kernel.the_kernel()
    assert found.release == "6.12.1-amd64"
    assert (found.modules / "modules.dep").exists()


@pytest.mark.parametrize("in_turn", [True, False])
def test_emulated_processors_run_in_turn_where_that_is_asked_for(
    in_turn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is started in place of qemu prints its arguments."""
    programs, root = tmp_path / "bin", tmp_path / "kernel"
    for directory in (programs, root / "boot", root / "lib" / "modules" / "6.1.1"):
        directory.mkdir(parents=True)
    (root / "boot" / "vmlinuz-6.1.1").touch()
    emulator = programs / "qemu-system-x86_64"
    emulator.write_text('#!/bin/sh\necho "$@" >&2\n')
    emulator.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{path()}")
    wish = Wish(kernel.Kernel(root), in_turn=in_turn)
    with vm.Machine(wish, ["true"]) as machine, pytest.raises(vm.Died) as how:
        machine.wait(60)
    assert "-smp 2" in str(how.value)
    assert ("-accel tcg,thread=single" in str(how.value)) is in_turn
    assert "-global virtio-pci.ioeventfd=off" in str(how.value)


def test_guests_in_user_mode_have_different_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there are any left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3, 5})
    with user_mode.processor() as first:
        with user_mode.processor() as second, user_mode.processor() as third:
            assert {first, second} == {3, 5} and third in (3, 5)
        with user_mode.processor() as again:
            assert again == second


@pytest.mark.parametrize("directory", ["/var/tmp/clone", "/run/user/0/clone"])
def test_a_checkout_that_guests_do_not_see(monkeypatch: pytest.MonkeyPatch, directory: str) -> None:
    monkeypatch.setattr(host, "TOP", Path(directory))
    reason = host.why_not("none")
    assert reason is not None and reason.startswith(f"{directory}: guests do not see /")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("guests")
@pytest.mark.parametrize("how", ["--in-turn", "--user-mode"])
def test_output_and_exit_status_come_through_unchanged(how: str, tmp_path: Path) -> None:
    """Every byte value comes through, on both streams at once; the guest's own messages do not."""
    data = tmp_path / "data"
    data.write_bytes(bytes(range(256)) + random.Random(1).randbytes(1 << 20))
    results = tmp_path / "results"
    written = tmp_path / "written-in-the-guest"
    script = 'cat "$0" >&2 & cat "$0"; wait; echo kept >"$LAB_RESULTS/kept"; echo >"$1"; exit 77'
    done = lab(how, "--results", str(results), "sh", "-c", script, str(data), str(written))
    assert done.returncode == 77
    # (Not pytest's comparison of long bytes: showing a difference would take hours.)
    content = data.read_bytes()
    came = done.stdout == content
    assert came
    # The first guest of a machine tries which acceleration works, and says so.
    said = done.stderr.removesuffix(content)
    assert len(said) == len(done.stderr) - len(content)
    assert all(line.startswith(b"lab: ") for line in said.splitlines()), said[:500]
    assert (results / "kept").read_text() == "kept\n"
    assert "Linux version" in (results / "console").read_text(errors="replace")
    assert not written.exists()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("guests")
@pytest.mark.parametrize(("setup", "mode"), [("ip", "1\n"), ("rxe", "\n")])
def test_a_guest_without_rdma_is_in_user_mode(setup: str, mode: str) -> None:
    if acceleration.usable(kernel.the_kernel()):
        pytest.skip("this machine has hardware acceleration, which is faster")
    if os.geteuid() != 0 or not acceleration.usable(kernel.user_mode_kernel()):
        pytest.skip("no kernel in user mode works here: root or ptrace is missing")
    done = lab("--in-turn", "--user-mode", "--setup", setup, "printenv", "LAB_USER_MODE")
    assert (done.returncode, done.stdout.decode()) == (0, mode)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("guests")
def test_no_process_of_a_guest_outlives_scripts_lab() -> None:
    """In user mode the guest's processes are the host's, too."""
    command = [SCRIPT, "--user-mode", "sh", "-c", "echo started; sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        theirs = descendants(process.pid)
        assert theirs
        process.kill()
    until_blocking(lambda: not any(Path(f"/proc/{pid}").exists() for pid in theirs))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("guests")
@pytest.mark.parametrize("how", ["--in-turn", "--user-mode"])
def test_a_panic_is_reported(how: str) -> None:
    # Output takes a moment from the command to the host, and a panic does not wait for it.
    done = lab(how, "sh", "-c", "echo before; sleep 2; echo c >/proc/sysrq-trigger")
    assert (done.returncode, done.stdout) == (1, b"before\n")
    first, *rest = done.stderr.decode().splitlines()
    assert first.startswith("lab: the guest died: ") and CONSOLE_OF_A_PANIC in first
    assert any(line.startswith("  console: ") for line in rest)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("guests")
def test_the_time_limit() -> None:
    done = lab("--timeout", "5", "sleep", "1000")
    assert done.returncode == 1
    assert done.stderr.decode().startswith("lab: the guest was ended after 5 s\n")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("guests")
def test_a_guest_that_does_not_boot_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Emulated kernels hang now and then. Here the time limit is too short for any boot."""
    monkeypatch.setattr(vm, "BOOT_S", 0.5)
    monkeypatch.setenv("PATH", path())
    with pytest.raises(vm.NotBooted, match="has not booted within"):
        command_line.lab.main(["true"], standalone_mode=False)
    assert capfd.readouterr().err.count("; starting another guest") == 2
