# What there is, one a line: LIST [PROGRAM URL]. (No single quote may stand in this file.)
export LC_ALL=C
case $1 in
  name)
    system=/etc/iserblk own=${XDG_CONFIG_HOME:-$HOME/.config}/iserblk
    [ "$(id -u)" != 0 ] || own=$system
    [ -z "$ISERBLK_CONFIG_DIR" ] || system=$ISERBLK_CONFIG_DIR own=$ISERBLK_CONFIG_DIR
    for file in "$own"/*.conf "$system"/*.conf; do
      [ ! -e "$file" ] || { file=${file##*/}; printf "%s\n" "${file%.conf}"; }
    done | sort -u ;;
  nbd)
    for device in /dev/nbd[0-9]*; do
      case $device in *[0-9]p[0-9]*) ;; *) [ ! -e "$device" ] || printf "%s\n" "$device" ;; esac
    done ;;
  attached)
    for home in /run/iserblk/nbd[0-9]*/; do
      [ ! -d "$home" ] || { home=${home%/}; printf "%s\n" "/dev/${home##*/}"; }
    done ;;
  mounted)
    while read -r _ place type _; do
      [ "$type" != fuse.iserblk ] || printf "%b\n" "$place"
    done </proc/self/mounts ;;
  target)
    timeout 5 "$2" -q discover -- "$3" | while read -r url _; do
      case $url in iser://*/* | iscsi://*/*) ;; *) continue ;; esac
      target=${url#*://*/}
      case $target in *[!A-Za-z0-9.:%_-]*) ;; *) printf "%s\n" "$target" ;; esac
    done | sort -u ;;
esac
