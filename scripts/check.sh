#!/usr/bin/env bash
# Lint, format and tests in the .venv as it is; pytest's summary is the last line. Words after it go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[[ -x $python ]] || { echo "error: there is no .venv here; run: bash scripts/setup.sh" >&2; exit 2; }

# The suite needs no network and must not notice one. Tests that start several ranks share the cores out themselves.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"

$python -m ruff check .
$python -m ruff format --check .
where=(tests)
for word in "$@"; do [[ ! -e ${word%%::*} ]] || where=(); done # a file among the words: only that
exec $python -m pytest -c tests/pytest.ini --rootdir . "${where[@]}" "$@"
