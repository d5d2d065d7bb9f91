"""One LUN: what it is, what can be done with it, and who may.

operations, flushing, provisioning   what front-ends ask for
geometry                             what its limits mean for a range of bytes
identify, sizing, inventory          what it is, how large, and which there are
reservation                          ``reserve=exclusive``
"""
