"""Run one stage of a recipe: skip it when it is finished, show its output, keep it in a log, say what broke.

    python scripts/run_stage.py --name sft --done out/tiny/sft/stage.json --logs out/tiny/logs -- python step1_sft/...

Writes  LOGS/NAME.log      everything the command printed, as plain text
        LOGS/NAME.seconds  how long it took, once it has succeeded

Exits with the command's own exit code. On a terminal the command is given a terminal too, so its progress bars work
and still the log stays readable. Knows nothing of training; the standard library is all it needs.
"""

import argparse
import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--name", required=True, help="a short name: the log's")
    parser.add_argument("--done", required=True, type=Path, help="the file whose presence means: finished, skip it")
    parser.add_argument("--logs", required=True, type=Path, help="folder of the logs")
    parser.add_argument("--tail", type=int, default=20, help="lines of the log shown after a failure")
    parser.add_argument("command", nargs="+", help="the command, after --")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    if args.done.exists():
        print(f"== {args.name}: finished already ({args.done}), skipped", flush=True)
        return 0
    args.logs.mkdir(parents=True, exist_ok=True)
    log_path = args.logs / f"{args.name}.log"
    print(f"== {args.name}\n$ {shlex.join(args.command)}", flush=True)
    start = time.monotonic()
    with open(log_path, "wb") as log:
        code = run(args.command, log)
    if code in (130, 143):  # Ctrl-C, SIGTERM
        print(f"\n{args.name} was stopped; run the same command again to go on", file=sys.stderr)
        return code
    if code:
        print(f"\nerror: {args.name} stopped with exit code {code}; the end of {log_path}:", file=sys.stderr)
        for line in log_path.read_text(errors="replace").splitlines()[-args.tail :]:
            print(f"  | {line}", file=sys.stderr)
        return code
    seconds = time.monotonic() - start
    (args.logs / f"{args.name}.seconds").write_text(f"{seconds:.1f}\n")
    print(f"== {args.name}: done in {seconds:.0f} s\n", flush=True)
    return 0


def run(command: list[str], log) -> int:
    """Run `command`, copying what it prints to the screen at once and to `log` line by line. Returns its exit code."""
    terminal = sys.stdout.isatty()
    if terminal:
        reader, writer = pty.openpty()
        settings = termios.tcgetattr(writer)
        settings[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n; once is enough
        termios.tcsetattr(writer, termios.TCSANOW, settings)

        def copy_size(*_):
            size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(writer, termios.TIOCSWINSZ, size)

        copy_size()
        signal.signal(signal.SIGWINCH, copy_size)
    else:
        reader, writer = os.pipe()
    try:
        child = subprocess.Popen(command, stdout=writer, stderr=writer)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        log.write(f"{command[0]}: {error.strerror}\n".encode())
        return 127
    # The command stays in our process group, so Ctrl-C reaches it by itself; we wait for it to tidy up.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    rest = b""
    while True:
        # A stray grandchild may hold the other end open for ever: once the command is gone, only what is there is read.
        gone = child.poll() is not None
        if not select.select([reader], [], [], 0 if gone else 0.2)[0]:
            if gone:
                break
            continue
        data = b""
        with contextlib.suppress(OSError):  # a terminal's far end reports its closing as an error
            data = os.read(reader, 65536)
        if not data:
            break
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        *lines, rest = (rest + data).split(b"\n")
        log.writelines(plain(line) + b"\n" for line in lines)
        log.flush()
    if plain(rest):
        log.write(plain(rest) + b"\n")
    code = child.wait()
    return 128 - code if code < 0 else code


def plain(line: bytes) -> bytes:
    """A printed line as it stood in the end: without control sequences and what carriage returns wrote over."""
    return ANSI.sub(b"", line).rstrip(b"\r").rsplit(b"\r", 1)[-1]


if __name__ == "__main__":
    sys.exit(main())
