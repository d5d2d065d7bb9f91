"""Multipath: several portals to one LUN, one of them in use.

addresses       URLs with their options; URLs of one LUN are joined
policy          which portal to use: no I/O, no clock
paths           tries the portals when a session connects again
first_session   tries the portals when a URL is opened
failback        goes back to a better portal
discovering     finds portals that the target reports
"""
