"""From a URL to a session: which provider, TCP or rdma_cm, login, redirects, SendTargets.

reach          tries addresses and providers in turn, until a login has succeeded
iwarp, verbs   connect to one portal: by TCP, and by rdma_cm
sctp           the same by SCTP
login          from a connection to a session
further        where further connections of a session go
redirects      follows targets that have moved
send_targets   discovery sessions
"""
