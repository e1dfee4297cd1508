#!/usr/bin/env bash
# Proof that the tests bite: plants each bug of mutants.yaml in a copy of the tree and runs the test that should notice.
# Usage: bash tests/mutants/run.sh [NAME ...]     (no name: all; PYTHON chooses the interpreter, JOBS how many at once)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" tests/mutants/run.py "$@"
