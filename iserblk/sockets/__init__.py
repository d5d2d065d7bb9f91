"""Non-blocking send and receive of lists of buffers on a TCP socket, for iWARP and for iSCSI."""
