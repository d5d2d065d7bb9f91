"""The command line: ``main.py`` is the entry, and every command has a module of its own.

main.py        finds commands; turns errors into one line and an exit status
options.py     parameters that several commands take: options of a connection, sizes
running.py     runs async bodies, which signals cancel
endpoints.py   one disk or file, as copy sees it
output.py      tables and sizes for people, JSON for scripts
notify.py      reports readiness to scripts and systemd
"""
