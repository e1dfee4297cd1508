"""Python functions named on the command line as FILE.py:FUNCTION, rewards and judges: the one door they come in by.

Their signature is that of TRL's GRPO, f(prompts, completions, **columns) -> list[float | None]: message lists, the
data's further columns, and as far as the function takes them `truncated`, `completion_ids`, `trainer_state`,
`log_extra` and `log_metric`. They get copies, a time limit, and what they return is looked at before anybody uses it.
"""

import asyncio
import contextlib
import copy
import decimal
import faulthandler
import importlib.util
import inspect
import math
import numbers
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from common.errors import UserError

_ROOT = Path(__file__).resolve().parent.parent
_FLOAT32_MAX = 3.4028234e38  # scores are added up in it
_GIVEN = frozenset(
    ["prompts", "completions", "completion_ids", "truncated", "trainer_state", "log_extra", "log_metric"]
)


def is_function(spec: str) -> bool:
    """Whether a command-line value has the form FILE.py:FUNCTION, or lacks its second half only."""
    return ".py:" in spec or spec.endswith(".py")


def find_file(spec: str) -> Path | None:
    """The file of a FILE.py:FUNCTION, from the current folder or else from the repository's root."""
    file = spec.rpartition(":")[0]
    return next((path for path in (Path(file), _ROOT / file) if file.endswith(".py") and path.is_file()), None)


def require_file(spec: str, flag: str) -> Path:
    """The same. Raises a UserError where there is none; `flag` is what named it."""
    path = find_file(spec)
    if path is None and spec.endswith(".py"):
        raise UserError(f"{flag} {spec}: which function of it? wanted FILE.py:FUNCTION")
    if path is None:
        file = spec.rpartition(":")[0] or spec
        raise UserError(f"{flag} {spec}: there is no file {file}; wanted FILE.py:FUNCTION or a model folder")
    return path


def load(spec: str, flag: str, name: str, timeout: float = 0.0) -> tuple["Function", ModuleType]:
    """The function behind its checks, and the module it lives in.

    Its code runs on loading, and may import files beside it. Of a class an object is made, without arguments.

    Args:
        flag: what named it, for errors.
        name: what later errors call it: "reward brief", "judge gold".
        timeout: seconds that loading, and then each call, may take; 0 for any.

    Raises:
        UserError: no such file or function, a file that cannot be loaded, or a function of another signature.
    """
    file, _, attribute = spec.rpartition(":")
    path = require_file(spec, flag).resolve()
    # The prefix keeps a user's json.py from taking the place of Python's; so does the end of the search path.
    module_spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))

    with _checked(f"{flag} {spec}", "while it was loaded", str(path), timeout):
        module_spec.loader.exec_module(module)
        function = getattr(module, attribute, None)
        if inspect.isclass(function):
            function = function() if any("__call__" in vars(base) for base in function.__mro__) else None
    if not callable(function):
        found = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        raise UserError(f"{flag} {spec}: {file} has no function {attribute}; it has {', '.join(found) or 'none'}")
    function = Function(name, function, timeout, str(path))
    if not function.takes_all and not {"prompts", "completions"} <= function.takes:
        seen = f"{attribute}({', '.join(function.parameters)})"
        raise UserError(f"{flag} {spec}: wanted {attribute}(prompts, completions, **columns), seen {seen}")
    return function, module


