"""The service agent of one target: it answers SLP requests (RFC 2608, RFC 4018). No I/O here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iserblk.discovery import slp
from iserblk.errors import RemoteProtocolError
from iserblk.target.announcing.announced import Announced

LIFETIME_S = 600  # of what an agent is told: so long it may believe us
_MOST_INITIATORS = 256  # that the attributes list; of more, none is named
_REPLIES = {
    slp.SERVICE_REQUEST: slp.SERVICE_REPLY,
    slp.ATTRIBUTE_REQUEST: slp.ATTRIBUTE_REPLY,
    slp.SERVICE_TYPE_REQUEST: slp.SERVICE_TYPE_REPLY,
    slp.SERVICE_REGISTRATION: slp.SERVICE_ACKNOWLEDGE,
    slp.SERVICE_DEREGISTRATION: slp.SERVICE_ACKNOWLEDGE,
}


class _Refused(Exception):
    """The answer is an error; none at all to a multicast request."""

    def __init__(self, error: int) -> None:
        super().__init__(error)
        self.error = error


class ServiceAgent:
    """``scopes``: those that the target is in."""

    def __init__(self, announced: Announced, scopes: Sequence[str]) -> None:
        self._announced = announced
        self.scopes = scopes
        self._scopes = slp.items(",".join(scopes))

    def services(self, here: str) -> Iterator[tuple[str, slp.Attributes]]:
        """URL and attributes of the target at each portal, for a peer that reaches us by our
        address ``here``."""
        initiators = self._announced.initiators()
        names = ["any"] if initiators is None else [*initiators]
        for portal in self._announced.portals_at(here):
            attributes: dict[str, Sequence[str]] = {
                "iscsi-name": (self._announced.target,),
                "portal-group": (str(portal.tag or 0),),
                "transports": ("tcp",),
            }
            if 0 < len(names) <= _MOST_INITIATORS:
                attributes["auth-name"] = names
            yield slp.target_url(portal, self._announced.target), attributes

    def serves(self, scopes: frozenset[str]) -> bool:
        return bool(self._scopes & scopes)

    def answer(
        self, data: bytes, here: str, *, datagram: bool = True, multicast: bool = False
    ) -> bytes | None:
        """The answer to a message that came by our address ``here``; None: it gets none.
        Raises RemoteProtocolError for what is no message of SLP version 2."""
        message = slp.message_untrusted(data)
        if message.function not in _REPLIES:
            return None
        multicast = multicast or bool(message.flags & slp.MULTICAST)
        try:
            function, body, flags = self._answered(message, here, datagram)
        except RemoteProtocolError:
            refusal = slp.PARSE_ERROR
        except _Refused as refused:
            refusal = refused.error
        else:
            if body is None or (multicast and body == slp.service_reply(0, [])):
                return None  # who has nothing to say does not answer a multicast request
            return slp.encode(function, message.xid, body, flags, message.language)
        if multicast:
            return None
        function = _REPLIES[message.function]
        return slp.encode(function, message.xid, _refusal(function, refusal), 0, message.language)

    def _answered(
        self, message: slp.Message, here: str, datagram: bool
    ) -> tuple[int, bytes | None, int]:
        """Function, body and flags of the answer; without a body there is none."""
        if message.unknown:
            raise _Refused(slp.OPTION_NOT_UNDERSTOOD)
        if message.function == slp.SERVICE_REQUEST:
            request = slp.request_untrusted(message)
            if here in request.previous:
                return 0, None, 0
            return self._services(message, request, here, datagram)
        if message.function == slp.ATTRIBUTE_REQUEST:
            request = slp.request_untrusted(message)
            if here in request.previous:
                return 0, None, 0
            return self._attributes(message, request, here, datagram)
        if message.function == slp.SERVICE_TYPE_REQUEST:
            request = slp.type_request_untrusted(message)
            if here in request.previous:
                return 0, None, 0
            self._check(request)
            # iSCSI's service types have no naming authority but the default, IANA.
            types = [slp.TARGET] if request.about.lower() in ("*", "", "iana") else []
            return slp.SERVICE_TYPE_REPLY, slp.type_reply(0, types), 0
        raise _Refused(slp.MESSAGE_NOT_SUPPORTED)

    def _check(self, request: slp.Request) -> None:
        if request.spi:
            raise _Refused(slp.AUTHENTICATION_UNKNOWN)
        if not self.serves(request.scopes):
            raise _Refused(slp.SCOPE_NOT_SUPPORTED)

    def _services(
        self, message: slp.Message, request: slp.Request, here: str, datagram: bool
    ) -> tuple[int, bytes | None, int]:
        kind = request.about.lower()
        if kind == slp.SERVICE_AGENT:
            if request.scopes and not self.serves(request.scopes):
                raise _Refused(slp.SCOPE_NOT_SUPPORTED)
            url = f"{slp.SERVICE_AGENT}://{here}"
            return slp.SA_ADVERTISEMENT, slp.agent_advertisement(url, self.scopes), 0
        if kind == slp.DIRECTORY_AGENT:
            return 0, None, 0
        self._check(request)
        if request.condition:
            _check_language(message)
        entries = [
            slp.UrlEntry(url, LIFETIME_S)
            for url, attributes in self.services(here)
            if kind in slp.TARGETS and slp.matches_untrusted(request.condition, attributes)
        ]
        body, flags = slp.service_reply(0, entries), 0
        while datagram and slp.HEADER.size + len(message.language) + len(body) > slp.MTU:
            entries.pop()
            body, flags = slp.service_reply(0, entries), slp.OVERFLOW
        return slp.SERVICE_REPLY, body, flags

    def _attributes(
        self, message: slp.Message, request: slp.Request, here: str, datagram: bool
    ) -> tuple[int, bytes | None, int]:
        self._check(request)
        _check_language(message)
        about = request.about.lower()
        found: dict[str, list[str]] = {}
        for url, attributes in self.services(here):
            if about not in (url.lower(), *slp.TARGETS):
                continue
            for tag, values in attributes.items():
                if _is_wanted(tag, request.condition):
                    known = found.setdefault(tag, [])
                    known.extend(each for each in values if each not in known)
        if not found and bool(message.flags & slp.MULTICAST):
            return 0, None, 0
        body, flags = slp.attribute_reply(0, slp.encode_attributes(found)), 0
        if datagram and slp.HEADER.size + len(message.language) + len(body) > slp.MTU:
            body, flags = slp.attribute_reply(0, ""), slp.OVERFLOW
        return slp.ATTRIBUTE_REPLY, body, flags

    def registrations(self, here: str) -> list[tuple[slp.UrlEntry, bytes]]:
        """URL, and body of a SrvReg, of each portal, for a directory agent that is reached from our
        address ``here``."""
        return [
            (
                entry := slp.UrlEntry(url, LIFETIME_S),
                slp.registration(entry, self.scopes, slp.encode_attributes(attributes)),
            )
            for url, attributes in self.services(here)
        ]


def _check_language(message: slp.Message) -> None:
    """Attributes are in English only; but their values mean the same in all languages of it."""
    if message.language.partition("-")[0].lower() not in (slp.LANGUAGE, ""):
        raise _Refused(slp.LANGUAGE_NOT_SUPPORTED)


def _is_wanted(tag: str, wanted: str) -> bool:
    """Whether a list of tags, each perhaps with wildcards, asks for ``tag``."""
    patterns = slp.items(wanted)
    return not patterns or any(slp.is_like(tag, each) for each in patterns)


def _refusal(function: int, error: int) -> bytes:
    if function == slp.SERVICE_REPLY:
        return slp.service_reply(error, [])
    if function == slp.ATTRIBUTE_REPLY:
        return slp.attribute_reply(error, "")
    if function == slp.SERVICE_TYPE_REPLY:
        return slp.type_reply(error, [])
    return error.to_bytes(2, "big")
