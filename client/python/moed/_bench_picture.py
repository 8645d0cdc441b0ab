"""The picture of moed.bench: where the time of each layer goes, as stacked bars. Needs matplotlib, which moed[bench] installs."""
from __future__ import annotations

import importlib.util
from typing import Any, Sequence

_PARTS = (("compute_us", "compute", "#2b6cb0"), ("queue_us", "queue", "#90cdf4"), ("transport_us", "transport", "#ed8936"),
          ("client_us", "Python client", "#9f7aea"))


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: str, title: str, rows: Sequence[Any]) -> None:
    """Writes a PNG of the layers' mean times in microseconds. OSError when the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(max(5.0, 1.5 + 0.35 * len(rows)), 4.0), layout="constrained")
    axes = figure.add_subplot()
    at, below = range(len(rows)), [0.0] * len(rows)
    for field, name, color in _PARTS:
        values = [row[field] for row in rows]
        axes.bar(at, values, bottom=below, label=name, color=color)
        below = [one + more for one, more in zip(below, values)]
    axes.set_xticks(at, [str(row["layer"]) for row in rows], rotation=90 if len(rows) > 20 else 0)
    axes.set_xlabel("layer")
    axes.set_ylabel("mean time of a call, us")
    axes.set_title(title.replace(": ", ":\n", 1), fontsize=9)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)
