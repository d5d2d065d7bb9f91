"""Faults on purpose: a TCP proxy that stands between two ends, and wrappers inside a process.

``framing`` finds the units of a stream, ``behaviours`` says what happens to them, ``proxy`` runs
them in a thread of its own, ``seams`` does the like to queue pairs and byte streams.
"""
