"""Starts a virtual machine, by virtme-ng.

virtme-ng boots the kernel on the host's own root file system, copy-on-write. The lab adds two
virtio ports for the command's output, and a directory that both host and guest may write.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lablib.wish import GUEST, Wish

# Directories that the guest may change in its own memory; guest/virtme.sh adds checkout and home.
_OVERLAYS = ("/etc", "/lib", "/home", "/opt", "/srv", "/usr", "/var", "/tmp")
_MOST_PORTS = 3  # of one device, with number 0, which is the console's
# virtme-run is called as a module: the script in .venv/bin names its interpreter by where the
# checkout was when it was installed.
_VIRTME = "import sys; from virtme.commands.run import main; sys.exit(main())"


def words(wish: Wish, directory: Path, out: int, err: int) -> list[object]:
    """The command that runs ``virtme.sh DIRECTORY`` in a virtual machine. ``out`` and ``err`` are
    descriptors that take what the guest's command says."""
    writable = [directory, *([wish.results] if wish.results else [])]
    return [
        *(sys.executable, "-P", "-c", _VIRTME),
        *([] if wish.kvm else ["--disable-kvm", f"--kopt={_EMULATED_KERNEL}"]),
        *("--mods=auto", "--force-9p", "--kimg", wish.kernel.image, "--cpus", wish.cpus),
        *("--memory", wish.memory, "--name", "lab", "--show-boot-console"),
        *(f"--overlay-rwdir={path}" for path in _OVERLAYS if Path(path).is_dir()),
        *(f"--rwdir={path}" for path in writable),
        *(f"--kopt={option}" for option in _KERNEL_OPTIONS),
        *(f"--qemu-opt={option}" for option in _devices(wish, out, err)),
        f"--script-sh=exec bash {GUEST / 'virtme.sh'} {directory}",
    ]


def _devices(wish: Wish, out: int, err: int) -> list[str]:
    options = [] if wish.kvm else ["-cpu", _EMULATED_CPU, *_FEW_DESCRIPTORS]
    if wish.in_turn and not wish.kvm:
        options += ["-accel", _IN_TURN]
    options += [
        *("-fsdev", "local,id=lab-root,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=lab-root,mount_tag=lab.root"),
        *("-device", "virtio-serial-pci,id=lab"),
    ]
    for name, descriptor in (("out", out), ("err", err)):
        options += [
            *("-chardev", f"file,id=lab-{name},path=/proc/self/fd/{descriptor}"),
            *("-device", f"virtserialport,bus=lab.0,name=lab.{name},chardev=lab-{name}"),
        ]
    if wish.network or wish.forwards:
        forwards = "".join(
            f",hostfwd=tcp:127.0.0.1:{host}-10.0.2.15:{guest}" for host, guest in wish.forwards
        )
        options += [
            *("-netdev", f"user,id=lab-net{forwards}"),
            *("-device", "virtio-net-pci,netdev=lab-net,romfile="),
        ]
    return options


# An emulated processor works through a string instruction (rep movs, rep stos) step by step. Where
# it has these features the kernel and the C library copy with them, a byte a step: two to six times
# slower than with other loops.
_EMULATED_CPU = "max,-erms,-fsrm"
_EMULATED_KERNEL = "clearcpuid=rep_good"
# With a thread for each processor every atomic instruction is one of the host, too, and who waits
# for a lock burns the time of the thread that has it. With one thread a guest takes a fifth to a
# third less (docs/lab.md).
_IN_TURN = "tcg,thread=single"
# Each queue of a device has a descriptor that qemu's main loop waits for, and a device of serial
# ports has 64 queues: with virtme-ng's seven devices a wake-up looked at 450 of them, which took a
# quarter of the guest's processor time. What the guest asks for is done at once instead.
_FEW_DESCRIPTORS = (
    *("-global", "virtio-pci.ioeventfd=off"),
    *("-global", f"virtio-serial-device.max_ports={_MOST_PORTS}"),
)
_KERNEL_OPTIONS = (
    "ignore_loglevel",
    "oops=panic",  # a damaged kernel is of no use; without this it goes on without one task
    "net.ifnames=0",
    "no_timer_check",  # on a busy host the emulated timer is late, and the kernel gives up
    "tsc=reliable",  # other clocks are emulated devices, and slow to read
    "mitigations=off",
    "no5lvl",
    "init_on_alloc=0",  # else each page is written once more
    f"PATH={GUEST / 'bin'}:/sbin:/usr/sbin:/bin:/usr/bin",  # virtme-ng's init adds to it
)
