"""From a URL to a session: which provider, TCP or rdma_cm, login, redirects, SendTargets.

reach          addresses in turn, providers in turn, until a login has succeeded
iwarp, verbs   one address: by TCP, and by rdma_cm
login          from a connection to a session
redirects      targets that have moved
send_targets   discovery sessions
"""
