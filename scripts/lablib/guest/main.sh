# Runs in the guest, as root: makes the set-up, runs the command, leaves its exit status.
#
#   main.sh DIRECTORY     shared with the host; holds what lablib/vm.py wrote
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

# port NAME: the device that takes the command's output NAME (out, err).
port() {
  local entry number
  if [ -n "$LAB_USER_MODE" ]; then
    [ "$1" = out ] && number=0 || number=1
    stty raw -echo <"/dev/ttyS$number" || fail "no serial line $number"
    printf '/dev/ttyS%s\n' $number
    return
  fi
  # Device names come from sysfs: without udev there is no /dev/virtio-ports.
  for entry in /sys/class/virtio-ports/*; do
    if [ "$(cat "$entry/name")" = "lab.$1" ]; then
      printf '/dev/%s\n' "${entry##*/}"
      return
    fi
  done
  fail "no virtio port lab.$1"
}

# Mounts the host's files again, with the guest's page cache: in virtme-ng's own mount each read
# asks the host, and starting Python takes half a minute.
cached() {
  local directory number=0 shared
  mkdir /run/host
  mount -t 9p -o ro,trans=virtio,version=9p2000.L,access=any,msize=524288,cache=loose \
    lab.root /run/host || fail "the host's files cannot be mounted"
  for directory in /usr "$HOME" "$LAB_TOP"; do
    number=$((number + 1))
    mkdir -p /run/over/$number/upper /run/over/$number/work
    [ "$directory" != / ] && [ -d "/run/host$directory" ] || continue
    mount -t overlay lab -o "xino=off,lowerdir=/run/host$directory" \
      -o "upperdir=/run/over/$number/upper,workdir=/run/over/$number/work" "$directory" ||
      fail "no copy of $directory can be made"
  done
  mkdir -p /usr/lib/modules
  mount -t tmpfs tmpfs /usr/lib/modules
  ln -s "/run/host$LAB_MODULES" "/usr/lib/modules/$(uname -r)"
}

if [ -n "$LAB_USER_MODE" ]; then
  mkdir -p /usr/lib/modules
  mount -t tmpfs tmpfs /usr/lib/modules
  ln -s "$LAB_MODULES" "/usr/lib/modules/$(uname -r)"
  [ -z "$LAB_RESULTS" ] || share "$LAB_RESULTS" || fail "$LAB_RESULTS cannot be shared"
else
  # Directories that both sides write must be mounted on top of that.
  number=0
  for shared in "$LAB_RUN" ${LAB_RESULTS:+"$LAB_RESULTS"}; do
    number=$((number + 1))
    mkdir -p /run/shared/$number
    mount --bind "$shared" /run/shared/$number
  done
  cached
  number=0
  for shared in "$LAB_RUN" ${LAB_RESULTS:+"$LAB_RESULTS"}; do
    number=$((number + 1))
    mountpoint -q "$shared" || mount --bind /run/shared/$number "$shared" ||
      fail "$shared cannot be shared"
  done
fi

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
