"""Figures of results, each as PNG and SVG."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes `path.png` and `path.svg`, the same bytes for the same figures."""
    FigureCanvasAgg(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path.with_name(path.name + ".png"), dpi=150, metadata={"Software": None})
        figure.savefig(path.with_name(path.name + ".svg"), metadata={"Date": None})


__all__ = ["save_figure"]
