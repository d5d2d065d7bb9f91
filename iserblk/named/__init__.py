"""Named LUNs: files that commands take by name in place of URLs, and that systemd's units read.

files.py       the files: their form, where they are, reading and replacing them
resolving.py   names on a command line become URLs
open_iscsi.py  what open-iscsi knows of targets, as named LUNs
"""
