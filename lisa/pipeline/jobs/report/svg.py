"""Converts matplotlib figures to SVG with the page's colours and fonts, without external URLs.

Plots are drawn in placeholder colours, which are replaced by the page's CSS variables, so that one
drawing works in light mode, dark mode and print. Inline styles become classes of one style sheet,
which a strict content policy allows by its hash.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from lisa.pipeline.jobs.report.tables import COUNTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (
    "ink",
    "muted",
    "grid",
    "surface",
    *COUNTED,
    "p50",
    "p90",
    "p99",
    "p999",
    "max",
    "due",
    "waiting",
    "capacity",
    "bar",
)
"""The page's CSS variables that plots may use; each has a light and a dark value."""

_MARKS = {name: f"#0102{number + 16:02x}" for number, name in enumerate(COLOURS)}
_NAMES = {mark: name for name, mark in _MARKS.items()}


def colour(name: str) -> str:
    """The placeholder colour of a CSS variable. Raises KeyError for an unknown name."""
    return _MARKS[name]


def settings(salt: str, font_px: float) -> dict[str, Any]:
    """Matplotlib's settings for one figure; the salt makes its ids unique within the page."""
    return {
        "svg.fonttype": "none",  # keep text as text for screen readers, search and print
        "svg.hashsalt": salt,
        "text.parse_math": False,  # labels are data: a dollar sign does not start a formula
        "font.size": font_px,
        "axes.titlesize": font_px + 1.5,
        "font.family": "DejaVu Sans",  # ships with matplotlib; wider than browser fonts
        "axes.unicode_minus": False,
        "text.color": colour("ink"),
        "axes.labelcolor": colour("muted"),
        "axes.edgecolor": colour("muted"),
        "xtick.color": colour("muted"),
        "ytick.color": colour("muted"),
        "grid.color": colour("grid"),
        "grid.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "ytick.minor.size": 0,
        "xtick.minor.size": 0,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "legend.frameon": False,
        "legend.handlelength": 1.6,
        "axes.titlepad": 10,
    }


class Sheet:
    """The CSS classes of all drawings of one page."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}
        self._salts = 0

    def next_salt(self) -> str:
        """A salt for `settings` that no other figure of the page has."""
        self._salts += 1
        return f"plot{self._salts}"

    @property
    def css(self) -> str:
        """The style sheet of all figures embedded so far."""
        return "\n".join(f".plot .{name}{{{style}}}" for style, name in self._classes.items())

    def embed(self, figure: Figure, alt: str, kind: str) -> str:
        """One figure as an <svg> element of class `kind`; `alt` is the text for screen readers."""
        raw = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(raw, format="svg", metadata=nothing, transparent=True)
        # Parse the SVG instead of replacing text: a label may contain `style="..."`.
        drawn = ET.fromstring(raw.getvalue())  # noqa: S314 - written by matplotlib
        width, height = (round(72 * side) for side in figure.get_size_inches())
        root = ET.Element(
            "svg",
            {
                "class": kind,
                "viewBox": f"0 0 {width} {height}",
                "role": "img",
                "aria-label": alt,
            },
        )
        root.extend(child for child in drawn if _plain(child.tag) == "g")
        root.extend(child for child in drawn if _is_clip(child))
        for element in root.iter():
            self._adopt(element)
        return ET.tostring(root, encoding="unicode", short_empty_elements=True)

    def _adopt(self, element: ET.Element) -> None:
        element.tag = _plain(element.tag)
        element.tail = None
        if element.tag != "text":
            element.text = None
        if element.tag == "g":
            element.attrib.pop("id", None)  # only ids of paths are referenced
        for name, value in list(element.attrib.items()):
            del element.attrib[name]
            if name == "d":
                element.set("d", _short(value))
            elif name == "style":
                element.set("class", self._class(value))
            elif name != "transform" or not value.startswith(("rotate(-0 ", "rotate(0 ")):
                element.set(_plain(name), value)

    def _class(self, style: str) -> str:
        found = re.sub(r"\s*font-family: [^;]*;?", "", style)
        found = re.sub(r"#0102[0-9a-f]{2}", lambda mark: f"var(--{_NAMES[mark[0]]})", found)
        found = re.sub(r";\s+", ";", found.replace(": ", ":")).strip("; ")
        return self._classes.setdefault(found, f"s{len(self._classes)}")


def _plain(name: str) -> str:
    """A name without its namespace, which HTML does not need."""
    return name.rpartition("}")[2]


def _is_clip(element: ET.Element) -> bool:
    return _plain(element.tag) == "defs" and any(_plain(one.tag) == "clipPath" for one in element)


def _short(path: str) -> str:
    """A path on one line, with coordinates rounded to a tenth of a pixel."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}", " ".join(path.split()))
