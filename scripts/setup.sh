#!/usr/bin/env bash
# Makes .venv with what requirements.txt pins. Minutes the first time, a moment afterwards; no compiler, root or GPU.
#
#   bash scripts/setup.sh
#   PYTHON=/usr/bin/python3.11 bash scripts/setup.sh                  which Python .venv is made from
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash scripts/setup.sh
#                                                                     the small CPU build of torch (0.2 GB instead of several)
#
# An interrupted set-up is repaired by the next one, and two at once wait for each other.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/set-up-is-complete
unfinished=.venv.unfinished # outside: emptying .venv must not lose it

fail() { echo "error: $*" >&2; exit 2; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1; }
# What .venv depends on: the pins, the Python inside it and where it lies (a virtual environment cannot be moved).
wanted_stamp() { { cat requirements.txt; pwd; "$venv/bin/python" -c 'import sys; print(sys.version)'; } | sha256sum; }

# Outside .venv, which may be emptied below; released when this script ends, however it ends.
if command -v flock > /dev/null; then
    exec 9> .venv.lock
    flock --nonblock 9 || { echo "another set-up is running here: waiting for it"; flock 9; }
fi

if [[ -n ${PYTHON:-} ]]; then
    command -v "$PYTHON" > /dev/null || fail "PYTHON=$PYTHON: no such program"
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1); 3.11 or newer is needed"
    # Another Python than the one .venv was made from: start over.
    if [[ -f $stamp && $("$PYTHON" -V 2>&1) != $("$venv/bin/python" -V 2>&1) ]]; then
        echo "$venv holds another Python than PYTHON=$PYTHON: making it again"
        touch "$unfinished"
    fi
fi
if [[ -f $stamp && ! -f $unfinished && $(< "$stamp") == $(wanted_stamp) ]]; then
    exit 0
fi

start=$SECONDS
# A .venv that the user made is completed; one that we left half-made, or that was moved here, is made again.
if [[ -f $unfinished ]] || ! is_new_enough "$venv/bin/python" ||
    [[ "$("$venv/bin/python" -c 'import sys; print(sys.prefix)')" != "$PWD/$venv" ]]; then
    base=${PYTHON:-}
    for candidate in python3.11 python3.12 python3.13 python3; do
        [[ -z $base ]] && is_new_enough "$candidate" && base=$candidate
    done
    [[ -n $base ]] || fail "Python 3.11 or newer is needed and was not found (python3 is $(python3 -V 2>&1 || true));" \
        "install it (Debian, Ubuntu: apt-get install python3.11 python3.11-venv) or point PYTHON at one"
    "$base" -c 'import ensurepip, venv' > /dev/null 2>&1 || fail "$base has no venv module;" \
        "install it (Debian, Ubuntu: apt-get install python3-venv) or point PYTHON at another Python"
    echo "making $venv with $("$base" -V)"
    touch "$unfinished"
    "$base" -m venv --clear "$venv"
fi
[[ ! -f $stamp ]] || touch "$unfinished" # never on a .venv of the user's own: an interruption would have it emptied
rm -f "$stamp"

echo "installing what requirements.txt pins (once: a few minutes; 1.6 GB on disk with a CPU build of torch, several more with CUDA's)"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input)
[[ -t 1 ]] || pip+=(--quiet)
export DS_BUILD_OPS=0 # DeepSpeed's kernels are compiled when first used, if ever: the CPU path uses none
# torch first and alone: a CPU build (2.13.0+cpu) that pip can see satisfies the pin and wins over the CUDA build, and
# whatever depends on torch then finds it installed.
torch=$(grep -oE '^torch==[^ #]+' requirements.txt)
{ "${pip[@]}" "$torch" && "${pip[@]}" -r requirements.txt; } ||
    fail "installing into $venv failed (pip's own message is above); with the network back, run this again"
wanted_stamp > "$stamp"
rm -f "$unfinished"
echo "$venv is ready after $((SECONDS - start)) s: $("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)')"
