"""The device and the target that all other tests of this set-up need."""

from __future__ import annotations

import os
import subprocess


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_there_is_a_soft_roce_device() -> None:
    assert os.environ["LAB_DEVICE"] == "rxe0"
    assert "rxe0" in said("ibv_devices")
    assert "PORT_ACTIVE" in said("ibv_devinfo", "-d", "rxe0")


# shows: SYSTEM-19
def test_the_target_listens_for_rdma() -> None:
    address = f"{os.environ['LAB_ADDRESS']}:{os.environ['LAB_PORT']}"
    listeners = said("rdma", "resource", "show", "cm_id")
    assert any("LISTEN" in line and address in line for line in listeners.splitlines())


# shows: SYSTEM-19
def test_the_target_answers_a_client_that_is_not_ours(lab_url: str) -> None:
    inquiry = said("iscsi-inq", lab_url)
    assert "LIO-ORG" in inquiry and "DIRECT_ACCESS" in inquiry
