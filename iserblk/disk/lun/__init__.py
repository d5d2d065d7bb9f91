"""One LUN: what it is, what can be done with it, and who may.

operations    what front-ends ask for
geometry      what its limits mean for a range of bytes
identify      what it is and can; sizing: how large; inventory: which there are
reservation   ``reserve=exclusive``
"""
