"""The report's charts: numbers in, small SVG pictures out, drawn by matplotlib.

A picture is a piece of the page: its text is text and its colours are the page's (`var(--c1)`, ...), so it follows
light and dark, prints, and needs no script. Words that come from files stay outside, in the page, which escapes them.
"""

import io
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

WIDTH, HEIGHT = 3.9, 2.0  # inches; the page scales a picture to the width of its card
BOX = (0.14, 0.14, 0.84, 0.81)  # of the axes in the picture: left, bottom, width, height
# Colours that nobody would choose, each replaced by a variable of the page.
VARIABLES = {f"#0102{i:02x}": f"var(--{name})" for i, name in enumerate(("ink", "grid", "c1", "c2", "c3", "c4"))}
INK, GRID, *COLOURS = VARIABLES
MAX_POINTS = 400
NOISY = 50  # curves of so many points get a running mean
STYLE = {
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.bottom": False,
    "ytick.left": False,
    "ytick.major.pad": 3,
    "font.size": 8,
}


@dataclass(frozen=True)
class Chart:
    """A picture, and what a pointer over it reads: of each point its place (share of the width), step and values."""

    svg: Markup
    at: list[float] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    series: dict[str, list[float | None]] = field(default_factory=dict)
    is_log: bool = False


def curve(
    key: str,
    steps: Sequence[int],
    values: Sequence[float],
    *,
    held_out: dict[int, float],
    low_high: Sequence[Sequence[float]] = (),
    reference: Sequence[Sequence[float]] = (),
) -> Chart:
    """A learning curve: a noisy one pale, under its running mean; one that falls far and soon on a logarithmic scale.

    Args:
        key: tells this picture from the others of the page.
        held_out: step -> the same figure on held-out data, drawn as dots.
        low_high: smallest and largest value of each step, drawn as a band; or nothing.
        reference: lowest and highest value of the same figure in other runs, from step 1 on, drawn as a grey band.
    """
    figure, axes = _axes()
    if reference:
        places = range(1, len(reference[0]) + 1)
        (at, low), (_, high) = (thin(places, edge, 100) for edge in reference)
        axes.fill_between(at, low, high, color=INK, alpha=0.2, lw=0)
    x, y = thin(steps, values)
    if low_high:
        axes.fill_between(x, *(thin(steps, edge)[1] for edge in low_high), color=COLOURS[0], alpha=0.15, lw=0)
    if noisy := len(y) >= NOISY:
        axes.plot(x, running_mean(y, len(y) // 50), color=COLOURS[0], linewidth=1.6)
    marker = {"marker": "o", "markersize": 4} if len(x) == 1 else {}
    axes.plot(x, y, color=COLOURS[0], linewidth=1 if noisy else 1.6, alpha=0.35 if noisy else 1, **marker)
    axes.plot(list(held_out), list(held_out.values()), "o-", color=COLOURS[1], markersize=3.5, linewidth=1)
    low, half, high = min(y), statistics.median(y), max(y)
    # A loss or an error that fell far and soon: on a linear scale all but the start would lie on the floor.
    is_log = low > 0 and high > 12 * low and half < high / 4 and y[0] > 3 * y[-1] and not low_high
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(_label)
    _step_axis(axes, x)
    nearest = {min(x, key=lambda step: abs(step - wanted)): value for wanted, value in held_out.items()}
    series = {"": _short(y)} | ({"held out": _short([nearest.get(step) for step in x])} if held_out else {})
    return Chart(_svg(figure, key), _places(axes, x), x, series, is_log)


def path(key: str, x: Sequence[float], y: Sequence[float], steps: Sequence[int]) -> Chart:
    """Where a run has been in the plane of KL and reward: pale at first, full at the end."""
    (steps, x), (_, y) = thin(steps, x, 150), thin(steps, y, 150)
    figure, axes = _axes()
    axes.plot(x, y, color=INK, alpha=0.3, linewidth=0.8)
    for i, (a, b) in enumerate(zip(x, y, strict=True), 1):
        axes.plot([a], [b], "o", color=COLOURS[0], markersize=4, alpha=0.15 + 0.85 * i / len(x), mew=0)
    axes.text(0.995, 0.03, "KL →", transform=axes.transAxes, color=INK, ha="right")
    axes.text(0.01, 0.93, "↑ reward", transform=axes.transAxes, color=INK)
    axes.margins(y=0.15)
    return Chart(_svg(figure, key), _places(axes, x), steps, {"KL": _short(x), "reward": _short(y)})


def histogram(key: str, groups: Sequence[Sequence[float]]) -> Chart:
    """Each group's values as shares, in bins that the groups have in common; empty groups keep their colour."""
    together = [value for values in groups for value in values]
    low, high = min(together), max(together)
    if all(float(value).is_integer() for value in together) and high - low < 60:
        edges = [low - 0.5 + i for i in range(int(high - low) + 2)]  # one bin a number: others would beat with them
    else:
        edges = [low + (high - low or 1) * i / 24 for i in range(25)]
    figure, axes = _axes()
    for colour, values in zip(COLOURS, groups, strict=False):
        if values:
            weights = [100 / len(values)] * len(values)
            axes.hist(values, edges, weights=weights, histtype="stepfilled", color=colour, alpha=0.3)
            axes.hist(values, edges, weights=weights, histtype="step", color=colour, linewidth=1.2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    return Chart(_svg(figure, key))


def stack(key: str, steps: Sequence[int], parts: dict[str, Sequence[float]]) -> Chart:
    """Seconds of each step, its phases on top of one another."""
    x, columns = thin(steps, steps)[0], {name: thin(steps, values)[1] for name, values in parts.items()}
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(columns))]
    figure, axes = _axes()
    axes.stackplot(x, *columns.values(), colors=colours, alpha=0.75, lw=0)
    _step_axis(axes, x)
    return Chart(_svg(figure, key), _places(axes, x), x, {name: _short(y) for name, y in columns.items()})


def thin(steps: Sequence[int], values: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[int], list[float]]:
    """At most `limit` points: the means of equal runs of steps, each at its last step."""
    size = max(1, math.ceil(len(steps) / limit))
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    return [*steps[size - 1 :: size], *steps[-1:]][: len(groups)], [sum(group) / len(group) for group in groups]


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and `reach` neighbours on either side; fewer, but as many on both, near the ends."""
    reaches = [min(reach, i, len(values) - 1 - i) for i in range(len(values))]
    return [sum(values[i - r : i + r + 1]) / (2 * r + 1) for i, r in enumerate(reaches)]


# ---- matplotlib


def _label(value: float, _position=None) -> str:
    """Seven characters at most beside the axis: 0.25, 1.00025, 7.5e-4."""
    if 0 < abs(value) < 1e-3:
        return re.sub(r"\.?0*e-0?", "e-", f"{value:.2e}")
    return f"{value:.6g}"


def _axes():
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        axes = figure.add_axes(BOX)
    axes.margins(y=0.08)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(_label)
    return figure, axes


def _step_axis(axes, steps: Sequence[int]) -> None:
    reach = (steps[-1] - steps[0]) * 0.02 or 1
    axes.set_xlim(steps[0] - reach, steps[-1] + reach)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _places(axes, x: Sequence[float]) -> list[float]:
    """Of each x, how far from the picture's left edge it is, as a share of the width."""
    low, high = axes.get_xlim()
    return [round(BOX[0] + BOX[2] * (value - low) / (high - low), 4) for value in x]


def _short(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.4g}") for value in values]


def _svg(figure: Figure, key: str) -> Markup:
    """The picture as an <svg> element, without ids, fonts, size and style sheet of its own."""
    file = io.StringIO()
    # The salt goes into the names of clip paths, which must differ between the pictures of one page.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": ascii(key)}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg ") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.S)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)
    text = re.sub(r'font-family: [^;"]*;?| transform="rotate\(-0[^"]*"', "", text)
    text = re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r'\1role="img"', text)
    # Coordinates to a hundredth of a point; what stands between tags is for people.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return Markup(text)
