"""What was written and is not on stable storage yet: what a flush promises, and the journal.

promise   what a flush may promise, and which loss it tells
journal   what is to be sent again when the target has lost its cache
copies    the copies that it makes (compiled)
replay    sending them again
"""
