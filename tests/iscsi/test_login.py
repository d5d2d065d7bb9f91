"""Login of our two ends with each other, and with what real peers have sent."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from iserblk.errors import LoginError, TargetNotFound
from iserblk.iscsi import pdu
from iserblk.iscsi.login_initiator import LoginInitiator, LoginInitiatorConfig
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.iscsi.serial import window_size
from iserblk.iscsi.text import decode_untrusted
from tests.iscsi import captured, logins


@pytest.mark.parametrize("immediate", [False, True])
def test_one_round(immediate: bool) -> None:
    """All keys at once, the operational stage only, and both sides agree afterwards.

    proves: ISER-3.3-1, ISER-5.1-2, ISER-5.1-3, ISER-5.1-12, ISER-6.3-2, ISER-6.3-8
    """
    one, other = logins.initiator(immediate_data=immediate), logins.target()
    assert logins.login(one, other) == 1
    assert one.done and other.done and not other.failed
    assert one.parameters == other.parameters
    agreed = one.parameters
    assert agreed.rdma_extensions and agreed.initial_r2t
    assert agreed.immediate_data is immediate
    assert (agreed.header_digest, agreed.data_digest) == ("None", "None")
    assert (one.tsih, other.initiator_name) == (logins.TSIH, logins.INITIATOR)
    assert (one.cmd_sn, one.exp_cmd_sn, one.max_cmd_sn) == (1, other.exp_cmd_sn, other.max_cmd_sn)
    assert window_size(one.cmd_sn, one.max_cmd_sn) == 128
    assert one.exp_stat_sn == other.stat_sn
    assert other.isid == logins.ISID


LENGTHS = (512, 8192, 262144)


@pytest.mark.parametrize("takes", LENGTHS)
@pytest.mark.parametrize("sends", LENGTHS)
@pytest.mark.parametrize("theirs", LENGTHS)
def test_data_lengths(takes: int, sends: int, theirs: int) -> None:
    """Each side's limit holds. proves: ISER-6.2-3, ISER-6.2-4, ISER-6.4-1, ISER-6.5-1"""
    one = LoginInitiator(
        LoginInitiatorConfig(
            logins.INITIATOR,
            logins.TARGET,
            logins.ISID,
            receive_data_segment_length=takes,
            send_data_segment_length=sends,
        )
    )
    other = logins.target(receive_data_segment_length=theirs)
    logins.login(one, other)
    agreed = min(sends, theirs)
    assert other.parameters.target_recv_data_segment_length == agreed
    if agreed == sends > 8192:  # it may be an echo: see test_max_ulpdu.py
        agreed = 8192
    assert one.parameters == replace(other.parameters, target_recv_data_segment_length=agreed)
    assert one.parameters.initiator_recv_data_segment_length == takes


def test_discovery() -> None:
    """RDMAExtensions does not appear. proves: ISER-5.1-6"""
    one, other = logins.initiator(discovery=True), logins.target()
    first = one.start()
    assert "RDMAExtensions" not in logins.said(first)
    (answer,) = other.receive(*first)
    assert "RDMAExtensions" not in logins.said(answer)
    assert one.receive(*answer) == []
    assert one.done and other.done and other.discovery
    assert not one.parameters.rdma_extensions and not other.parameters.rdma_extensions


def test_window_is_what_the_target_says() -> None:
    one, other = logins.initiator(), logins.target(queue_depth=1)
    logins.login(one, other)
    assert window_size(one.cmd_sn, one.max_cmd_sn) == 1


def test_no_such_target() -> None:
    one, other = logins.initiator(target_name="iqn.2026-11.example:other"), logins.target()
    with pytest.raises(TargetNotFound, match=r"no target iqn\.2026-11\.example:other") as error:
        logins.login(one, other)
    assert (error.value.status, error.value.exit_status) == (0x0203, 21)
    assert other.failed and not one.done


def test_names_are_compared_without_case() -> None:
    """RFC 7143 section 4.2.7.1: names are folded to lower case before they are compared."""
    one, other = logins.initiator(target_name=logins.TARGET.upper()), logins.target()
    logins.login(one, other)
    assert one.done


# -- Linux's target ------------------------------------------------------------------------------


def lio_response(name: str, one: LoginInitiator) -> tuple[bytes, bytes]:
    """The captured response with the ISID and ITT of ``one``."""
    ((header, data),) = captured.pdus(f"{name}.t2i.bin")
    answer = dataclasses.replace(pdu.LoginResponse.unpack_from(header), isid=logins.ISID, itt=0)
    return answer.pack(), data


