"""RDMA-Capable Protocols (RCaP): the interface of a queue pair (``seam``), and its providers.

``iwarp``: software iWARP over TCP. ``verbs``: RDMA devices. ``inprocess``: two ends in one process.
"""
