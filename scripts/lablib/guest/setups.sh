# The set-ups: one function each, called setup_NAME, with underscores in NAME. Read by main.sh.
# A step that fails calls `fail` with a message.

export LAB_ADDRESS=10.9.9.1
export LAB_INITIATOR=iqn.2026-11.lab:initiator
iqn=iqn.2026-11.lab:disk
configfs=/sys/kernel/config/target

load() {
  local module
  for module in "$@"; do
    modprobe "$module" 2>/run/lab.modprobe || fail "modprobe $module: $(cat /run/lab.modprobe)"
  done
}

# Runs a step quietly; if it fails, its last line says why.
step() {
  "$@" >/run/lab.step 2>&1 || fail "$*: $(tail -n 1 /run/lab.step)"
}

# put VALUE FILE: writes VALUE into a file of configfs; fails if configfs refuses the write.
put() {
  { printf '%s' "$1" >"$2"; } 2>/run/lab.step || fail "$2 refuses $1: $(tail -n 1 /run/lab.step)"
}

# The emulated network card, as QEMU's user network expects it.
network() {
  load virtio_net
  local card
  card=$(basename "$(dirname "$(ls -d /sys/class/net/*/device/driver/module/drivers/virtio:virtio_net \
    2>/dev/null | head -n 1 | sed 's,/device/driver/.*,/device,')")")
  [ -n "$card" ] && [ "$card" != . ] || fail "no emulated network card"
  step ip address add 10.0.2.15/24 dev "$card"
  step ip link set "$card" up
  step ip route add default via 10.0.2.2
  LAB_CARD=$card
}

dummy() {
  load dummy
  step ip link add dummy0 type dummy
  step ip link set dummy0 mtu "$LAB_MTU"
  step ip address add $LAB_ADDRESS/24 dev dummy0
  step ip link set dummy0 up
}

rxe() {
  load rdma_rxe rdma_ucm
  step rdma link add rxe0 type rxe netdev "$1"
  LAB_DEVICE=rxe0
}

siw() {
  load ib_core iw_cm rdma_cm ib_uverbs rdma_ucm libcrc32c crc32c_generic
  step insmod "$LAB_SIW"
  step rdma link add siw0 type siw netdev "$1"
  LAB_DEVICE=siw0
}

# lun NUMBER MEBIBYTES: a LUN in the guest's memory.
lun() {
  local store=$configfs/core/fileio_$1/disk$1 file=/run/lab-luns/disk$1
  step mkdir -p "$store" /run/lab-luns
  mountpoint -q /run/lab-luns || step mount -t tmpfs tmpfs /run/lab-luns
  step truncate -s "$2M" "$file"
  put "fd_dev_name=$file,fd_dev_size=$(($2 << 20))" "$store/control"
  put 1 "$store/enable"
  put "lab-disk-$1" "$store/wwn/vpd_unit_serial"
  put 1 "$store/attrib/emulate_tpu"
  step mkdir "$tpg/lun/lun_$1"
  step ln -s "$store" "$tpg/lun/lun_$1/disk$1"
}

# LIO's target with two LUNs, without a portal; sets `tpg`, which the caller has made local.
lio_target() {
  load target_core_mod target_core_file iscsi_target_mod
  mountpoint -q /sys/kernel/config || step mount -t configfs configfs /sys/kernel/config
  tpg=$configfs/iscsi/$iqn/tpgt_1
  step mkdir -p "$tpg"
  lun 0 256
  lun 1 64
  step mkdir -p /etc/target/pr /var/target/pr # LIO keeps reservations in one of these
  put 0 "$tpg/attrib/authentication"
  put 1 "$tpg/attrib/generate_node_acls"
  put 0 "$tpg/attrib/demo_mode_write_protect"
  # LIO gives up on a WRITE whose data takes longer than 3 s. An emulated machine needs longer when
  # much is in flight. Only for initiators that LIO knows by name can the limit be raised.
  step mkdir -p /etc/iscsi
  printf 'InitiatorName=%s\n' $LAB_INITIATOR >/etc/iscsi/initiatorname.iscsi
  local known=$tpg/acls/$LAB_INITIATOR number
  step mkdir "$known"
  put 60 "$known/attrib/dataout_timeout"
  for number in 0 1; do
    step mkdir "$known/lun_$number"
    step ln -s "$tpg/lun/lun_$number" "$known/lun_$number/disk$number"
    put 0 "$known/lun_$number/write_protect"
  done
}

# lio ADDRESS: LIO's iSER target on ADDRESS, with two LUNs. LAB_TPG: its directory in configfs.
lio() {
  local tpg
  load ib_isert
  lio_target
  # The portal listens on plain TCP first, and siw shares the port space with TCP: that listener is
  # made in another network namespace, out of the way.
  step ip netns add lio
  step nsenter --net=/run/netns/lio mkdir "$tpg/np/$1:3260"
  put 1 "$tpg/np/$1:3260/iser"
  put 1 "$tpg/enable"
  rdma resource show cm_id 2>/dev/null | grep -q "src-addr $1:3260" ||
    fail "LIO does not listen on $1:3260 for RDMA: $(rdma resource show cm_id 2>&1 | tail -n 1)"
  LAB_PORT=3260
  LAB_URL=iser://$1:3260/$iqn/0
  LAB_URL2=iser://$1:3260/$iqn/1
  LAB_TPG=$tpg
}

# lio_tcp ADDRESS: the same over Traditional iSCSI. LAB_TPG: its directory in configfs.
lio_tcp() {
  local tpg
  lio_target
  step mkdir "$tpg/np/$1:3260"
  put 1 "$tpg/enable"
  LAB_PORT=3260
  LAB_URL=iscsi://$1:3260/$iqn/0
  LAB_URL2=iscsi://$1:3260/$iqn/1
  LAB_TPG=$tpg
}

# tgtd's iSER module binds to port 3260 of all addresses.
tgt() {
  local words try initiator
  step mkdir -p /run/lab-luns
  step mount -t tmpfs tmpfs /run/lab-luns
  step truncate -s 256M /run/lab-luns/disk1
  PATH=$LAB_TGT/usr/sbin:$PATH
  tgtd -f --iscsi portal=$LAB_ADDRESS:3260 --iser pool_sz_mb=128,buf_sz_kb=1024 \
    >/run/lab.tgtd 2>&1 &
  for try in {1..100}; do
    tgtadm --lld iser --mode sys --op show >/dev/null 2>&1 && break
    sleep 0.2
  done
  step tgtadm --lld iser --mode target --op new --tid 1 --targetname $iqn
  step tgtadm --lld iser --mode logicalunit --op new --tid 1 --lun 1 \
    --backing-store /run/lab-luns/disk1 --bstype rdwr
  # Both lists must name an initiator, and the second list takes no wildcard.
  step tgtadm --lld iser --mode target --op bind --tid 1 --initiator-address ALL
  for initiator in $LAB_INITIATOR $LAB_INITIATOR:{1..8}; do
    step tgtadm --lld iser --mode target --op bind --tid 1 --initiator-name $initiator
  done
  rdma resource show cm_id 2>/dev/null | grep -q ':3260.*LISTEN\|LISTEN.*:3260' ||
    fail "tgtd does not listen for RDMA: $(tail -n 1 /run/lab.tgtd)"
  LAB_PORT=3260
  LAB_URL="iser://$LAB_ADDRESS:3260/$iqn/1?initiator-name=$LAB_INITIATOR"
}

# initiator TRANSPORT: loads that module, and puts open-iscsi in place as if it were installed.
initiator() {
  load "$1" sd_mod
  # Directory by directory: / itself cannot be written. ldconfig would read every library of the
  # host; these are found without, because they are where libraries are looked for by default.
  (cd "$LAB_OPEN_ISCSI" && tar -c -- *) | tar -C / -x --keep-directory-symlink ||
    fail "open-iscsi could not be put in place"
  step mkdir -p /etc/iscsi /run/lock/iscsi
  printf 'InitiatorName=%s\n' $LAB_INITIATOR >/etc/iscsi/initiatorname.iscsi
  step iscsid
}

setup_none() { :; }

# The modules alone: without udev nothing loads the ciphers of ESP. Tests make their namespaces.
setup_ip() {
  load sctp veth xfrm_user esp4 gcm seqiv
}

setup_rxe() {
  dummy
  rxe dummy0
}

setup_siw() {
  dummy
  siw dummy0
}

setup_rxe_lio() {
  setup_rxe
  lio $LAB_ADDRESS
}

setup_siw_lio() {
  setup_siw
  lio $LAB_ADDRESS
}

setup_siw_lio_net() {
  siw "$LAB_CARD"
  lio 10.0.2.15
}

setup_rxe_tgt() {
  setup_rxe
  tgt
}

setup_rxe_initiator() {
  setup_rxe
  LAB_LISTEN=$LAB_ADDRESS
  initiator ib_iser
}

setup_rxe_lio_initiator() {
  setup_rxe_lio
  initiator ib_iser
}

# An iserblk target without an RDMA device must run elsewhere: in a network namespace at the other
# end of a veth pair, with siw at this end.
setup_siw_initiator() {
  LAB_NETNS=peer
  LAB_LISTEN=10.9.9.2
  load veth
  local LAB_VETH_MTU=$((LAB_MTU < 65535 ? LAB_MTU : 65535))
  step ip netns add $LAB_NETNS
  step ip link add veth0 mtu "$LAB_VETH_MTU" type veth peer name veth1 mtu "$LAB_VETH_MTU" \
    netns $LAB_NETNS
  step ip address add $LAB_ADDRESS/24 dev veth0
  step ip link set veth0 up
  step ip -n $LAB_NETNS address add $LAB_LISTEN/24 dev veth1
  step ip -n $LAB_NETNS link set lo up
  step ip -n $LAB_NETNS link set veth1 up
  siw veth0
  initiator ib_iser
}

# LIO on one address, and a second address for a target that the command starts.
setup_tcp() {
  dummy
  LAB_LISTEN=10.9.9.2
  step ip address add $LAB_LISTEN/24 dev dummy0
  lio_tcp $LAB_ADDRESS
  initiator iscsi_tcp
}
