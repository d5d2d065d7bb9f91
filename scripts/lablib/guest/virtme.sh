# Runs in a virtual machine of virtme-ng, as root: goes on as main.sh.
#
#   virtme.sh DIRECTORY     as for main.sh

# Mounts the host's files again, with the guest's page cache: in virtme-ng's own mount each read
# asks the host, and starting Python takes half a minute.
cached() {
  local directory number=0
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

files() {
  local number=0 shared
  for shared in "$LAB_RUN" ${LAB_RESULTS:+"$LAB_RESULTS"}; do
    number=$((number + 1))
    mkdir -p /run/shared/$number
    mount --bind "$shared" /run/shared/$number
  done
  cached
  # Directories that both sides write must be mounted on top of that.
  number=0
  for shared in "$LAB_RUN" ${LAB_RESULTS:+"$LAB_RESULTS"}; do
    number=$((number + 1))
    mountpoint -q "$shared" || mount --bind /run/shared/$number "$shared" ||
      fail "$shared cannot be shared"
  done
}

# Device names come from sysfs: without udev there is no /dev/virtio-ports.
port() {
  local entry
  for entry in /sys/class/virtio-ports/*; do
    if [ "$(cat "$entry/name")" = "lab.$1" ]; then
      printf '/dev/%s\n' "${entry##*/}"
      return
    fi
  done
  fail "no virtio port lab.$1"
}

. "${BASH_SOURCE[0]%/*}/main.sh" "$1"