def test_linux_target_accepts_what_we_ask() -> None:
    """Its answer to the same keys ends our login in one round, and gives the window of one that
    it begins with."""
    one = logins.initiator()
    asked = logins.said(one.start())
    ((_, captured_request),) = captured.pdus(f"{captured.LIO_LOGIN}.i2t.bin")
    known = dict(decode_untrusted(captured_request))
    # We ask for nothing that it was not shown to know, but for the one key that RFC 7145 added.
    assert set(asked) - set(known) == {"MaxOutstandingUnexpectedPDUs"}
    header, data = lio_response(captured.LIO_LOGIN, one)
    # It was asked for more than we ask for in these two.
    data = data.replace(
        b"InitiatorRecvDataSegmentLength=262144", b"InitiatorRecvDataSegmentLength=8192"
    )
    assert one.receive(header, data) == []
    agreed = one.parameters
    assert one.done and agreed.rdma_extensions
    assert not agreed.immediate_data, "it leaves ImmediateData=No unanswered: that is No"
    assert agreed.initial_r2t
    assert agreed.max_burst_length == 262144
    assert agreed.target_recv_data_segment_length == 8192
    assert agreed.initiator_recv_data_segment_length == 8192, "MaxRecvDataSegmentLength is ignored"
    assert (agreed.target_alias, agreed.target_portal_group_tag) == ("LIO Target", 1)
    assert window_size(one.cmd_sn, one.max_cmd_sn) == 1
    assert one.exp_stat_sn == 0x24C4C7AE


def test_linux_target_in_a_discovery_session() -> None:
    """What it settles there without having been asked for it is answered; RDMAExtensions=No is
    no failure."""
    one = logins.initiator(discovery=True)
    asked = logins.said(one.start())
    _, data = lio_response(captured.LIO_DISCOVERY, one)
    theirs = dict(decode_untrusted(data))
    (answer,) = one.receive(*logins.response(data, following=None))
    declared = {"TargetAlias", "TargetPortalGroupTag"}
    ours = logins.said(answer)
    assert set(ours) == set(theirs) - set(asked) - declared
    assert ours["RDMAExtensions"] == ours["IFMarker"] == "No"
    assert one.receive(*logins.response()) == []
    assert one.done and not one.parameters.rdma_extensions
    assert one.parameters.max_recv_data_segment_length == 262144


# -- Linux's initiator ---------------------------------------------------------------------------


def test_linux_initiator_is_answered() -> None:
    """Its login ends in one round, with no key in the answer that it has not asked for, but those
    that every initiator knows."""
    ((header, data),) = captured.pdus(f"{captured.KERNEL_LOGIN}.i2t.bin")
    other = LoginTarget(LoginTargetConfig("iqn.2026-11.lab:py", 1))
    ((answer, text),) = other.receive(header, data)
    assert other.done and not other.failed
    ((captured_answer, captured_text),) = captured.pdus(f"{captured.KERNEL_LOGIN}.t2i.bin")
    asked, got = dict(decode_untrusted(data)), dict(decode_untrusted(text))
    assert set(got) - set(asked) == {"TargetPortalGroupTag"}
    # The same keys and values as the script answered with when it was captured, but for what the
    # two want themselves.
    theirs = dict(decode_untrusted(captured_text))
    assert set(got) == set(theirs)
    wanted = {"InitialR2T": "No", "FirstBurstLength": "65536"}  # a burst may come unasked
    assert {key: got[key] for key in got if got[key] != theirs[key]} == wanted
    ours = pdu.LoginResponse.unpack_from(answer)
    other_answer = pdu.LoginResponse.unpack_from(captured_answer)
    assert (ours.flags, ours.isid, ours.itt, ours.tsih, ours.status) == (
        other_answer.flags,
        other_answer.isid,
        other_answer.itt,
        1,
        0,
    )
    agreed = other.parameters
    assert agreed.rdma_extensions and not agreed.initial_r2t and agreed.immediate_data
    assert agreed.initiator_recv_data_segment_length == 262144
    assert agreed.max_burst_length == 16776192
    assert agreed.initiator_alias == "virtme-ng"
    assert agreed.tagged_buffer_for_solicited_data_only is None
    assert other.initiator_name == "iqn.2026-11.lab:kernel"
    assert other.exp_cmd_sn == 0


@pytest.mark.parametrize("name", ["lo64k_crc", "discovery_crc", "sendtargets_normal"])
def test_the_captured_script_is_answered(name: str) -> None:
    ((header, data),) = captured.pdus(f"{name}/02_login.i2t.bin")
    other = LoginTarget(LoginTargetConfig("iqn.2026-11.lab:t0", 1))
    ((_, text),) = other.receive(header, data)
    assert other.done
    assert other.discovery is (name == "discovery_crc")
    ((_, captured_text),) = captured.pdus(f"{name}/02_login.t2i.bin")
    ours, theirs = dict(decode_untrusted(text)), dict(decode_untrusted(captured_text))
    # Everything that Linux's target settles is settled by ours, and RDMAExtensions alike.
    assert set(theirs) - set(ours) == {"TargetAlias", "MaxRecvDataSegmentLength"}
    assert ours["RDMAExtensions"] == theirs["RDMAExtensions"]


def test_refusal_reaches_the_initiator_in_words() -> None:
    one, other = logins.initiator(), logins.target()
    header, data = one.start()
    ((answer, text),) = other.receive(header, data + b"InitialR2T=Yes\0")
    with pytest.raises(LoginError, match="found an error in the login"):
        one.receive(answer, text)
    assert other.failed
