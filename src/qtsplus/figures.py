"""Figures of results."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes `path.png`, the same bytes for the same figures."""
    FigureCanvasAgg(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_name(path.name + ".png"), dpi=150, metadata={"Software": None})
