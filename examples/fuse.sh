#!/bin/sh
# A LUN as a file: writes FILE to its begin, by dd, and reads it back after mounting it again.
# What the LUN has there is lost.
#
#   examples/fuse.sh iser://HOST/IQN/LUN FILE
set -eu
work=$(mktemp -d)
mkdir "$work/luns"
trap 'iserblk umount "$work/luns" 2>/dev/null || true; rm -r "$work"' EXIT

iserblk mount "$1" "$work/luns"
lun=$(echo "$work"/luns/*)
dd if="$2" of="$lun" bs=1M conv=notrunc,fsync status=none
iserblk umount "$work/luns" # returns when all data is on the disk

iserblk mount "$1" "$work/luns"
cmp --bytes="$(stat -c %s "$2")" "$2" "$lun"
echo "$2 is on the LUN"
