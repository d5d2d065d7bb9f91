"""What is there, what is missing, and what to do about it: small checks that return findings.

``machine``, ``kernel``, ``rdma`` and ``programs`` look at this machine, ``portal`` at a target.
Nothing here changes the system, needs root, or waits without a limit.
"""
