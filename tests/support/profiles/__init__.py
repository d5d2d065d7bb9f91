"""Habits of other targets, for tests: each module is a profile, named after what it copies. It says
what the habit is, and its source.

A profile of what a LUN says and does has ``Device``, a DeviceServer of our target with that habit.
It takes what DeviceServer takes, so it is given where a target is made:

- in this process: ``serve(…, make_device=lio.Device)`` (``tests.support.target_here``), or
  ``lio.Device(luns, iqn)`` where a test has no sockets;
- as a process: ``start_target("lun:size=8M", profile="lio")`` (tests/integration), that is
  ``PROFILE=lio python -m tests.support.serve …``.

A profile of what a portal says of itself has constants, for ``tests.support.portal``.
"""
