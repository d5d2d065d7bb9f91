"""The target's iSCSI side: connections, logins, and the commands of a session.

listening, accepting   listen; tell from its first bytes what protocol a connection speaks
connection             one session with one connection: login, then commands, until its end
slot                   one command of a session, and the session's sequence numbers
control                answers to PDUs that are no SCSI commands
buffers                memory for the data of commands
"""
