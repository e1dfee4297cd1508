"""Runs a shell recipe with set-up and Python stubbed out: the commands that it gives, without running them."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Writes its arguments down, one call a line of NUL-separated words. `python -c` asks how many GPUs there are.
PYTHON = """#!/usr/bin/env bash
[[ $1 != -c ]] || { echo "${GPUS:-0}"; exit; }
printf "%s\\0" "$@" >> "$LOG"; printf "\\n\\0" >> "$LOG"
echo "${CUDA_VISIBLE_DEVICES:-}" > "$LOG.gpus"
[[ $1 != scripts/plan.py ]] || exit "${PLAN_SAYS:-0}"
"""


class StubRecipe:
    """A copy of one recipe that can be run; `calls` are the words of each call of Python in the last run."""

    def __init__(self, root: Path, script: str):
        self.root, self.script, self.calls = root, script, []
        (root / "scripts").mkdir(parents=True)
        (root / ".venv" / "bin").mkdir(parents=True)
        for name in (script, "recipe.sh"):
            shutil.copy(ROOT / "scripts" / name, root / "scripts")
        (root / "scripts" / "setup.sh").write_text("exit 0\n")
        (root / ".venv" / "bin" / "activate").write_text(f'PATH="{root}/.venv/bin:$PATH"\n')
        python = root / ".venv" / "bin" / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)

    def run(self, cwd="/", **env) -> tuple[subprocess.CompletedProcess, dict[str, list[str]]]:
        """The finished process, and the command of each stage by name."""
        log = self.root / "log"
        log.write_text("")
        done = subprocess.run(
            ["bash", self.root / "scripts" / self.script],
            cwd=cwd,
            env=os.environ | {"LOG": str(log)} | env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.calls = [call.split("\0")[:-1] for call in log.read_text().split("\n\0")[:-1]]
        stages = [call for call in self.calls if call[0] == "scripts/run_stage.py"]
        return done, {call[2]: call[call.index("--") + 1 :] for call in stages}
