"""The command line: ``main.py`` is the entry, and every command has a module of its own.

main.py        finds commands, turns errors into one line and an exit status
options.py     what several commands take: URLs' options, sizes
running.py     async bodies under signals
endpoints.py   one disk or file, as copy sees it
output.py      tables and sizes for people, JSON for scripts
notify.py      readiness, for scripts and systemd
"""
