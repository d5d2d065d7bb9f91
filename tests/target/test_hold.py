"""A session that reinstates another waits for what its elder still writes."""

from __future__ import annotations

from tests.target.iser_client import IserClient, rw10


def test_held_writes_wait_and_then_come() -> None:
    """Nothing reaches the store, or is fetched, while the session is held; in order afterwards."""
    client = IserClient().logged_in([("ImmediateData", "Yes")])
    head = bytearray(28)
    head[0] = 0x10
    old, new = b"old" + bytes(509), b"new" + bytes(509)
    client.connection.hold()
    for itt, data in ((20, old), (21, new)):
        client.send(bytes(head) + client.scsi(rw10(0x2A, 512), 0xA0, 512, itt, 512) + data)
    client.run()
    assert not client.sent and not any(call[0] == "write" for call in client.store.calls)
    client.connection.unhold()
    client.run()
    assert [heard.number(16) for heard in client.heard[-2:]] == [20, 21]
    assert bytes(client.store.content[:3]) == b"new"
