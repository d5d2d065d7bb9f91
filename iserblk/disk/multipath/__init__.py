"""Several portals to one LUN, one of them in use.

addresses       URLs with their options, those of one LUN joined
policy          which to take: no I/O, no clock
paths           how they are tried when a session connects again
first_session   the same when a URL is opened
failback        back to a better one
discovering     portals that the target tells of
"""
