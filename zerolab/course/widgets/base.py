"""What all explorers share: controls, one picture with its words and table, and bad input."""

from __future__ import annotations

import base64
import gc
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ipywidgets
from IPython.display import Markdown, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerolab.course.plots.base import FIGURE_DATA, figure_of, numbers_of, png_of

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# A slider's readout takes what is typed and does nothing with it: here it cannot be typed into.
# Where the kernel has gone, JupyterLab marks a widget with a class and nothing else.
STYLE = """<style>
.zerolab-explorer table {border-collapse: collapse; margin: 4px 0}
.zerolab-explorer td, .zerolab-explorer th {padding: 2px 10px; text-align: right;
  border-bottom: 1px solid #767676}
.zerolab-explorer td:first-child, .zerolab-explorer th:first-child {text-align: left}
.zerolab-explorer img {max-width: 100%; height: auto; background: white}
.zerolab-explorer .zerolab-wrong {border-left: 4px solid #a40000; padding-left: 8px}
.zerolab-explorer .widget-slider .widget-readout {pointer-events: none;
  -webkit-user-modify: read-only}
.zerolab-explorer.jupyter-widgets-disconnected::before {font-family: inherit; color: inherit;
  content: "No kernel answers any more: run this cell again to go on."}
</style>"""


Box = tuple[float, float, float, float]
Table = tuple[tuple[str, ...], ...]  # the first row is the head


@dataclass(frozen=True)
class View:
    """What an explorer shows for one choice: a picture, the same in words, the numbers.

    `size` is in pixels; `numbers` are those of the picture's bars and lines.
    """

    png: bytes
    size: tuple[int, int]
    numbers: list[dict[str, Any]]
    words: str
    table: Table = ()

    @classmethod
    def of(cls, figure: Figure, words: str, table: Table = ()) -> View:
        """Of a figure as it is now: it may be drawn over afterwards."""
        width, height = figure.get_size_inches() * figure.dpi
        return cls(png_of(figure), (round(width), round(height)), numbers_of(figure), words, table)


@cache
def _drawn_before(width: float, height: float, boxes: tuple[Box, ...]) -> tuple[Figure, list[Axes]]:
    return figure_of(width, height, boxes)


def canvas(width: float, height: float, *boxes: Box) -> tuple[Figure, list[Axes]]:
    """As `figure_of`, but one figure for each size, wiped: its axes and ticks need not be made.

    That halves the time from a slider's move to the new picture. Make a View of it before the
    next is asked for.
    """
    figure, all_axes = _drawn_before(width, height, boxes)
    for ax in all_axes:
        for artist in [*ax.patches, *ax.lines, *ax.texts, *ax.collections]:
            artist.remove()
        ax.containers.clear()
    return figure, all_axes


class Explorer:
    """Controls over a function that makes a View of their values, or a sentence.

    `look(**values)` may raise ValueError: its sentence is shown, with the last picture. Picture,
    words and table change in one piece, so that they never disagree.
    """

    def __init__(
        self,
        title: str,
        controls: Mapping[str, Any],
        look: Callable[..., View],
        before: Callable[[Mapping[str, Any]], None] = lambda controls: None,
    ) -> None:
        self.title, self.controls, self.look, self.before = title, controls, look, before
        self.settling = False
        before(controls)
        self.view = look(**self.values())
        self.shown = ipywidgets.HTML(_page(self.view))
        columns = ipywidgets.Layout(grid_template_columns="repeat(auto-fill, minmax(380px, 1fr))")
        self.box = ipywidgets.VBox(
            [
                ipywidgets.HTML(f"{STYLE}<b>{html.escape(title)}</b>"),
                ipywidgets.GridBox(list(controls.values()), layout=columns),
                self.shown,
            ]
        )
        self.box.add_class("zerolab-explorer")
        for control in controls.values():
            control.observe(self._changed, "value")

    def values(self) -> dict[str, Any]:
        """What the controls stand at."""
        return {name: control.value for name, control in self.controls.items()}

    def _changed(self, _: Any) -> None:
        if self.settling:  # a control that `before` is setting: one picture for all of it
            return
        self.settling, collecting = True, gc.isenabled()
        gc.disable()  # a collection takes longer than the picture: it can wait until that is sent
        wrong = ""
        try:
            self.before(self.controls)
            self.view = self.look(**self.values())
        except ValueError as error:
            wrong = f"{error} Below is still the last choice that was possible."
        finally:
            self.settling = False
            self.shown.value = _page(self.view, wrong)
            if collecting:
                gc.enable()

    def show(self) -> None:
        """Displays the explorer; without a kernel its still figure stands in for it."""
        view = self.view
        bundle: dict[str, Any] = {
            "image/png": view.png,
            "text/plain": view.words,
            FIGURE_DATA: view.numbers,
        }
        bundle[WIDGET_VIEW] = {
            "model_id": self.box.model_id,
            "version_major": 2,
            "version_minor": 0,
        }
        display(bundle, raw=True)
        caption = f"{self.title}, as it stands at first; run the cell to move it."
        display(Markdown(f"*{caption} {view.words}*"))


def _page(view: View, wrong: str = "") -> str:
    """Message, words, picture and table as HTML; the words are the picture's alternative text."""
    words = html.escape(view.words, quote=True)
    picture = base64.b64encode(view.png).decode()
    image = (
        f'<img alt="{words}" width="{view.size[0]}" height="{view.size[1]}" decoding="sync" '
        f'src="data:image/png;base64,{picture}">'
    )
    parts = [f'<p class="zerolab-wrong" role="alert">{html.escape(wrong)}</p>' if wrong else "",
             f'<p role="status">{words}</p>',
             image, _table(view.table)]  # fmt: skip
    return "".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "th" if number == 0 else "td"
        cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>" if rows else ""


def slider(name: str, options: Sequence[tuple[str, Any]], value: Any) -> Any:
    """A slider over named values, moved with the arrow keys; none lies outside of its range.

    A screen reader says its value, but not its name: ipywidgets has no way to name the handle.
    ValueError for a start value that it does not have.
    """
    known = [choice for _, choice in options]
    if value not in known:
        texts = ", ".join(str(choice) for choice in known)
        raise ValueError(f"The slider {name} has no {value!r}: choose one of {texts}.")
    return ipywidgets.SelectionSlider(options=options, value=value, **_look(name))


def chooser(name: str, options: Sequence[Any], value: Any) -> Any:
    """A list to choose from; ValueError for a start value that is not in it."""
    if value not in options:
        raise ValueError(f"{name} has no {value!r}: choose one of {', '.join(map(str, options))}.")
    return ipywidgets.Dropdown(options=options, value=value, **_look(name))


def typed(name: str, value: str, suggestions: Sequence[str] = ()) -> Any:
    """A field to type into, read when Enter is pressed or the field is left."""
    return ipywidgets.Combobox(value=value, options=list(suggestions), ensure_option=False,
                               continuous_update=False, **_look(name))  # fmt: skip


def numbered(values: Sequence[int], unit: str = "") -> list[tuple[str, int]]:
    """Whole numbers as a slider's options."""
    return [(f"{value:,}{unit}", value) for value in values]


def _look(name: str) -> dict[str, Any]:
    return {
        "description": name,
        "style": {"description_width": "11em"},
        "layout": ipywidgets.Layout(width="375px"),
    }
