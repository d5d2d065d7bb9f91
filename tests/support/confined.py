"""What is forbidden (forbidden.py), tried inside of a systemd: with the settings of a unit, and
with none."""

from __future__ import annotations

import json
import os
import pwd

from tests.support.manager import UID, USER, Manager

# How an attempt ends that is refused: by a right, by a read-only or hidden file, by a family of
# sockets that there is not.
REFUSALS = {"EPERM", "EACCES", "EROFS", "ENOENT", "EAFNOSUPPORT"}
_PROGRAM = "/usr/lib/checkout/tests/support/forbidden.py"
_OTHER = "other-user.service"
_FREE = "free"


def unit_settings() -> dict[str, str]:
    """Of the environment of these tests, what services need for the same form of the data path."""
    return {name: value for name, value in os.environ.items() if name == "ISERBLK_PLAIN"}


def unconfined(manager: Manager) -> dict[str, str]:
    """How each attempt ends for root, in a service without settings. What this kernel does not have
    at all is ``absent``."""
    unit = manager.path("/run/units/free@.service")
    unit.write_text("[Service]\nStateDirectory=free\n")
    ended = by_a_unit(manager, _FREE)
    return {name: "absent" if how == "EAFNOSUPPORT" else how for name, how in ended.items()}


def allowed(manager: Manager, name: str, able: dict[str, str]) -> dict[str, str]:
    """What is not refused under a unit's own settings. ``able``: of ``unconfined``."""
    ended = by_a_unit(manager, name)
    return {
        name: how for name, how in ended.items() if how not in REFUSALS and able[name] != "absent"
    }


def by_a_unit(manager: Manager, name: str) -> dict[str, str]:
    """How each attempt ends under a unit's own settings: only its command is another."""
    template = "" if name == "exporter" else "@probe"
    unit = f"{name if name == _FREE else f'iserblk-{name}'}{template}.service"
    place = f"/run/ended-{name}"
    _secrets(manager)
    manager.drop_in(
        unit, "Type=oneshot", "ExecStart=",
        f"ExecStart=/usr/bin/python3 -P {_PROGRAM} {_other(manager)}",
        "ExecReload=", "ExecStop=", "ExecStopPost=", "Restart=no", "EnvironmentFile=",
        f"StandardOutput=truncate:{place}",
    )  # fmt: skip
    try:
        manager.start(unit)
    finally:
        manager.path(f"/run/units/{unit}.d/tests.conf").unlink()
    ended = json.loads(manager.path(place).read_text())
    assert isinstance(ended, dict)
    return ended


def _secrets(manager: Manager) -> None:
    """A file that only its owner can read, of a user and of root."""
    of_root = f"{pwd.getpwuid(0).pw_dir}/secret"
    for place, uid in ((f"/home/{USER}/secret", UID), (of_root, 0), ("/etc/shadow", 0)):
        path = manager.path(place)
        path.write_text("a secret\n")
        path.chmod(0o600)
        os.chown(path, uid, uid)


def _other(manager: Manager) -> int:
    """A process of another user."""
    unit = manager.path(f"/run/units/{_OTHER}")
    if not unit.exists():
        unit.write_text(f"[Service]\nUser={USER}\nExecStart=/bin/sleep infinity\n")
        manager.start(_OTHER)
    said = manager.run("systemctl", "show", "--property=MainPID", "--value", _OTHER)
    return int(said.stdout)
