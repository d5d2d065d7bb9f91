# Runs in the guest, as root: makes the set-up, runs the command, leaves its exit status. Sourced by
# the file that is for the kind of guest, virtme.sh or user-mode.sh, with
#
#   DIRECTORY     shared with the host; holds what lablib/vm.py wrote
#
# and two functions: `files` puts the host's files in place, with those that both sides write, and
# the modules; `port NAME` prints the device that takes the command's output NAME (out, err).
#
# To the host: `booted`, `ready` (variables of the set-up, one a line), `status` (a number, or words).

: >"$1/booted"
while IFS= read -r -d '' variable; do
  export "${variable?}"
done <"$1/environment"
here=$(dirname "${BASH_SOURCE[0]}")

# tell NAME: gives standard input to the host as the file NAME, in one step, because the host reads
# it at any time.
tell() {
  cat >"$LAB_RUN/$1.new"
  mv "$LAB_RUN/$1.new" "$LAB_RUN/$1"
}

fail() {
  printf 'the set-up %s failed: %s\n' "$LAB_SETUP" "$*" | tell status
  exec sleep infinity # the host ends the guest
}

files
. "$here/setups.sh"

# The guest runs without udev, whether the host has it or not: udev would load modules by itself.
pkill -x systemd-udevd
ulimit -l unlimited
ulimit -c 0
ip link set lo up mtu "$LAB_MTU"
load nbd loop fuse # without udev nothing loads them when they are needed
set -a # the command gets the variables that a set-up sets
[ -z "$LAB_NETWORK" ] || network
"setup_${LAB_SETUP//-/_}"
set +a
while read -r variable; do
  printf '%s=%s\n' "$variable" "${!variable}"
done < <(compgen -v | grep -E '^LAB_(URL|URL2|LISTEN|NETNS|PORT|DEVICE|ADDRESS|INITIATOR|TPG)$') | tell ready
printf 'lab: %s ready %s s after boot\n' "$LAB_SETUP" "$(cut -d ' ' -f 1 /proc/uptime)" >/dev/kmsg

mapfile -d '' -t command <"$LAB_RUN/command"
if [ ${#command[@]} = 0 ]; then # the command runs on the host
  until [ -e "$LAB_RUN/stop" ]; do sleep 1; done
  echo 0 | tell status
  exec sleep infinity
fi

# A port can be opened only once; through a pipe the command can also open /dev/stderr again.
mkfifo /run/lab.out /run/lab.err
cat /run/lab.out >"$(port out)" &
out=$!
cat /run/lab.err >"$(port err)" &
err=$!
cd "$LAB_CWD" || fail "no directory $LAB_CWD"
"${command[@]}" </dev/null >/run/lab.out 2>/run/lab.err
status=$?
# Processes that the command left running may keep its output open.
(sleep 2; kill $out $err) 2>/dev/null &
wait $out $err 2>/dev/null
echo $status | tell status
exec sleep infinity
