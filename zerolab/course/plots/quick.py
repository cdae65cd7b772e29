"""A canvas that is drawn over and over: it keeps each text's pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg

TEXTS = 2000  # that are kept: some kilobytes each

Pixels = tuple[Any, int, int]


class QuickRenderer(RendererAgg):
    """Draws each text once, and copies its pixels from then on.

    Text is most of a figure's time, and most texts are those of the figure before. They stand on
    whole pixels, as in matplotlib before 3.11, so that one picture of each does wherever it moves.
    """

    def __init__(self, width: float, height: float, dpi: float) -> None:
        super().__init__(width, height, dpi)
        self._kept: dict[Any, Pixels] = {}

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float,
        ismath: Any = False, mtext: Any = None,
    ) -> None:  # fmt: skip
        """As matplotlib's own; x and y are rounded."""
        key = s, hash(prop), angle, ismath, gc.get_rgb()
        if key not in self._kept:
            if len(self._kept) == TEXTS:
                self._kept.clear()
            self._kept[key] = self._drawn(gc, s, prop, angle, ismath, mtext)
        pixels, right, up = self._kept[key]
        opaque = self.new_gc()
        opaque.copy_properties(gc)
        opaque.set_alpha(1)  # the pixels have theirs
        self.draw_image(opaque, round(x) + right, round(self.height - y) + up, pixels)

    def _drawn(self, gc: Any, s: str, prop: Any, angle: float, ismath: Any, mtext: Any) -> Pixels:
        """RGBA (rows from below, columns, 4), and where it begins, right of x and above y."""
        width, height, _ = self.get_text_width_height_descent(s, prop, ismath)
        reach = int(width + height) + 4  # in every direction, at any angle
        alone, free = RendererAgg(2 * reach, 2 * reach, self.dpi), self.new_gc()
        free.copy_properties(gc)
        free.set_clip_rectangle(None)
        alone.draw_text(free, reach, reach, s, prop, angle, ismath, mtext)
        whole = np.asarray(alone.buffer_rgba())[::-1]
        inked = whole[..., 3] > 0
        rows, columns = np.flatnonzero(inked.any(1)), np.flatnonzero(inked.any(0))
        if not len(rows):  # nothing but spaces
            return whole[:1, :1].copy(), 0, 0
        part = whole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        return part.copy(), int(columns[0]) - reach, int(rows[0]) - reach


class QuickCanvas(FigureCanvasAgg):
    """A canvas with such a renderer, for a figure whose size stays as it is."""

    _renderer: QuickRenderer | None = None

    def get_renderer(self) -> RendererAgg:
        """The one renderer of this canvas."""
        if self._renderer is None:
            self._renderer = QuickRenderer(*self.get_width_height(physical=True), self.figure.dpi)
        self.renderer = self._renderer
        return self._renderer
