"""Durability: what was written and is not on stable storage yet.

promise   what a flush may promise, and what is lost
losses    to whom a loss is told
journal   what is sent again when the target has lost its cache
copies    the journal's copies of written data (compiled)
replay    sends the journal again
"""
