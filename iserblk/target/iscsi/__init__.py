"""The target's iSCSI side: connections, logins, and the commands of a session.

listening, accepting   where connections come from, and what they turn out to be
connection             one session: login, then commands; its window and its end
slot                   one command of it
control                answers to PDUs that are no SCSI commands
buffers                the memory that data goes through
"""
