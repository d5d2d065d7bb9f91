"""Every module has its test module where one looks for it, and no two are of one name."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PACKAGES = ("iserblk", "fuse_mount", "nbd_plugin")

# Modules without a test module of their own, and where they are tested instead; or why not.
ELSEWHERE: dict[str, str] = {
    "iserblk/asyncio.py": "tests/integration/test_asyncio.py",
    "iserblk/aio.py": "tests/test_public_names.py",
    "fuse_mount/__main__.py": "tests/fuse_mount/test_mount.py runs it as a program",
    "iserblk/__main__.py": "tests/cli/test_main.py runs it as a program",
    "iserblk/cli/__main__.py": "tests/cli/test_main.py runs it as a program",
    "iserblk/cli/add.py": "tests/cli/test_named.py",
    "iserblk/cli/attach.py": "tests/nbd/kernel/test_attaching.py",
    "iserblk/cli/csi.py": "tests/csi/test_csi_server.py",
    "iserblk/cli/detach.py": "tests/nbd/kernel/test_attaching.py",
    "iserblk/cli/disable.py": "tests/cli/test_named_units.py",
    "iserblk/cli/enable.py": "tests/cli/test_named_units.py",
    "iserblk/cli/list.py": "tests/cli/test_named.py",
    "iserblk/cli/named_rows.py": "tests/cli/test_named.py",
    "iserblk/cli/remove.py": "tests/cli/test_named.py",
    "iserblk/cli/show.py": "tests/cli/test_named.py",
    "iserblk/commands/session.py": "Protocols; tests/disk/lun runs on a fake of them",
    "iserblk/csi/messages.py": "tests/csi/test_csi_server.py",
    "iserblk/csi/refusals.py": "an error and its codes; tests/csi/test_csi_node.py",
    "iserblk/csi/volumes.py": "tests/csi/test_csi_node.py",
    "iserblk/datamover/seam.py": "Protocols and the slots; tests/contract/test_datamover.py",
    "iserblk/datamover/tcp_initiator.py": (
        "tests/contract/test_datamover_tcp.py and tests/contract/test_datamover.py"
    ),
    "iserblk/datamover/tcp_plain_initiator.py": (
        "tests/contract/test_datamover_tcp.py and tests/contract/test_datamover.py"
    ),
    "iserblk/datamover/tcp_plain_target.py": (
        "tests/contract/test_datamover_tcp.py and tests/contract/test_datamover.py"
    ),
    "iserblk/datamover/tcp_recovering_initiator.py": "tests/contract/test_datamover_recovery.py",
    "iserblk/datamover/tcp_recovering_target.py": "tests/contract/test_datamover_recovery.py",
    "iserblk/datamover/tcp_target.py": (
        "tests/contract/test_datamover_tcp.py and tests/contract/test_datamover.py"
    ),
    "iserblk/discovery/isns_connection.py": (
        "tests/target/announcing/test_announcing_isns.py and tests/integration/test_isns_server.py"
    ),
    "iserblk/discovery/multicast.py": (
        "sockets, tests/target/announcing/test_announcing_slp.py on loopback"
    ),
    "iserblk/discovery/slp_connection.py": "tests/target/announcing/test_announcing_slp.py",
    "iserblk/disk/aio.py": "tests/integration/test_disk_data.py, through both faces",
    "iserblk/disk/asyncio.py": "tests/integration/test_asyncio.py",
    "iserblk/disk/blocking.py": (
        "tests/disk/test_disk_thread.py and tests/integration/test_disk_data.py, through both faces"
    ),
    "iserblk/disk/multipath/failback.py": "tests/integration/test_fail_back.py",
    "iserblk/disk/durability/seam.py": (
        "a Protocol; tests/disk/durability/test_journal_model.py with two that implement it"
    ),
    "iserblk/disk/seam.py": "Protocols; tests/integration/test_disk_data.py runs both faces",
    "iserblk/doctor/finding.py": "a record; tests/doctor/test_report.py",
    "iserblk/gateway/store.py": "tests/integration/test_gateway.py",
    "iserblk/initiator/connecting/reach.py": (
        "tests/initiator/connecting/test_verbs.py and tests/integration/test_portals.py"
    ),
    "iserblk/initiator/connecting/send_targets.py": "tests/cli/test_discover.py",
    "iserblk/initiator/session/connection.py": (
        "tests/initiator/session/test_several.py and tests/initiator/session/test_sending.py"
    ),
    "iserblk/initiator/session/driving.py": ("a Protocol; tests/initiator/drivers/test_tasks.py"),
    "iserblk/loop/epoll.py": "tests/contract/test_loops.py",
    "iserblk/loop/guest.py": "tests/contract/test_loops.py",
    "iserblk/loop/here.py": "tests/contract/test_loops.py",
    "iserblk/loop/seam.py": "Protocols; tests/contract/test_loops.py",
    "iserblk/loop/work.py": "tests/loop/test_workers.py",
    "iserblk/rcap/iwarp/llp.py": (
        "tests/rcap/iwarp/test_iwarp_queuepair.py, on TCP and on a socket that is not TCP"
    ),
    "iserblk/rcap/seam.py": "Protocols; tests/contract/test_queuepair.py",
    "iserblk/rcap/verbs/api.py": "pyverbs' names in one place; tests/rcap/verbs/test_statuses.py",
    "iserblk/rcap/verbs/cm.py": (
        "rdma_cm, which wants a device: tests/lab/guest/test_rxe_contract_endings.py"
    ),
    "iserblk/rcap/verbs/connecting.py": "tests/initiator/connecting/test_verbs.py",
    "iserblk/rcap/verbs/memory.py": "tests/contract/test_queuepair.py, on devices that are fake",
    "iserblk/rcap/verbs/receiving.py": "tests/contract/test_queuepair.py, on devices that are fake",
    "iserblk/scsi/tasks.py": "constants; tests/target/test_task_set.py",
    "iserblk/target/announcing/announced.py": "tests/target/announcing/test_slp_agent.py",
    "iserblk/target/attending.py": (
        "tests/target/test_server.py, tests/target/test_server_floods.py and "
        "tests/target/test_server_endings.py"
    ),
    "iserblk/target/iscsi/login.py": (
        "tests/target/test_target_iser_login.py and tests/target/test_server_users.py"
    ),
    "iserblk/target/iscsi/requests.py": (
        "tests/target/iscsi/test_connection.py and tests/target/iscsi/test_session_joining.py"
    ),
    "iserblk/target/iscsi/tasks/acknowledgements.py": (
        "tests/target/iscsi/tasks/test_reassigning.py and "
        "tests/target/iscsi/tasks/test_management.py"
    ),
    "iserblk/target/iscsi/owners.py": "Protocols; tests/target/test_pump.py is of one of them",
    "iserblk/target/offloading.py": "tests/target/test_server.py, with stores that are slow",
    "iserblk/target/seam.py": "Protocols; tests/target/scsi/test_target_device.py",
    "iserblk/target/store/status.py": "an error, tests/target/scsi/test_loop.py has one end",
}


# Private attributes of ours that tests reach into, because there is no public way to a moment
# between two threads, to memory that must be free again, to a wire that must be cut, or to the
# serial numbers of a connection that is hours old.
PRIVATE: dict[str, set[str]] = {
    "tests/datamover/test_stream_initiator.py": {"_receives"},
    "tests/disk/test_disk_thread.py": {"_inbox"},
    "tests/disk/durability/test_journal.py": {"_spare", "_spare_buffers", "_spared"},
    "tests/disk/durability/test_promise_turning_volatile.py": {"_batch", "_closed", "_spare"},
    "tests/disk/lun/test_reservation.py": {"_look", "_register", "_unlock"},
    "tests/initiator/session/test_races.py": {"_free"},
    "tests/integration/test_asyncio.py": {"_disk"},
    "tests/integration/test_tgtd.py": {"_unlock"},
    "tests/lab/guest/test_rxe_contract_endings.py": {"_engine", "_modules"},
    "tests/metrics/test_counting.py": {"_every"},
    "tests/metrics/test_places.py": {"_RUN"},
    "tests/rcap/iwarp/test_receive.py": {"_send_msn"},
    "tests/rcap/iwarp/test_streaming.py": {"_pair", "_stream"},
    "tests/rcap/verbs/test_open_pairs.py": {"_open"},
    "tests/target/iscsi/tasks/test_management.py": {"_numbers"},
    "tests/target/store/test_volatile.py": {"_cached"},
    "tests/target/test_server.py": {"_cmd_sn", "_device", "_nexuses"},
    "tests/target/test_server_endings.py": {"_connections", "_tsihs"},
    "tests/target/test_server_many.py": {"_connections", "_sessions"},
    "tests/test_crc.py": {"_crc"},
    "tests/support/renamed.py": {"_note_pages"},
}
# Public names of the standard library, in spite of the underscore.
NOT_PRIVATE = {"_replace", "_fields", "_asdict", "_exit", "_getframe"}


def modules() -> list[str]:
    """Paths from the project's root, without those that do nothing but stand for a package."""
    found = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return sorted(
        str(path.relative_to(ROOT)) for path in found if path.name not in ("__init__.py",)
    )


