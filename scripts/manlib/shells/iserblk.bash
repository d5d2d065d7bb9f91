# Completion of iserblk for bash. Made by scripts/manpages from the commands: change those.

_iserblk_lists() {
  command sh -c '@LISTS@' sh "$@" 2>/dev/null </dev/null
}

# Sets options and kinds of the command $1: kinds of what its arguments may be.
_iserblk_command() {
  options= kinds=
  case $1 in
@COMMANDS@
    *) return 1 ;;
  esac
}

# Sets choices and kinds of the value of the option $2 of the command $1; fails if there is none.
_iserblk_value() {
  choices= kinds=
  case $1:$2 in
@VALUES@
    *) return 1 ;;
  esac
}

# Sets choices of the value of the option $1 in a list of -o.
_iserblk_pair() {
  choices=
  case $1 in
@PAIRS@
  esac
}

# Sets line: the words up to the cursor, as the shell itself takes them: readline also ends them at
# the characters of COMP_WORDBREAKS.
_iserblk_split() {
  local rest=${COMP_LINE:0:COMP_POINT} word trimmed i
  line=()
  for ((i = 0; i <= COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    trimmed=${rest#"${rest%%[![:blank:]]*}"}
    if [ ${#line[@]} = 0 ] || [ "$trimmed" != "$rest" ]; then line+=(""); fi
    line[-1]+=${trimmed:0:${#word}}
    rest=${trimmed:${#word}}
  done
}

# Offers those words that begin with $cur.
_iserblk_offer() {
  local word
  for word; do
    [[ $word != "$cur"* ]] || COMPREPLY+=("$head$word")
  done
}

# Offers files, or with -d directories. A directory may go on.
_iserblk_files() {
  local file
  while IFS= read -r file; do
    [ ! -d "${file/#\~/$HOME}" ] || file+=/
    COMPREPLY+=("$head$file")
  done < <(compgen "$1" -- "$cur")
}

_iserblk_url() {
  if [[ $cur =~ ^(iser|iscsi)://[^/@?]+/[^/?]*$ ]]; then
    local portal=${cur%/*} found
    # The portal is asked once in a minute. (An address with user@ is not: that would need a secret.)
    if [ "$portal" != "${_iserblk_asked-}" ] || ((SECONDS > _iserblk_until)); then
      _iserblk_known=$(_iserblk_lists target "${line[0]/#\~/$HOME}" "$portal")
      _iserblk_asked=$portal _iserblk_until=$((SECONDS + 60))
    fi
    mapfile -t found <<<"$_iserblk_known"
    [ -z "$_iserblk_known" ] || _iserblk_offer "${found[@]/#/$portal/}"
    compopt -o nospace
  elif [[ $cur != *://* ]]; then
    _iserblk_list name
    _iserblk_offer iser:// iscsi://
  fi
}

_iserblk_list() {
  local found
  mapfile -t found < <(_iserblk_lists "$1")
  _iserblk_offer "${found[@]}"
}

# A list of -o: what is behind its last comma.
_iserblk_pairs() {
  head+=${cur%"${cur##*,}"} cur=${cur##*,}
  if [[ $cur == *=* ]]; then
    head+=${cur%%=*}=
    _iserblk_pair "${cur%%=*}"
    cur=${cur#*=}
    _iserblk_offer $choices
  elif [ "$1" = mount ]; then
    _iserblk_offer @FLAGS@ @NAMES@
  else
    _iserblk_offer @NAMES@
  fi
}

_iserblk() {
  local line cur head= command= options choices= kinds= kind quote= whole prev i
  COMPREPLY=()
  _iserblk_split
  whole=${line[-1]}
  case $whole in [\"\']*) quote=${whole:0:1} ;; esac
  cur=${whole#"$quote"}
  for ((i = 1; i < ${#line[@]} - 1; i++)); do
    case ${line[i]} in -*) ;; *) command=${line[i]}; break ;; esac
  done
  _iserblk_command "$command" || return 0
  prev=${line[${#line[@]} - 2]}
  if [[ $cur == --*=* ]] && _iserblk_value "$command" "${cur%%=*}"; then
    head=${cur%%=*}= cur=${cur#*=}
  elif ! _iserblk_value "$command" "$prev"; then
    _iserblk_command "$command"
    choices=
    if [[ $cur == -* ]]; then choices=$options kinds=; fi
  fi
  _iserblk_offer $choices
  for kind in $kinds; do
    case $kind in
      command) _iserblk_offer @NAMES_OF_COMMANDS@ ;;
      pairs) _iserblk_pairs "$command" ;;
      url) _iserblk_url ;;
      file) [[ $cur == *://* ]] || _iserblk_files -f ;;
      directory) _iserblk_files -d ;;
      portal) [[ $cur == *://* ]] || _iserblk_offer $(compgen -A hostname) ;;
      *) _iserblk_list "$kind" ;;
    esac
  done
  [[ "${COMPREPLY[*]} " != *[=/]\ * ]] || compopt -o nospace
  [ -z "$quote" ] || return 0
  # readline replaces only what is behind the last character at which it ends words.
  local breaks=${COMP_WORDBREAKS//[!:=]/} kept= word
  [ -z "$breaks" ] || kept=${whole%"${whole##*[$breaks]}"}
  for i in "${!COMPREPLY[@]}"; do
    word=${COMPREPLY[i]#"$kept"}
    case $word in *[!A-Za-z0-9@%+=:,./_~-]*) printf -v word %q "$word" ;; esac
    COMPREPLY[i]=$word
  done
}

complete -F _iserblk iserblk
