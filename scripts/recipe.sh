#!/usr/bin/env bash
# What the recipes run_all_*.sh share. They source it; by itself it only defines functions.
#
#   here PATH                     a path as seen from the repository, if it exists; else the word itself (a hub name)
#   begin DEFAULT_OUT             sets root, out and seed; makes .venv and enters it; from there on we are in the root
#   same_settings "NAME=x ..."    refuses an out that was made with other settings
#   stage NAME END COMMAND...     runs COMMAND unless the file END marks it as finished
#   report                        a page to look at, last
set -euo pipefail

here() { if [[ -e $1 ]]; then realpath "$1"; else echo "$1"; fi; }

begin() {
    root=$(cd "$(dirname "$0")/.." && pwd)
    out=$(realpath -m --relative-base="$root" "${OUT:-$root/$1}") # a relative OUT is meant from where you are
    cd "$root"
    seed=${SEED:-1}
    [[ $seed =~ ^[0-9]+$ ]] || { echo "error: SEED=$seed is not a whole number of at least 0" >&2; exit 2; }
    bash scripts/setup.sh
    source .venv/bin/activate
    # Threads that wait sleep instead of spinning: ten times faster as soon as anything else wants the cores.
    export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
}

# Finished stages are kept, so a folder belongs to one set of choices: stages of two would be mixed without a word.
same_settings() {
    mkdir -p "$out"
    if [[ -f $out/settings && $(< "$out/settings") != "$1" ]]; then
        echo "error: $out was made with $(< "$out/settings"), now it is $1; choose another OUT or remove $out" >&2
        exit 2
    fi
    echo "$1" > "$out/settings"
}

stage() {
    python scripts/run_stage.py --name "$1" --done "$2" --logs "$out/logs" -- "${@:3}"
}

# The run is good without it: what goes wrong here is said, and fails nothing.
report() {
    python scripts/report.py "$out" || echo "no report page (see above); again with: python scripts/report.py $out" >&2
}
