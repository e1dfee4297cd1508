"""Opening and closing a training run: its locked folder, its log, its checkpoints, and the first lines it says."""

import dataclasses
from pathlib import Path

from common import checkpoint, distributed
from common.checkpoint import LOCK_FILE, RunFolder
from common.engine import TrainedModel
from common.errors import Stopped, UserError
from common.metrics import MetricsLogger
from common.resume import Checkpoints, Saving

# Below this no run learns anything, and it is most likely that there were too few rows.
_FEW_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Reporting:
    """Where a run writes and what it reports; the flags of the same names explain them."""

    output_dir: str
    report_to: list[str]
    logging_steps: int
    run_name: str | None


class Run:
    """A stage at work. Its steps go on where `restore` says, and each ends with `after_step`.

    Args:
        title: of the stage, for people.
        identity: what must not change between two parts of the run, see `resume.identity`.
        notes: said first.
        models: the folders in it that models go to.

    Raises:
        UserError: the folder holds a finished run, another job writes to it, or it has checkpoints that do not fit.
    """

    def __init__(
        self,
        reporting: Reporting,
        saving: Saving,
        title: str,
        total_steps: int,
        identity: dict,
        notes: list[str],
        models: tuple[str, ...] = ("",),
    ):
        checkpoint.check_output(reporting.output_dir, models)
        self.models = models
        self.folder = RunFolder(reporting.output_dir, main_process=distributed.is_main())
        _require_shared(self.folder.path)
        self.checkpoints = Checkpoints(self.folder.path, saving, total_steps, identity)
        self.log = MetricsLogger(
            self.folder.path,
            total_steps=total_steps,
            report_to=reporting.report_to,
            logging_steps=reporting.logging_steps,
            main_process=distributed.is_main(),
            title=reporting.run_name or title,
            resume_step=self.checkpoints.step,
            lines=self.checkpoints.counters.get("lines"),
        )
        if total_steps < _FEW_STEPS:
            notes = [*notes, f"note: {total_steps} step(s) in all, which is a trial; learning takes hundreds"]
        for note in (f"writing to {self.path}", *self.checkpoints.notes, *self.log.problems, *notes):
            self.log.say(note)

    @property
    def path(self) -> Path:
        return self.folder.path

    def restore(self, models: dict[str, TrainedModel]) -> tuple[int, dict]:
        """The steps that are done, and the counters given to `after_step` after the last of them; {} at the start."""
        return self.checkpoints.step, self.checkpoints.restore(models)

    def after_step(self, step: int, models: dict[str, TrainedModel], counters: dict) -> None:
        """Saves if it is time, and stops if a signal asks for it.

        Args:
            counters: all that the loop needs to go on and the engines do not hold; json has to hold it.

        Raises:
            Stopped, RunFailed: see `Checkpoints.after_step`.
        """
        try:
            counters = counters | {"lines": self.log.lines()}
            self.checkpoints.after_step(step, models, counters, before_saving=self.log.sync)
        except Stopped:
            self._close()
            raise

    def finish(self, hand_off: str) -> None:
        """After the stage's folder is complete: removes checkpoints, says what to do next, leaves the process group."""
        self.checkpoints.remove_all()
        if others := checkpoint.foreign(self.path, self.models):
            self.log.say(f"warning: {self.path} also holds {', '.join(others[:3])}, which are not of this run")
        self.log.say(f"done: {self.path}; next: {hand_off}")
        self._close()

    def _close(self) -> None:
        self.log.close()
        self.folder.release()
        distributed.stop()


def _require_shared(path: Path) -> None:
    """Every rank writes its part of a checkpoint into the folder that rank 0 made: all nodes have to see that one."""
    distributed.barrier()
    rank = distributed.rank()
    blind = distributed.max_over_ranks(0 if (path / LOCK_FILE).exists() else rank + 1)
    if blind:
        raise UserError(
            f"--output_dir {path}: rank {blind - 1} does not see what rank 0 has written there; with several nodes it "
            "has to be a folder on storage that all of them share"
        )
