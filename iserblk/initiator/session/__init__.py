"""A session in full feature phase: what is in flight, what is sent, what arrives, and when it ends.

connection  what a session has once for each connection
slots       one command in flight, and what waits for it
sending     the queue, the command window, CmdSN order
session     PDUs from the target, lost connections, the end
several     the connections of a session that may have several of them
recovery    what is done about one lost connection of several
descriptors several connections, polled as one
life        the states of a session, and the events between them
driving     what a session needs of its driver
listeners   what follows the commands of one LUN
logout      the Logout Request, and its times
deadlines   what is done about a command that does not end
"""
