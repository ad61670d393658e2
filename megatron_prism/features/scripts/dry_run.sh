# Looks at each command of a script that runs dry before it runs (dry_run.py).
__prism_note() { printf '["%s", "%s"]\n' "$1" "${2//[\"\\$'\n\t']/ }" >> "$PRISM_DRY/notes"; }
__prism_new() {
  local path=$1; [[ $path == /* ]] || path=$PWD/$path
  [[ $path == "$PRISM_DRY_HOME"/* && ! -e $path && -d ${path%/*} ]]
}
__prism_place() {
  if __prism_new "$1"; then echo "$1"
  elif [[ -f $1 ]]; then __prism_note kept "$1"; echo /dev/null
  else __prism_note "left out" "> $1"; echo /dev/null; fi
}
__prism_run() {
  local name=${1##*/}
  [[ $1 == */* ]] || { "$@"; return; }
  if [[ -x $PRISM_DRY/bin/$name ]]; then shift; "$PRISM_DRY/bin/$name" "$@"
  elif [[ ! -e $1 ]]; then __prism_note "left out" "$*"
  elif [[ $name == *.py ]]; then python "$@"
  elif [[ $name == *.sh ]] || head -n 1 "$1" | grep -aq '^#!.*sh'; then bash "$@"
  else "$@"; fi
}
ulimit() { builtin ulimit "$@" 2>/dev/null || :; }
kill() { __prism_note "left out" "kill $*"; }
command_not_found_handle() { __prism_note "left out" "$*"; return 0; }
__prism_check() {
  printf '%s\n' "$BASH_COMMAND" >| "$PRISM_DRY/at"
  local text=$BASH_COMMAND plain
  case $text in
    '[[ '*|'(('*|'for '*|'case '*|'select '*|__prism_*|*'>> "$PRISM_DRY/notes"') return 0 ;;
  esac
  case $text in
    source\ *|.\ *)
      [[ $text == *[\`\(]* ]] && return 0
      eval "set -- ${text#* }"
      # start-up files of this machine's user: what they export is here, the rest is of a login
      case $1 in
        "$HOME"/.profile|"$HOME"/.bashrc|"$HOME"/.bash_profile|"$HOME"/.bash_login|/etc/profile|/etc/bashrc|/etc/bash.bashrc)
          __prism_note "left out" "$text"; __prism_line=:; return 1 ;;
      esac
      [[ -r $1 ]] && { [[ $1 == /* ]] || set -- "$PWD/$1"; printf '%s\n' "$1" >> "$PRISM_DRY/sourced"; }
      [[ -r $1 ]] || type -P "$1" >/dev/null && return 0
      __prism_note "left out" "$text"; __prism_line=:; return 1 ;;
    cd\ *|pushd\ *) __prism_line="$text || __prism_note 'left out' '${text//\'/}'"; return 1 ;;
  esac
  plain=$text
  while [[ $plain =~ ^[A-Za-z_][A-Za-z0-9_]*=[^[:space:]\"\'\$\`\(]*[[:space:]]+(.*)$ ]]; do
    plain=${BASH_REMATCH[1]}
  done
  case ${plain%%[[:space:]]*} in */*|\$*|\"\$*) ;; *) [[ $text == *\>* ]] || return 0 ;; esac
  __prism_line=$("$PRISM_DRY/bin/rewrite" "$text")
  plain=${__prism_line##*$'\n'#} __prism_line=${__prism_line%$'\n'#*}
  [[ $__prism_line == "$text" ]] && return 0
  [[ -n $plain ]] && eval "$plain" && return 0
  return 1
}
set -T
trap 'shopt -s extdebug; __prism_check "$@" || { eval "$__prism_line" || :; ! :; }' DEBUG
