#!/usr/bin/env bash
# Sets up .venv where needed, then runs every check. Works on a fresh clone.
#
#   bash scripts/test.sh                 everything
#   bash scripts/test.sh -k advantages   words after it go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec bash scripts/check.sh "$@"
