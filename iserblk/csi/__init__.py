"""A CSI node plugin for static volumes: LUNs in the pods of a container orchestrator.

    messages   the protobuf messages of CSI 1.x and of the kubelet's plugin registration
    volumes    what a volume is: its LUN, options and secrets; what is known of those staged here
    host       what is done to the machine: devices, file systems, mounts
    node       the calls, each of them idempotent, in terms of these
    server     gRPC: identity, node, registration; looks after the servers of staged volumes

A volume is a LUN that exists (there is no controller service). Staging attaches it by ``iserblk
attach`` with the built-in NBD server, and mounts it; publishing binds it to where the pod finds it.
What a call is about to do is on disk before it is done, so a plugin that is killed at any point
finds its way when it is called again.

Source: the Container Storage Interface specification, version 1.
"""
