# Runs as the first process of a kernel in user mode: makes the guest's files, goes on as main.sh.
#
#   user-mode.sh DIRECTORY MODULES     DIRECTORY as for main.sh; MODULES: the kernel's
#
# The guest's root is the host's, read-only. A copy of the whole of it, in memory, takes its place;
# what the host has mounted is seen, /proc, /sys, /dev and /run excepted.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -n -t proc proc /proc
mount -n -t sysfs sysfs /sys
mount -n -t tmpfs tmpfs /run
insmod "$2/kernel/fs/overlayfs/overlay.ko"
mkdir -p /run/upper /run/work /run/root
mount -n -t overlay lab -o xino=off,lowerdir=/,upperdir=/run/upper,workdir=/run/work /run/root
cd /run/root || exit
for each in proc sys dev; do mount -n --move /$each $each; done
mount -n -t tmpfs tmpfs run
mkdir run/old
pivot_root . run/old
cd /
umount -l /run/old
rmdir /run/old
mkdir -p /dev/shm /dev/pts
ln -s /proc/self/fd /dev/fd
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup2 /sys/fs/cgroup
hostname lab

# share DIRECTORY: the host's directory itself. (Without sync the host would see what is written when
# the file is closed.)
share() {
  mount -t hostfs -o "sync,$1" none "$1"
}

files() {
  mkdir -p /usr/lib/modules
  mount -t tmpfs tmpfs /usr/lib/modules
  ln -s "$LAB_MODULES" "/usr/lib/modules/$(uname -r)"
  [ -z "$LAB_RESULTS" ] || share "$LAB_RESULTS" || fail "$LAB_RESULTS cannot be shared"
}

port() {
  local number
  [ "$1" = out ] && number=0 || number=1
  stty raw -echo <"/dev/ttyS$number" || fail "no serial line $number"
  printf '/dev/ttyS%s\n' $number
}

share "$1"
. "${BASH_SOURCE[0]%/*}/main.sh" "$1"
