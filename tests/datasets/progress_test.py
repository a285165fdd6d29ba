import io
import sys

import pytest

from feast_tf.datasets import progress as module
from feast_tf.datasets.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def lines(monkeypatch):
    result = []
    monkeypatch.setattr(module.logging, "info", lambda text, *values: result.append(text % values))
    return result


def work(**options):
    with progress("Decoding", unit=" pictures", **options) as advance:
        advance(30)
        advance(20)


def test_a_terminal_gets_a_bar(monkeypatch, lines):
    monkeypatch.setattr(sys, "stderr", Terminal())
    work(total=200, initial=100)
    assert "Decoding:  75%" in sys.stderr.getvalue().split("\r")[-1]
    assert "150/200" in sys.stderr.getvalue()
    assert lines == []


def test_a_log_gets_a_line_now_and_then(monkeypatch, lines):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    work(total=200)
    assert lines == []
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    work(total=200, initial=100)
    work(total=None)
    assert lines == [
        "Decoding: 130 of 200 pictures", "Decoding: 150 of 200 pictures",
        "Decoding: 30 of ? pictures", "Decoding: 50 of ? pictures",
    ]
    assert sys.stderr.getvalue() == ""
