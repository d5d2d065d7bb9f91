"""The messages of CSI's identity and node services, and of the kubelet's plugin registration.

The table gives each message's fields: name, type, number. They are what travels: a field that is
not here is skipped. An enumeration travels as an int32. A type with a capital is a message; ``map``
is from string to string.

``message("csi.v1.ProbeRequest")`` is the class. Needs protobuf (``pip install 'iserblk[csi]'``).

Sources: csi.proto of the Container Storage Interface specification (1.x); api.proto of the
kubelet's package pluginregistration.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

CSI = "csi.v1"
REGISTRATION = "pluginregistration"

# Plugin capabilities (PluginCapability.VolumeExpansion.Type).
ONLINE = 1
# Capabilities of the node service (NodeServiceCapability.RPC.Type).
STAGE_UNSTAGE_VOLUME = 1
GET_VOLUME_STATS = 2
EXPAND_VOLUME = 3
VOLUME_CONDITION = 4
SINGLE_NODE_MULTI_WRITER_CAPABILITY = 5
# Access modes (VolumeCapability.AccessMode.Mode).
SINGLE_NODE_WRITER = 1
SINGLE_NODE_READER_ONLY = 2
MULTI_NODE_READER_ONLY = 3
MULTI_NODE_SINGLE_WRITER = 4
MULTI_NODE_MULTI_WRITER = 5
SINGLE_NODE_SINGLE_WRITER = 6
SINGLE_NODE_MULTI_WRITER = 7
# Those with which a volume is published at one target path at a time, by a plugin that has the
# capability for SINGLE_NODE_MULTI_WRITER (second table of NodePublishVolume).
OF_ONE_PATH = (SINGLE_NODE_WRITER, SINGLE_NODE_READER_ONLY, SINGLE_NODE_SINGLE_WRITER)
# Units of usage (VolumeUsage.Unit).
BYTES = 1
INODES = 2

_Fields = tuple[tuple[str, str, int], ...]

MESSAGES: dict[str, dict[str, _Fields]] = {
    CSI: {
        "GetPluginInfoRequest": (),
        "GetPluginInfoResponse": (
            ("name", "string", 1),
            ("vendor_version", "string", 2),
            ("manifest", "map", 3),
        ),
        "GetPluginCapabilitiesRequest": (),
        "GetPluginCapabilitiesResponse": (("capabilities", "repeated PluginCapability", 1),),
        "PluginCapability": (("service", "PluginKind", 1), ("volume_expansion", "PluginKind", 2)),
        "PluginKind": (("type", "int32", 1),),
        "ProbeRequest": (),
        "ProbeResponse": (("ready", "BoolValue", 1),),
        "BoolValue": (("value", "bool", 1),),
        "VolumeCapability": (
            ("block", "BlockVolume", 1),
            ("mount", "MountVolume", 2),
            ("access_mode", "AccessMode", 3),
        ),
        "BlockVolume": (),
        "MountVolume": (
            ("fs_type", "string", 1),
            ("mount_flags", "repeated string", 2),
            ("volume_mount_group", "string", 3),
        ),
        "AccessMode": (("mode", "int32", 1),),
        "CapacityRange": (("required_bytes", "int64", 1), ("limit_bytes", "int64", 2)),
        "NodeStageVolumeRequest": (
            ("volume_id", "string", 1),
            ("publish_context", "map", 2),
            ("staging_target_path", "string", 3),
            ("volume_capability", "VolumeCapability", 4),
            ("secrets", "map", 5),
            ("volume_context", "map", 6),
        ),
        "NodeStageVolumeResponse": (),
        "NodeUnstageVolumeRequest": (
            ("volume_id", "string", 1),
            ("staging_target_path", "string", 2),
        ),
        "NodeUnstageVolumeResponse": (),
        "NodePublishVolumeRequest": (
            ("volume_id", "string", 1),
            ("publish_context", "map", 2),
            ("staging_target_path", "string", 3),
            ("target_path", "string", 4),
            ("volume_capability", "VolumeCapability", 5),
            ("readonly", "bool", 6),
            ("secrets", "map", 7),
            ("volume_context", "map", 8),
        ),
        "NodePublishVolumeResponse": (),
        "NodeUnpublishVolumeRequest": (("volume_id", "string", 1), ("target_path", "string", 2)),
        "NodeUnpublishVolumeResponse": (),
        "NodeGetVolumeStatsRequest": (
            ("volume_id", "string", 1),
            ("volume_path", "string", 2),
            ("staging_target_path", "string", 3),
        ),
        "NodeGetVolumeStatsResponse": (
            ("usage", "repeated VolumeUsage", 1),
            ("volume_condition", "VolumeCondition", 2),
        ),
        "VolumeUsage": (
            ("available", "int64", 1),
            ("total", "int64", 2),
            ("used", "int64", 3),
            ("unit", "int32", 4),
        ),
        "VolumeCondition": (("abnormal", "bool", 1), ("message", "string", 2)),
        "NodeExpandVolumeRequest": (
            ("volume_id", "string", 1),
            ("volume_path", "string", 2),
            ("capacity_range", "CapacityRange", 3),
            ("staging_target_path", "string", 4),
            ("volume_capability", "VolumeCapability", 5),
            ("secrets", "map", 6),
        ),
        "NodeExpandVolumeResponse": (("capacity_bytes", "int64", 1),),
        "NodeGetCapabilitiesRequest": (),
        "NodeGetCapabilitiesResponse": (("capabilities", "repeated NodeServiceCapability", 1),),
        "NodeServiceCapability": (("rpc", "NodeRpc", 1),),
        "NodeRpc": (("type", "int32", 1),),
        "NodeGetInfoRequest": (),
        "NodeGetInfoResponse": (
            ("node_id", "string", 1),
            ("max_volumes_per_node", "int64", 2),
        ),
    },
    REGISTRATION: {
        "InfoRequest": (),
        "PluginInfo": (
            ("type", "string", 1),
            ("name", "string", 2),
            ("endpoint", "string", 3),
            ("supported_versions", "repeated string", 4),
        ),
        "RegistrationStatus": (("plugin_registered", "bool", 1), ("error", "string", 2)),
        "RegistrationStatusResponse": (),
    },
}

# Service → its calls: the messages asked and answered.
SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "csi.v1.Identity": {
        name: (f"{CSI}.{name}Request", f"{CSI}.{name}Response")
        for name in ("GetPluginInfo", "GetPluginCapabilities", "Probe")
    },
    "csi.v1.Node": {
        name: (f"{CSI}.{name}Request", f"{CSI}.{name}Response")
        for name in (
            "NodeStageVolume",
            "NodeUnstageVolume",
            "NodePublishVolume",
            "NodeUnpublishVolume",
            "NodeGetVolumeStats",
            "NodeExpandVolume",
            "NodeGetCapabilities",
            "NodeGetInfo",
        )
    },
    "pluginregistration.Registration": {
        "GetInfo": (f"{REGISTRATION}.InfoRequest", f"{REGISTRATION}.PluginInfo"),
        "NotifyRegistrationStatus": (
            f"{REGISTRATION}.RegistrationStatus",
            f"{REGISTRATION}.RegistrationStatusResponse",
        ),
    },
}

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
}
_pool = descriptor_pool.DescriptorPool()


def _declare(package: str) -> None:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    for name, fields in MESSAGES[package].items():
        made = file.message_type.add(name=name)
        for field, kind, number in fields:
            _add(package, made, field, kind, number)
    _pool.Add(file)


def _add(
    package: str, owner: descriptor_pb2.DescriptorProto, name: str, kind: str, number: int
) -> None:
    many = kind == "map" or kind.startswith("repeated ")
    kind = kind.removeprefix("repeated ")
    field = owner.field.add(
        name=name,
        number=number,
        label=_Field.LABEL_REPEATED if many else _Field.LABEL_OPTIONAL,
    )
    if kind in _TYPES:
        field.type = _TYPES[kind]
        return
    field.type = _Field.TYPE_MESSAGE
    field.type_name = f".{package}.{kind}"
    if kind == "map":  # on the wire: repeated messages of a key and a value
        entry = "".join(map(str.capitalize, name.split("_"))) + "Entry"
        nested = owner.nested_type.add(name=entry)
        nested.options.map_entry = True
        for key, at in (("key", 1), ("value", 2)):
            nested.field.add(
                name=key, number=at, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING
            )
        field.type_name = f".{package}.{owner.name}.{entry}"


for _package in MESSAGES:
    _declare(_package)


def message(name: str) -> Any:
    """The class of the message ``name``, with its package."""
    found = _pool.FindMessageTypeByName(name)
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(found)
    return message_factory.MessageFactory(_pool).GetPrototype(found)  # before protobuf 4.22