def every_test() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def mirrored(module: str) -> list[Path]:
    """Its test modules: at the place in tests/ that mirrors its own, ``test_`` and its name; behind
    that, what tells them apart, where there are several; before it a package's name, where another
    module has the same."""
    path = Path(module).with_suffix("")
    place = (
        TESTS / path.parent.relative_to("iserblk")
        if path.parts[0] == "iserblk"
        else TESTS / path.parent
    )
    names = [path.name, *(f"{package}_{path.name}" for package in path.parts[:-1])]
    return [
        found
        for found in place.glob("test_*.py")
        if any(f"{found.stem}_".startswith(f"test_{name}_") for name in names)
    ]


@pytest.mark.parametrize("module", modules())
def test_a_module_has_its_test_module(module: str) -> None:
    if module in ELSEWHERE:
        assert not mirrored(module), f"{module}: has its test module, and is in the list, too"
        return
    assert mirrored(module), (
        f"{module}: where is it tested? It has no test module of its name at the same place in"
        " tests/, and no row in ELSEWHERE of this test"
    )


def test_the_list_is_current() -> None:
    known = set(modules())
    for module, reason in ELSEWHERE.items():
        assert module in known, f"{module}: there is none"
        for word in reason.replace(",", " ").replace(":", " ").split():
            if word.startswith("tests/") and word.endswith(".py"):
                assert (ROOT / word).exists(), f"{module}: {word} is not there"


def test_no_two_test_modules_of_one_name() -> None:
    names = Counter(path.name for path in every_test())
    assert {name for name, count in names.items() if count > 1} == set()


def reached_into(path: Path) -> set[str]:
    """Names with an underscore in front that the module takes of objects that are not its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            found.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("setattr", "delattr")
        ):
            found |= {
                str(each.value).rpartition(".")[2]
                for each in node.args[:2]
                if isinstance(each, ast.Constant)
            }
    private = {name for name in found if name.startswith("_") and not name.startswith("__")}
    return private - NOT_PRIVATE


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.name)
def test_private_attributes_are_let_alone(path: Path) -> None:
    allowed = PRIVATE.get(str(path.relative_to(ROOT)), set())
    assert reached_into(path) == allowed
