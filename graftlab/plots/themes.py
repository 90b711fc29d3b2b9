"""Figures for light and dark pages: one picture for each, and the page's theme selects which one is shown."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from PIL import Image

_PAPER, _INK = "#111111", "#e0e0e0"
# Blue text is hard to read on a dark page; points and lines are not.
_BLUE, _SKY = to_rgba("#0072B2"), "#56B4E9"
# Names are unreadable below this number of pixels per inch: a narrower page scrolls the figure instead of shrinking it.
_LEGIBLE = 54
AS_IT_IS = "as it is"
"""The gid of text that is drawn on a coloured cell, so that its colour must not change."""

_BLACK, _WHITE = to_rgba("black"), to_rgba("white")

# The attributes by which pages say that they are dark: JupyterLab; VS Code; Colab, on its outputs; Sphinx's and
# jupyter-book's pages, whose readers choose. A page that has none follows the system, unless it says that it is light.
_DARK = (
    ':is(body[data-jp-theme-light="false"], .vscode-dark, .vscode-high-contrast:not(.vscode-high-contrast-light), '
    'html[theme="dark"], html[data-theme="dark"], body[data-theme="dark"])'
)
_UNSAID = (
    'html:not([theme="light"], [data-theme="light"]) '
    'body:not([data-jp-theme-light], [class*="vscode"], [data-theme="light"])'
)
# A page that drops styles shows the light picture.
STYLE = f"""<style>
.graftlab-figure {{ overflow-x: auto }}
.graftlab-figure img {{ max-width: 100% }}
{_DARK} .graftlab-on-light {{ display: none }}
{_DARK} .graftlab-on-dark {{ display: inline !important }}
@media (prefers-color-scheme: dark) {{
  {_UNSAID} .graftlab-on-light {{ display: none }}
  {_UNSAID} .graftlab-on-dark {{ display: inline !important }}
}}
</style>"""


def pictures(figure: Figure, alt: str = "", dpi: float = 110) -> str:
    """The figure as HTML: drawn twice, with a description in words. The page needs :data:`STYLE`."""
    alt_text = html.escape(alt or in_words(figure), quote=True)
    least = f' style="min-width: {_LEGIBLE * figure.get_size_inches()[0]:.0f}px"'
    light = _img(_render(figure, dpi), alt_text, "graftlab-on-light", least)
    with on_dark(figure):
        dark = _img(_render(figure, dpi), alt_text, "graftlab-on-dark", f" hidden{least}")
    return f'<div class="graftlab-figure">{light}{dark}</div>'


def with_fewer_colours(png: bytes) -> bytes:
    """The picture with 256 colours, a quarter of its bytes: a notebook has many, each of them twice."""
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    if picture.getchannel("A").getextrema() != (255, 255):
        # A palette would lose what is transparent.
        return png
    out = io.BytesIO()
    picture.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE).save(out, "png", optimize=True)
    return out.getvalue()


def _img(png: bytes, alt: str, kind: str, more: str) -> str:
    data = base64.b64encode(with_fewer_colours(png)).decode("ascii")
    # Sphinx's and jupyter-book's themes dim other pictures on dark pages.
    return f'<img class="{kind} dark-light"{more} alt="{alt}" src="data:image/png;base64,{data}">'


def _render(figure: Figure, dpi: float) -> bytes:
    out = io.BytesIO()
    save(figure, out, dpi)
    return out.getvalue()


def save(figure: Figure, out: io.BytesIO, dpi: float) -> None:
    """Write the figure as PNG. Missing characters cause one warning that names the font, not one warning each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(out, format="png", dpi=dpi, facecolor=figure.get_facecolor())
    lacking = [str(each.message) for each in caught if " missing from font(s) " in str(each.message)]
    if lacking:
        fonts = lacking[0].rpartition(" missing from font(s) ")[2].rstrip(".")
        count = len(set(lacking))
        warnings.warn(
            f"the font {fonts} lacks {count} {'character' if count == 1 else 'characters'} of this figure's names, "
            "drawn as boxes; choose a font that has all, as in matplotlib.rcParams['font.family'] = "
            "['DejaVu Sans', 'Noto Sans CJK JP']",
            stacklevel=2,
        )
    for each in caught:
        if str(each.message) not in lacking:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@contextlib.contextmanager
def on_dark(figure: Figure) -> Iterator[None]:
    """Within the block the figure has dark-page colours: light text and lines, with the data's colours unchanged."""
    undo: list[tuple[Any, Any]] = []

    def change(setter: Any, before: Any, after: Any) -> None:
        undo.append((setter, before))
        setter(after)

    def ink(setter: Any, colour: Any) -> None:
        if _is(colour, _BLACK):
            change(setter, colour, _INK)
        elif _is(colour, _WHITE):
            change(setter, colour, _PAPER)

    for artist in figure.findobj(include_self=False):
        if isinstance(artist, Text):
            if artist.get_gid() == AS_IT_IS:
                continue
            ink(artist.set_color, artist.get_color())
            if _is(artist.get_color(), _BLUE):
                change(artist.set_color, artist.get_color(), _SKY)
            box = artist.get_bbox_patch()
            if box is not None:
                ink(box.set_facecolor, box.get_facecolor())
        elif isinstance(artist, Line2D):
            ink(artist.set_color, artist.get_color())
            ink(artist.set_markeredgecolor, artist.get_markeredgecolor())
            ink(artist.set_markerfacecolor, artist.get_markerfacecolor())
        elif isinstance(artist, Patch):
            ink(artist.set_edgecolor, artist.get_edgecolor())
        elif isinstance(artist, Collection):
            # A black point with only its edge changed would look hollow, which has a different meaning.
            for setter, colours in (
                (artist.set_edgecolor, np.asarray(artist.get_edgecolor())),
                (artist.set_facecolor, np.asarray(artist.get_facecolor())),
            ):
                if len(colours) == 1:
                    ink(setter, tuple(colours[0]))
    for axes in _axes(figure):
        ink(axes.patch.set_facecolor, axes.get_facecolor())
    ink(figure.patch.set_facecolor, figure.get_facecolor())
    try:
        yield
    finally:
        for setter, before in reversed(undo):
            setter(before)


def _is(colour: Any, other: tuple[float, float, float, float]) -> bool:
    try:
        return to_rgba(colour) == other
    except (TypeError, ValueError):
        return False


def _axes(figure: Figure) -> list[Axes]:
    """All axes, including inset ones."""
    found: list[Axes] = list(dict.fromkeys(figure.findobj(lambda artist: isinstance(artist, Axes))))  # type: ignore[arg-type]
    return found


def in_words(figure: Figure) -> str:
    """Describe a figure: its titles, axis labels, long texts and legends."""
    parts = []
    for axes in _axes(figure):
        if axes.get_label() == "<colorbar>":
            parts.append(f"colour: {axes.get_ylabel() or axes.get_xlabel()}")
            continue
        titles = [axes.get_title(loc=where) for where in ("left", "center", "right")]
        parts += [title for title in titles if title]
        parts += [f"{name}: {label}" for name, label in (("x", axes.get_xlabel()), ("y", axes.get_ylabel())) if label]
        parts += [text.get_text() for text in axes.texts if len(text.get_text()) > 12]
        if (legend := axes.get_legend()) is not None:
            parts.append("legend: " + ", ".join(text.get_text().strip() for text in legend.get_texts()))
    return ". ".join(" ".join(each.replace(r"\$", "$").split()) for each in parts)
