"""Tests of feast_tf.report_html."""

import html.parser
import sys

import pytest

from feast_tf import report_html


class References(html.parser.HTMLParser):
    """Collects what a page would load."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page.decode())

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "xlink:href")
                       and not value.startswith(("#", "data:"))]


def test_text_is_escaped():
    page = report_html.page("a < b", [report_html.heading("c & d"), report_html.paragraph("<e>"),
                                      report_html.table(["f>"], [["<g>"], [1]])]).decode()
    for text in ("<h1>a &lt; b</h1>", "<h2>c &amp; d</h2>", "<p>&lt;e&gt;</p>", "<th>f&gt;</th>",
                 "<td>&lt;g&gt;</td>", "<td>1</td>"):
        assert text in page


def test_plot_is_an_inline_picture_that_loads_nothing():
    pytest.importorskip("matplotlib")
    draw = lambda axes: axes.plot([1, 2], [3, 4], label="line")
    svg = report_html.plot(draw, "size", 'error "e"')
    assert svg.startswith("<figure role='img' aria-label='error &quot;e&quot; by size'><svg")
    assert References(report_html.page("t", [svg])).found == []
    assert "metadata" not in svg
    assert svg == report_html.plot(draw, "size", 'error "e"')  # no date, no random names


def test_without_matplotlib_a_sentence_stands_for_the_plot(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'feast-tf[plots]'" in report_html.plot(lambda axes: None, "x", "y")
