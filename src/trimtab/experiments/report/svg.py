"""Adapter of matplotlib: deterministic inline SVG that follows the page's colours.

matplotlib needs literal colours, so every role has a sentinel colour, later replaced by `currentColor` or a CSS
variable.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.core.errors import DependencyError

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
except ImportError as error:
    raise DependencyError(
        "matplotlib",
        problem=f"The package matplotlib, which draws the report's figures, cannot be imported: {error}.",
        hint="Run `pip install 'trimtab[report]'`.",
    ) from error

NUM_SERIES = 8
NUM_PARTS = 7
_ROLES = ("ink", "line", "page", *(f"s{i}" for i in range(NUM_SERIES)), *(f"p{i}" for i in range(NUM_PARTS)))
COLOUR = {role: f"#ab{index:02x}cd" for index, role in enumerate(_ROLES)}
_WIDTH = 420  # In points; scales to the column, and stays readable on a phone.
_STYLE: Any = {  # Any, because matplotlib types the keys as a Literal of all names.
    "svg.fonttype": "none",
    "text.parse_math": False,  # A dollar sign in a label is literal.
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": COLOUR["line"],
    "grid.linewidth": 0.7,
    "axes.linewidth": 0.7,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), COLOUR["ink"]),
}


def variable(role: str) -> str:
    """Return the CSS value of a colour role."""
    return "currentColor" if role == "ink" else f"var(--{role})"


def render(paint: Callable[[Sequence[Any]], None], *, name: str, title: str, height: float, columns: int = 1) -> str:
    """Return the SVG drawn with `paint(axes)`; `name` prefixes its ids to keep them unique on the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # The browser chooses the font.
        matplotlib.rcdefaults()  # A user's matplotlibrc must not change a report.
        matplotlib.rcParams.update(_STYLE | {"svg.hashsalt": name})
        figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
        paint(figure.subplots(1, columns, squeeze=False, sharey=columns > 1)[0])
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(buffer.getvalue(), name, title)


def plain_log(ax: Any, which: str) -> None:
    """Make an axis ("x" or "y") logarithmic with plain numbers, and with enough ticks below a decade."""
    getattr(ax, f"set_{which}scale")("log")
    axis = getattr(ax, f"{which}axis")
    low, high = getattr(ax, f"get_{which}lim")()
    near = max(low, high) < 8 * min(low, high)
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]) if near else LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def few_ticks(axis: Any, count: int = 5) -> None:
    """Limit an axis to a few round ticks."""
    axis.set_major_locator(MaxNLocator(count))


def _inline(text: str, name: str, title: str) -> str:
    """Return the SVG without prolog, metadata, fixed size and global style, with prefixed ids and CSS colours."""
    text = text[text.index("<svg") :]
    for pattern in (r"<metadata>.*?</metadata>\s*", r"<style[^>]*>.*?</style>\s*", r"<!--.*?-->\s*"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'url\(#|href="#', lambda match: f"{match[0]}{name}-", text)
    for role, colour in COLOUR.items():
        text = text.replace(colour, variable(role))
    head, body = text.split(">", 1)
    head = re.sub(r'\s(width|height|version)="[^"]*"', "", head)
    words = html.escape(title)
    return f'{head} role="img" aria-label="{words}"><title>{words}</title>{body}'.strip()
