"""The one door from outside text to a terminal or a log: nothing in it is obeyed, and no password is shown."""

import logging
import re

# Control bytes (except newline and tab), direction overrides and lone surrogates: sampled text, rows and file names may
# hold any of them, and a terminal obeys them.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# What stands before the host of an address; a password that was not encoded may hold anything but blanks.
_SECRET = re.compile(r"(?<=://)(?:[^\s/:@]+:\S*|[^\s/]*)@")


def printable(text: str) -> str:
    """`text` with all that a terminal would obey as visible escapes (ESC becomes \\x1b), and user:password@ as ***@."""
    text = _UNPRINTABLE.sub(lambda m: m[0].encode("unicode_escape").decode("ascii"), str(text))
    return _SECRET.sub("***@", text)


def one_line(text: str) -> str:
    """The same, with line ends as escapes too: for lines whose beginning says what they are."""
    return printable(text).replace("\n", "\\n")


class Record(logging.LogRecord):
    """What libraries log, by the same door: their retries name the address of the hub with its password."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def say(text: str) -> None:
    """A line on the terminal."""
    print(printable(text), flush=True)
