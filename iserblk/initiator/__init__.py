"""Sessions: connect, log in, submit commands, and the two drivers that run a session."""
