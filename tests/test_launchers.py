"""The environment of launchers: what each one says, what is missing in it, and what becomes of ranks without one."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import launchers
from common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
POD = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4"}
STEP = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "9",
    "SLURM_STEP_ID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def ranks(rank: int, world: int, local: int, local_world: int, address: str, port: str | None) -> dict:
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_world}
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": address, "MASTER_PORT": port}


SAID = {
    "python": ({}, ranks(0, 1, 0, 1, "127.0.0.1", None)),
    "python after another program's leftovers": ({"LOCAL_RANK": "3"}, ranks(0, 1, 0, 1, "127.0.0.1", None)),
    "one process": ({"WORLD_SIZE": "1"}, ranks(0, 1, 0, 1, "127.0.0.1", None)),
    "a pod of one": ({"RANK": "0", "WORLD_SIZE": "1"}, ranks(0, 1, 0, 1, "127.0.0.1", None)),
    "Kubeflow, Volcano": (POD | {"RANK": "1"}, ranks(1, 4, 0, 1, "job-master-0", "23456")),
    "started by hand on one machine": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000"},
        ranks(1, 2, 1, 2, "127.0.0.1", "5000"),
    ),
    "deepspeed": (
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "n", "MASTER_PORT": "5"},
        ranks(3, 4, 1, 2, "n", "5"),
    ),
    # Job 9, step 1: port 15000 + 9 x 31 + 1.
    "srun, two nodes": (
        STEP | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
        ranks(3, 4, 1, 2, "gpu07", "15280"),
    ),
    "a batch script, in which one process runs": (
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        ranks(0, 1, 0, 1, "127.0.0.1", None),
    ),
    "torchrun under srun": (
        STEP | {"SLURM_PROCID": "1", "LOCAL_WORLD_SIZE": "1"} | POD | {"RANK": "2", "LOCAL_RANK": "0"},
        ranks(2, 4, 0, 1, "job-master-0", "23456"),
    ),
    "mpirun on one machine": (
        {
            "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        ranks(1, 2, 1, 2, "127.0.0.1", "29500"),
    ),
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    """An environment that holds only what a test puts in."""
    monkeypatch.setattr(os, "environ", {})
    return os.environ


@pytest.mark.parametrize("launcher", SAID)
def test_each_launcher_is_understood(launcher, environment):
    said, wanted = SAID[launcher]
    environment.update(said)
    launchers.settle()
    found = {name: environment[name] for name in wanted}
    if wanted["MASTER_PORT"] is None:  # any free one
        assert 1024 <= int(found["MASTER_PORT"]) <= 65535
        found["MASTER_PORT"] = None
    assert found == wanted
    before = dict(environment)
    launchers.settle()
    assert environment == before, "a second look changes nothing"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"RANK": "0"}, "RANK is 0 in the environment and WORLD_SIZE is not set; a launcher sets RANK, WORLD_SIZE, "),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 in the environment and RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "RANK is 0 in the environment and WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2 in the environment and MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n"}, "and MASTER_PORT is not set"),
        (POD | {"RANK": "4"}, "RANK is '4' in the environment, wanted a whole number from 0 to 3 (WORLD_SIZE is 4)"),
        (POD | {"RANK": "-1"}, "RANK is '-1' in the environment, wanted"),
        (POD | {"RANK": "one"}, "RANK is 'one' in the environment, wanted"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment, wanted a whole number from 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' in the environment, wanted a whole number from 1"),
        (POD | {"RANK": "1", "MASTER_PORT": "http"}, "MASTER_PORT is 'http' in the environment, wanted a whole number"),
        (POD | {"RANK": "1", "MASTER_PORT": "70000"}, "wanted a whole number from 1 to 65535"),
        (POD | {"RANK": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x' in the environment"),
        (POD | {"RANK": "1", "LOCAL_RANK": "2", "LOCAL_SIZE": "2"}, "from 0 to 1 (LOCAL_WORLD_SIZE is 2)"),
    ],
)
def test_what_no_launcher_says_is_told_by_name(said, message, environment):
    environment.update(said)
    with pytest.raises(UserError) as caught:
        launchers.settle()
    assert message in str(caught.value) and "\n" not in str(caught.value)


GROUP = (
    "from common import cli, distributed\ncli.launch(lambda: print(distributed.start(1, 0), distributed.world_size()))"
)


def test_a_port_that_is_taken_is_told_and_a_pod_of_one_starts():
    """As two runs of `deepspeed` on one machine: both take port 29500."""
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen(1)
        port = str(holder.getsockname()[1])
        pod = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
        command = [sys.executable, "-c", GROUP]
        done = subprocess.run(command, cwd=ROOT, env=env | pod, capture_output=True, text=True, timeout=120)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 2 and len(errors) == 1, done.stderr
        assert errors[0].startswith(f"error: port {port} is taken by another run or program on this machine; give")
    done = subprocess.run(command, cwd=ROOT, env=env | pod, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["cpu", "1"]), done.stderr


@pytest.mark.parametrize("by_launcher", [True, False])
def test_ranks_end_with_their_launcher_and_not_with_a_shell(by_launcher, tmp_path):
    """A launcher that is killed alone can pass nothing on; its ranks would hold the run's folder."""
    rank = (
        "import os, sys, time\nfrom common import launchers\nlaunchers.end_with_launcher()\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {rank!r}, sys.argv[1]])"
    env = {name: value for name, value in os.environ.items() if name not in ("LOCAL_SIZE", "TORCHELASTIC_RUN_ID")}
    env |= {"TORCHELASTIC_RUN_ID": "none"} if by_launcher else {}
    file = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", parent, str(file)], cwd=ROOT, env=env)
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(file.read_text())
    process.kill()
    process.wait()

    def is_alive() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + (30 if by_launcher else 0.5)
    while is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_alive() != by_launcher
    if not by_launcher:
        os.kill(pid, signal.SIGKILL)
