"""Checks for ``iserblk doctor``: each returns findings: what works, what is missing, the remedy.

``kernel``, ``rdma`` and ``programs`` check this machine, as ``machine`` shows it, and ``report``
runs them all. ``portal`` checks a target's portal. No check changes the system, needs root, or
waits without a limit.
"""
