"""What `iserblk top` and the exporter's page show: LUNs of this machine over the last minutes.

``history`` turns readings, one after the other, into rates, latencies over time and events;
``events`` says what has happened between two of them. ``frame`` draws that in the characters of a
terminal, ``page`` as HTML. None of these asks any process, or reads a clock. ``terminal`` is the
screen and its keys.
"""
