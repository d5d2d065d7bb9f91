#!/bin/sh
# The same by nbdkit and its plugin for Python: prints the size of a LUN.
#
#   examples/nbdkit.sh iser://HOST/IQN/LUN
#
# -U -: nbdkit listens on a socket of its own, which nobody else reaches, and ends with the command
# of --run. Debian's package of iserblk brings the plugin: `nbdkit -U - iserblk uri=URL …` there.
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
nbdkit -U - python "$top/nbd_plugin/iserblk.py" "uri=$1" --run 'nbdinfo --size "$uri"'
