"""Building blocks of the HTML reports: one file, readable without a network or scripts."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
figure { margin: 1rem 0 }
svg { max-width: 100%; height: auto }
"""


def page(title: str, parts: Iterable[str]) -> bytes:
    """A whole page: `title` as heading, then `parts`, which are HTML."""
    title = html.escape(title)
    head = (f"<!doctype html>\n<html lang='en'><meta charset='utf-8'>"
            f"<title>{title}</title><style>{_STYLE}</style>\n<h1>{title}</h1>\n")
    return "".join([head, *parts, "</html>\n"]).encode()


def heading(text: str) -> str:
    """A second-level heading."""
    return f"<h2>{html.escape(text)}</h2>\n"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; cells are escaped."""
    cells = lambda tag, values: "".join(f"<{tag}>{html.escape(str(v))}</{tag}>" for v in values)
    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f"<table>\n<tr>{cells('th', columns)}</tr>\n{body}</table>\n"


def plot(draw: Callable[[Any], object], xlabel: str, ylabel: str) -> str:
    """An inline SVG; a sentence where matplotlib, an optional extra, is missing.

    Args:
      draw: called with the axes.
      xlabel, ylabel: labels of the axes, which also describe the plot to screen readers.
    """
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError:
        return "<p>Plots need matplotlib: <code>pip install 'feast-tf[plots]'</code>.</p>\n"
    # With a fixed salt and no metadata the same numbers give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "feast-tf"}):
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        draw(axes)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        text = io.StringIO()
        figure.savefig(text, format="svg",
                       metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        pyplot.close(figure)
    svg = text.getvalue()
    label = html.escape(f"{ylabel} by {xlabel}", quote=True)
    return f"<figure role='img' aria-label='{label}'>{svg[svg.index('<svg'):]}</figure>\n"
