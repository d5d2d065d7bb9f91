"""Where the bytes of a LUN live: a file or block device, and a volatile cache in front of one."""
