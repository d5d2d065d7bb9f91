"""Bytes in and out of a TCP socket: lists of buffers, without waiting, for iSER and for TCP."""
