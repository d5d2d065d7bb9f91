#!/bin/sh
# A LUN as /dev/nbdX, as root: makes a file system, writes a file into it, and lists it after
# attaching it again. What the LUN has is lost.
#
#   examples/attach.sh iser://HOST/IQN/LUN
set -eu
work=$(mktemp -d) device=
end() {
  ! mountpoint -q "$work" || umount "$work"
  [ -z "$device" ] || iserblk detach "$device"
  rmdir "$work"
}
trap end EXIT

attach() {
  device=$(iserblk attach "$1") # "ready /dev/nbdX"
  device=${device#ready }
}

attach "$1"
mkfs.ext4 -q "$device"
mount "$device" "$work"
echo hello >"$work/greeting"
umount "$work"
iserblk detach "$device" # returns when all data is on the disk
device=

attach "$1"
mount -o ro "$device" "$work"
cat "$work/greeting"
