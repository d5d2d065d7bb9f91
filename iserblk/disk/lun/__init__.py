"""One LUN: what it is, what can be done with it, and which host may use it.

operations    what front-ends ask for
geometry      what its limits mean for a range of bytes
identify      its names and abilities
checked_identity  whether it is the LUN that was opened
sizing        its size
inventory     which LUNs the target has
reservation   ``reserve=exclusive``
"""
