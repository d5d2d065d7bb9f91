"""Connects by SCTP, for software iWARP on it (RFC 5043): the association, then the DDP Stream
Session with its private data. Runs in trio.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import trio

from iserblk.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    NotSupported,
    RemoteProtocolError,
)
from iserblk.initiator.connecting.iwarp import Address
from iserblk.initiator.connecting.login import RECEIVE_SIZE, at_portal
from iserblk.loop.patience import Patience, fail_after
from iserblk.loop.tasks import until_readable
from iserblk.rcap.iwarp import sctp_association
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.rcap.iwarp.sctp import SessionInitiator
from iserblk.rcap.iwarp.sctp_association import Association
from iserblk.sockets.plain import plain


def check_available() -> None:
    """Raises NotSupported when SCTP was asked for and the kernel has none."""
    missing = sctp_association.available()
    if missing is not None:
        raise NotSupported(f"rcap=iwarp-sctp: {missing}; or say rcap=iwarp")


async def connect_sctp(
    addresses: Sequence[Address], portal: str, patience: float, *, private_data: bytes, ird: int
) -> IwarpQueuePair:
    """A queue pair with the first address that answers. Raises TransportError and related errors;
    then nothing is left open. ``patience``: seconds, for the association and for the session."""
    association = Association(await _associate(addresses, portal, patience))
    try:
        with fail_after(patience):
            while not association.is_adapted():
                await until_readable(association)
            session = SessionInitiator(private_data=private_data, ird=ird)
            association.send_control(*session.request)
            while (answer := association.receive_control()) is None:
                await until_readable(association)
        return association.queue_pair(
            session.receive(*answer), initiator=True, receive_size=RECEIVE_SIZE
        )
    except trio.TooSlowError:
        association.close()
        raise ConnectTimeout(
            f"{portal} took the SCTP association, but began no DDP session within {patience:g} s:"
            " is it an iSER portal?"
        ) from None
    except OSError as error:
        association.close()
        raise ConnectionLost(
            f"{portal} ended the SCTP association as it began: {error.strerror}"
        ) from None
    except RemoteProtocolError as error:
        association.close()
        raise at_portal(portal, error, "; is it an iSER portal?") from None
    except BaseException:
        association.close()
        raise


async def _associate(addresses: Sequence[Address], portal: str, patience: float) -> socket.socket:
    reason = "no address"
    left = Patience(patience)
    for family, sockaddr in addresses:
        try:
            sock = trio.socket.from_stdlib_socket(sctp_association.open_socket(family))
        except OSError as error:  # a name may have addresses of a family that is switched off here
            reason = error.strerror or str(error)
            continue
        try:
            with left.required():
                await sock.connect(sockaddr)
            return plain(sock)
        except trio.TooSlowError:
            raise ConnectTimeout(
                f"{portal} did not answer by SCTP within {patience:g} s; "
                "check the address, and firewalls on the way"
            ) from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
        finally:
            sock.close()  # does nothing, once detached
    raise ConnectFailed(
        f"cannot connect to {portal} by SCTP: {reason}; does the target listen there with"
        " transport=sctp?"
    )