class Function:
    """A reward or a judge behind its checks.

    Args:
        name: what errors call it.
        timeout: seconds a call may take; 0 for any.
        file: where it comes from, so that errors can name its line.
    """

    def __init__(self, name: str, function: Callable, timeout: float = 0.0, file: str = ""):
        self.name, self.function, self.timeout, self.file = name, function, timeout, file
        self.has_logged = False
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:  # some functions written in C tell nothing of themselves
            raise UserError(f"{name}: no signature ({error}); wrap it in a function of yours") from error
        self.parameters = [parameter.name for parameter in parameters]
        self.takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.positional = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes = {parameter.name for parameter in [*self.positional, *by_name]}
        self.needs = {p.name for p in [*self.positional, *by_name] if p.default is p.empty}

    def require(self, columns: set[str]) -> None:
        """Refuses data that lack a column the function cannot do without."""
        if lacking := self.needs - columns - _GIVEN:
            there = ", ".join(sorted(columns - {"prompt"})) or "none"
            raise UserError(
                f"{self.name} wants the column {', '.join(sorted(lacking))}; beside prompt the data has {there}"
            )

    def __call__(
        self,
        rows: list[dict],
        texts: list[str],
        truncated: list[bool],
        ids: list[list[int]],
        step: int = 0,
        steps: int = 0,
    ) -> list[float | None]:
        """A finite number, or None for no opinion, for each response.

        Args:
            rows: the prompts' data rows, one for each response; texts: the responses; truncated: cut by length; ids:
                their tokens, the stop token included.
            step, steps: steps of training done, and of the whole run.

        Raises:
            UserError: names the function, the response and what was wanted.
        """
        names = {name for row in rows for name in row}
        self.require(names)
        given = {name: [row.get(name) for row in rows] for name in sorted(names - {"prompt"})}
        given = {"truncated": truncated, "completion_ids": ids} | given | {"prompts": [row["prompt"] for row in rows]}
        given["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
        # Each value is copied on its own: responses to one prompt share its row.
        given = {name: list(map(copy.deepcopy, values)) for name, values in given.items() if self.wants(name)}
        if self.wants("trainer_state"):
            from transformers import TrainerState

            given["trainer_state"] = TrainerState(global_step=step, max_steps=steps)
        given |= {name: self._not_kept for name in ("log_extra", "log_metric") if self.wants(name)}
        first = f", the first {_beginning(texts[0])}" if texts else ""
        with _checked(self.name, f"on {len(texts)} responses{first}", self.file, self.timeout):
            found = self.function(*self._positional(given), **given)
            found = asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found
            is_array = getattr(found, "ndim", None) == 1 and hasattr(found, "tolist")  # of numpy, torch, pandas
            found = found.tolist() if is_array else found
        return self._numbers(found, texts)

    def wants(self, name: str) -> bool:
        return self.takes_all or name in self.takes

    def _positional(self, given: dict) -> list:
        """Takes what can only be given by position out of the arguments."""
        return [given.pop(p.name) if p.name in given else p.default for p in self.positional]

    def _not_kept(self, name: str, *_) -> None:
        """TRL's `log_extra` and `log_metric`: a function that calls them runs here, but what it logs is not kept."""
        if not self.has_logged:
            print(f"note: {self.name} logs {name!r}, which is not kept here; only scores are", file=sys.stderr)
        self.has_logged = True

    def _numbers(self, found, texts: list[str]) -> list[float | None]:
        if not isinstance(found, list | tuple):
            wanted = f"a list of {len(texts)} numbers or None, one for each response"
            raise UserError(f"{self.name} returned {_shown(found)}, wanted {wanted}")
        if len(found) != len(texts):
            wanted = "it has to give one for each"
            raise UserError(f"{self.name} returned {len(found)} scores for {len(texts)} responses; {wanted}")
        values = [_number(score) for score in found]
        for row, (score, value) in enumerate(zip(found, values, strict=True)):
            if value is not None and not abs(value) <= _FLOAT32_MAX:  # NaN too
                bound = f" of at most {_FLOAT32_MAX:.1e}" if math.isfinite(value) else ""
                raise UserError(
                    f"{self.name} returned {_shown(score)} for response {row}, {_beginning(texts[row])}; wanted a "
                    f"finite number{bound}, or None for no opinion"
                )
        return values


def _number(score) -> float | None:
    """The score as a float; NaN for what is no number."""
    try:
        if getattr(score, "ndim", None) == 0 and hasattr(score, "item"):  # a scalar of numpy or torch
            score = score.item()
        if score is None:
            return None
        return float(score) if isinstance(score, numbers.Real | decimal.Decimal) else math.nan
    except (ArithmeticError, RuntimeError, ValueError):  # 10**500, a signalling NaN, a tensor without content
        return math.inf


def _shown(value) -> str:
    """What was returned, for people."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number of more digits than Python prints, a __repr__ that fails
        text = ""
    kind = {"str": "text", "dict": "dictionary", "int": "number"}.get(type(value).__name__, type(value).__name__)
    if not text or text.startswith("<"):
        return f"a {kind}"
    return f"{text:.60}" if isinstance(value, list | tuple | numbers.Real | None) else f"the {kind} {text:.60}"


def _beginning(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."


async def _awaited(found):
    return await found


# ---- running code that is not ours


class _TimedOut(BaseException):
    """Not an Exception, so that a function's own `except Exception` does not take it for one of its errors."""


@contextlib.contextmanager
def _checked(name: str, doing: str, file: str, timeout: float) -> Iterator[None]:
    """Whatever goes wrong inside becomes one line that names the line of the user's file; Ctrl-C stays Ctrl-C.

    What such code likes to set for the whole process, and would change our run, is put back: the current folder,
    torch's gradients switch and default dtype.
    """
    import torch

    folder, dtype = os.getcwd(), torch.get_default_dtype()
    process, leave = os.getpid(), os._exit

    def leave_or_raise(status: int) -> None:
        if os.getpid() != process:  # a child that such code has forked
            leave(status)
        raise SystemExit(status)

    os._exit = leave_or_raise  # or the run would be over with this status and no model
    try:
        with _limited(timeout), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    except KeyboardInterrupt:
        raise
    except _TimedOut as error:
        what = f"has not returned within --reward_timeout {timeout:g} seconds"
        raise UserError(f"{name} {what} {doing}{_where(error, file)}; raise it, or set 0 for no limit") from error
    except SystemExit as error:
        raise UserError(f"{name} called sys.exit({error.code!r}) {doing}{_where(error, file)}") from error
    except BaseException as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if isinstance(error, ModuleNotFoundError):
            what += ", install it beside this program"
        if isinstance(error, AttributeError) and "'list' object" in what:
            what += '; a completion is a list of messages, its text is completion[-1]["content"]'
        raise UserError(f"{name} failed {doing}: {what}{_where(error, file)}") from error
    finally:
        os._exit = leave
        os.chdir(folder)
        torch.set_default_dtype(dtype)


def _where(error: BaseException, file: str) -> str:
    """The last line of the user's file that was reached, or else the last of all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name} line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if frame.filename == file] or frames[-1:]
    if not frames:
        return ""
    last = frames[-1]
    line = f": {last.line:.80}" if last.line else ""
    return f" ({Path(last.filename).name} line {last.lineno}{line})"


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _TimedOut inside when `seconds` are over (0: never).

    By a signal and not in a thread: a regular expression that never ends keeps every other thread waiting but looks
    for signals, and functions of TRL's kind set alarms of their own, which only the main thread may. Code that has
    taken our alarm away, swallows every exception, or hangs outside of Python is ended a little later with its
    traceback and exit code 1.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def over(*_):
        nonlocal is_over
        is_over = True
        raise _TimedOut

    before = signal.signal(signal.SIGALRM, over)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + min(30, 1 + seconds / 2), exit=True, file=sys.__stderr__)
    try:
        yield
        if is_over:  # somebody caught it
            raise _TimedOut
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()
