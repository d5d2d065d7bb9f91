#!/bin/sh
# A LUN over NBD: copies it into a file, with nbdcopy of libnbd.
#
#   examples/nbd.sh iser://HOST/IQN/LUN FILE
set -eu
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || { kill "$server" && wait "$server"; } || true; rm -r "$work"' EXIT

# The server writes "ready URI" when clients may come. It is read from a pipe: no waiting in a loop.
mkfifo "$work/ready"
iserblk nbd "$1" --socket "$work/socket" >"$work/ready" &
server=$!
read -r word uri <"$work/ready"
[ "$word" = ready ]

nbdinfo --size "$uri"
nbdcopy "$uri" "$2"
