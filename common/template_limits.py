"""Limits for chat templates: they come with models from anywhere, and one that never ends would hang or fill a machine.

A template is first tried in a process of its own, whose processor time and memory the system limits: nothing less stops
one that doubles a text thirty times. After that each rendering here is watched by a thread, which stops what runs too
long or grows too much, in whatever thread it runs: a template may go wrong on one conversation only.
"""

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

SECONDS = 10  # of processor time in the first try
PATIENCE = 30  # seconds of a rendering after that, on a machine that may be busy with other things
GIGABYTES = 4
# Beside 20 times what the conversation itself has: a template's own instructions, date and definitions.
CHARACTERS = 2_000_000

_POLL = 0.25


class TemplateTooMuch(Exception):
    """A template that was stopped; the text says why."""


def too_long(text: str, given: int) -> str | None:
    """Why a rendered text is no conversation of `given` characters, if so."""
    most = CHARACTERS + 20 * given
    return f"it prints {len(text):,} characters of a conversation of {given:,}" if len(text) > most else None


# ---- the first try, in a process of its own


@functools.lru_cache(maxsize=64)
def refused(template: str, special_tokens: str) -> str | None:
    """Why a template cannot be used, or None; `special_tokens` as json. What it raises is for others to report."""
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).resolve())],
        input=json.dumps({"template": template, "special_tokens": json.loads(special_tokens)}),
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )
    if done.returncode < 0:
        return f"it runs for more than {SECONDS} seconds, or needs more than {GIGABYTES} GB"
    return done.stdout.strip() or None


def _try() -> None:
    import resource

    from transformers.utils.chat_template_utils import render_jinja_template

    given = json.load(sys.stdin)
    used = sum(os.times()[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS, int(used) + SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    roles = ("system", "user", "assistant", "user", "assistant", "tool", "assistant")
    messages = [{"role": role, "content": "Hi"} for role in roles]
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    for said, tools in ((messages[1:2], None), (messages[1:5], None), (messages[:5], None), (messages[1:], [tool])):
        for prompt in (True, False):
            try:
                text, _ = render_jinja_template(
                    conversations=[said],
                    tools=tools,
                    chat_template=given["template"],
                    add_generation_prompt=prompt,
                    **given["special_tokens"],
                )
                why = too_long(text[0], 100)
            except MemoryError:
                why = f"it needs more than {GIGABYTES} GB"
            except Exception:
                why = None  # a conversation that it refuses
            if why:
                print(why)
                return


# ---- every rendering after that


class _Watched:
    def __init__(self):
        self.since, self.memory, self.why = time.monotonic(), None, None

    def look(self) -> str | None:
        """Why this one has to stop, if so."""
        memory = _resident()
        self.memory = self.memory or memory
        if time.monotonic() - self.since > PATIENCE:
            return f"it runs for more than {PATIENCE} seconds"
        return f"it needs more than {GIGABYTES} GB" if memory - self.memory > GIGABYTES << 30 else None


_lock = threading.Lock()
_renderings: dict[int, _Watched] = {}  # by thread
_watcher: threading.Thread | None = None


@contextlib.contextmanager
def watched():
    """Inside, this thread is stopped with TemplateTooMuch when it runs too long or memory grows too much."""
    global _watcher
    thread, this = threading.get_ident(), _Watched()
    with _lock:
        _renderings[thread] = this
        if _watcher is None or not _watcher.is_alive():
            _watcher = threading.Thread(target=_watch, daemon=True)
            _watcher.start()
    try:
        yield
    finally:
        with _lock:
            del _renderings[thread]
        if this.why:
            _raise_in(thread, None)  # what has not arrived yet is not to arrive later
            raise TemplateTooMuch(this.why)


def _watch() -> None:
    while True:
        time.sleep(_POLL)
        with _lock:
            for thread, this in _renderings.items():
                if this.why is None and (why := this.look()):
                    this.why = why
                    _raise_in(thread, TemplateTooMuch)


def _raise_in(thread: int, error: type | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)


def _resident() -> int:
    """Bytes of memory in use here; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    _try()
