"""What a kubelet needs of a cluster: objects over HTTP, with lists, watches and patches, in the
memory of this process. There is no scheduler, no controller and no default: who puts an object here
has written all its fields.

Source: the API conventions of Kubernetes ("Lists and Watches", "Strategic Merge Patch").
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

KINDS = {
    "configmaps": "ConfigMap",
    "csidrivers": "CSIDriver",
    "csinodes": "CSINode",
    "events": "Event",
    "leases": "Lease",
    "nodes": "Node",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "persistentvolumes": "PersistentVolume",
    "pods": "Pod",
    "runtimeclasses": "RuntimeClass",
    "secrets": "Secret",
    "services": "Service",
}
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>status))?"
)
_MERGED = ("conditions", "addresses")  # lists whose elements a strategic merge patch tells by type
_WAIT_S = 1.0  # between two looks at whether a watch has come to its end


class Place(NamedTuple):
    """Where objects are: one, or with ``name`` "" all of a kind (in a namespace, or in all)."""

    version: str
    resource: str
    namespace: str
    name: str

    def has(self, other: Place) -> bool:
        return (
            (self.version, self.resource) == (other.version, other.resource)
            and self.namespace in ("", other.namespace)
            and self.name in ("", other.name)
        )


class Missing(Exception):
    """There is no such object."""


class Present(Exception):
    """There is such an object already."""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def merged(old: Object, patch: Object) -> Object:
    """``old`` with a strategic merge patch. Its directives for the order of lists are ignored."""
    new = dict(old)
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        before = new.get(key)
        if value is None:
            new.pop(key, None)
        elif isinstance(value, dict):
            new[key] = merged(before if isinstance(before, dict) else {}, value)
        elif key in _MERGED and isinstance(before, list):
            by_type = {each["type"]: each for each in before}
            for each in value:
                by_type[each["type"]] = merged(by_type.get(each["type"], {}), each)
            new[key] = [*by_type.values()]
        else:
            new[key] = value
    return new


def _selected(found: Object, selector: str) -> bool:
    """Whether a field selector fits: ``metadata.name=x``, several with commas between them."""
    for term in filter(None, selector.split(",")):
        path, _, value = term.replace("==", "=").partition("=")
        field: Any = found
        for key in path.removesuffix("!").split("."):
            field = field.get(key, "") if isinstance(field, dict) else ""
        if (str(field) == value) == path.endswith("!"):
            return False
    return True


class Cluster:
    """The objects, and every change that was made to them. Safe from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._objects: dict[Place, Object] = {}
        self._changes: list[tuple[Place, str, Object]] = []
        self.ended = False

    # --- for tests ---

    def put(
        self, version: str, resource: str, name: str, namespace: str = "", **fields: Any
    ) -> str:
        """Create an object. Returns its uid."""
        place = Place(version, resource, namespace, name)
        made = self.create(place, {"metadata": {"name": name}, **fields})
        return str(made["metadata"]["uid"])

    def find(self, version: str, resource: str, name: str, namespace: str = "") -> Object | None:
        try:
            return self.get(Place(version, resource, namespace, name))
        except Missing:
            return None

    def end(self) -> None:
        """Let all watches end."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    # --- for the kubelet ---

    def get(self, place: Place) -> Object:
        with self._changed:
            if place not in self._objects:
                raise Missing
            return deepcopy(self._objects[place])

    def all(self, place: Place) -> tuple[list[Object], int]:
        """The objects there, and the number of the last change."""
        with self._changed:
            found = [each for at, each in self._objects.items() if place.has(at)]
            return deepcopy(found), len(self._changes)

    def create(self, place: Place, given: Object) -> Object:
        with self._changed:
            if place in self._objects:
                raise Present
            metadata = {
                "uid": str(uuid.uuid4()),
                "creationTimestamp": _now(),
                **given.get("metadata", {}),
            }
            if place.namespace:
                metadata["namespace"] = place.namespace
            return self._store(place, "ADDED", {**given, "metadata": metadata})

    def replace(self, place: Place, given: Object) -> Object:
        with self._changed:
            old = self.get(place)
            metadata = {**old["metadata"], **given["metadata"]}
            return self._store(place, "MODIFIED", {**given, "metadata": metadata})

    def patch(self, place: Place, given: Object) -> Object:
        with self._changed:
            return self._store(place, "MODIFIED", merged(self.get(place), given))

    def delete(self, place: Place, grace_s: int = 0) -> Object:
        """Delete it; a pod with a grace period is only marked, and the kubelet deletes it when it
        has ended."""
        with self._changed:
            found = self.get(place)
            if place.resource == "pods" and grace_s:
                found["metadata"]["deletionTimestamp"] = _now()
                found["metadata"]["deletionGracePeriodSeconds"] = grace_s
                return self._store(place, "MODIFIED", found)
            self._store(place, "DELETED", found)
            return self._objects.pop(place)

    def _store(self, place: Place, how: str, given: Object) -> Object:
        given["kind"] = KINDS[place.resource]
        given["apiVersion"] = place.version
        given["metadata"]["resourceVersion"] = str(len(self._changes) + 1)
        self._objects[place] = given
        self._changes.append((place, how, deepcopy(given)))
        self._changed.notify_all()
        return deepcopy(given)

    def watch(self, place: Place, since: int) -> Iterator[tuple[str, Object] | None]:
        """Each change behind number ``since``; None now and then. Ends with the cluster."""
        while True:
            with self._changed:
                if len(self._changes) <= since and not self.ended:
                    self._changed.wait(_WAIT_S)
                if self.ended:
                    return
                news, since = self._changes[since:], max(since, len(self._changes))
            yield None
            for at, how, found in news:
                if place.has(at):
                    yield how, found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_: object) -> None:
        """stderr is the tests'."""

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        match = _PATH.fullmatch(url.path)
        if match is None or match["resource"] not in KINDS:
            self._fail(HTTPStatus.NOT_FOUND, "NotFound")
            return
        version = "/".join(filter(None, (match["group"], match["version"])))
        place = Place(version, match["resource"], match["namespace"] or "", match["name"] or "")
        try:
            self._do(place, query, body)
        except Missing:
            self._fail(HTTPStatus.NOT_FOUND, "NotFound")
        except Present:
            self._fail(HTTPStatus.CONFLICT, "AlreadyExists")

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _do(self, place: Place, query: Mapping[str, str], body: Object) -> None:
        cluster = self.cluster
        if self.command == "POST":
            name = body["metadata"]["name"]
            created = cluster.create(place._replace(name=name), body)
            self._answer(created, HTTPStatus.CREATED)
        elif self.command == "PUT":
            self._answer(cluster.replace(place, body))
        elif self.command == "PATCH":
            self._answer(cluster.patch(place, body))
        elif self.command == "DELETE":
            self._answer(cluster.delete(place, body.get("gracePeriodSeconds", 0)))
        elif query.get("watch", "") in ("1", "true"):
            self._watch(place, query)
        elif place.name:
            self._answer(cluster.get(place))
        else:
            found, last = cluster.all(place)
            selector = query.get("fieldSelector", "")
            self._answer(
                {
                    "kind": f"{KINDS[place.resource]}List",
                    "apiVersion": place.version,
                    "metadata": {"resourceVersion": str(last)},
                    "items": [each for each in found if _selected(each, selector)],
                }
            )

    def _watch(self, place: Place, query: Mapping[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        selector = query.get("fieldSelector", "")
        try:
            for change in self.cluster.watch(place, int(query.get("resourceVersion") or 0)):
                if change is not None and _selected(change[1], selector):
                    line = json.dumps({"type": change[0], "object": change[1]}).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # the kubelet has ended
            self.close_connection = True

    def _answer(self, found: Object, status: HTTPStatus = HTTPStatus.OK) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, status: HTTPStatus, reason: str) -> None:
        words = f"{self.command} {self.path}: {reason}"
        failure = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self._answer({**failure, "message": words, "reason": reason, "code": int(status)}, status)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A kubelet that is killed leaves connections in the middle of a request."""


def serving(cluster: Cluster) -> _Server:
    """A server of the cluster on a free port of the loopback interface, in a thread."""
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
