"""Opening and closing a training run: its locked folder, its log, and the first lines it says."""

import dataclasses

from common import distributed
from common.checkpoint import RunFolder
from common.metrics import MetricsLogger


@dataclasses.dataclass(frozen=True)
class Reporting:
    """Where a run writes and what it reports; the flags of the same names explain them."""

    output_dir: str
    report_to: list[str]
    logging_steps: int
    run_name: str | None


def start(reporting: Reporting, title: str, total_steps: int, notes: list[str]) -> tuple[RunFolder, MetricsLogger]:
    """Takes the output folder and opens the log; `notes` are said first.

    Raises:
        UserError: the folder holds a finished run, or another job writes to it.
    """
    folder = RunFolder(reporting.output_dir, main_process=distributed.is_main())
    log = MetricsLogger(
        folder.path,
        total_steps=total_steps,
        report_to=reporting.report_to,
        logging_steps=reporting.logging_steps,
        main_process=distributed.is_main(),
        title=reporting.run_name or title,
    )
    for note in (f"writing to {folder.path}", *notes):
        log.say(note)
    return folder, log


def finish(folder: RunFolder, log: MetricsLogger, hand_off: str) -> None:
    """Says what to do next, closes files and lock, and leaves the process group."""
    log.say(f"done: {folder.path}; next: {hand_off}")
    log.close()
    folder.release()
    distributed.stop()
