#!/usr/bin/env bash
# Lint, format and tests in the .venv as it is; pytest's summary is the last line. Words after it go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[[ -x $python ]] || { echo "error: there is no .venv here; run: bash scripts/setup.sh" >&2; exit 2; }

# The suite needs no network and must not notice one.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# OMP_NUM_THREADS is left to tests/conftest.py: one thread a process is the fastest for models this small.
# Threads that wait sleep instead of spinning: ten times faster where two ranks or two programs share the cores.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"

$python -m ruff check .
$python -m ruff format --check .
where=(tests)
for word in "$@"; do [[ ! -e ${word%%::*} ]] || where=(); done # a file among the words: only that
# Whole files go to several processes; a part of the suite (words given) runs in one, which shows what tests print.
many=()
if (($# == 0)); then
    cores=$(nproc)
    many=(-n "$((cores < 4 ? cores : 4))" --dist loadfile)
fi
exec $python -m pytest -c tests/pytest.ini --rootdir . "${many[@]}" "${where[@]}" "$@"
