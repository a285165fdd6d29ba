import contextlib
import hashlib
import http.server
import threading

import numpy as np
import pytest

from feast_tf.datasets.download import download

CONTENT = np.random.default_rng(1).bytes(300_000)
CHECKSUM = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT as the attributes of the server say, and notes what was asked for."""

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append(asked)
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        start = int(asked[len("bytes=") : -1]) if asked and server.knows_ranges else 0
        if start >= len(server.content):
            self.send_error(416)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            said = start + server.range_error
            last = len(server.content) - 1
            self.send_header("Content-Range", f"bytes {said}-{last}/{last + 1}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as result:
        result.content, result.knows_ranges, result.range_error = CONTENT, True, 0
        result.statuses, result.cuts, result.asked = [], [], []
        result.url = f"http://127.0.0.1:{result.server_port}/x.zip"
        thread = threading.Thread(target=result.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield result
        result.shutdown()
        thread.join()


def fetch(server, target, **options):
    options = {"checksum": CHECKSUM, "wait_seconds": 0.01, "timeout_seconds": 5, **options}
    return download([server.url], target, **options)


def test_downloads_once(server, tmp_path):
    target = tmp_path / "made" / "x.zip"
    assert fetch(server, target) == target
    fetch(server, target)
    assert target.read_bytes() == CONTENT
    assert server.asked == [None]
    assert not target.with_name("x.zip.part").exists()


def test_continues_where_the_connection_was_cut(server, tmp_path):
    server.cuts = [100_000, 50_000]
    fetch(server, tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=150000-"]


def test_continues_what_an_earlier_run_left(server, tmp_path):
    server.cuts = [70_000]
    with pytest.raises(ConnectionError, match="cut after 70000 of 300000 bytes, after 1 attempts"):
        fetch(server, tmp_path / "x.zip", attempts=1)
    assert not (tmp_path / "x.zip").exists()
    fetch(server, tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=70000-"]


def test_starts_anew_where_the_server_ignores_ranges(server, tmp_path):
    server.cuts, server.knows_ranges = [100_000], False
    fetch(server, tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-"]


def test_starts_anew_where_the_server_sends_another_range(server, tmp_path):
    server.cuts, server.range_error = [100_000], 7
    fetch(server, tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", None]


def test_takes_a_part_that_was_complete(server, tmp_path):
    (tmp_path / "x.zip.part").write_bytes(CONTENT)
    fetch(server, tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_bytes() == CONTENT
    assert server.asked == ["bytes=300000-"]


def test_drops_a_part_of_another_file(server, tmp_path):
    (tmp_path / "x.zip.part").write_bytes(b"something else")
    fetch(server, tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_bytes() == CONTENT
    assert server.asked == ["bytes=14-", None]


def test_deletes_a_file_with_a_wrong_checksum(server, tmp_path):
    server.content = CONTENT + b"!"
    wrong = hashlib.sha256(server.content).hexdigest()
    message = f"{server.url} .the sha256 checksum is {wrong} instead of {CHECKSUM[7:]}"
    with pytest.raises(ConnectionError, match=message):
        fetch(server, tmp_path / "x.zip")
    assert [path.name for path in tmp_path.iterdir()] == [".x.zip.lock"]


def test_does_not_insist_on_a_file_that_is_not_there(server, tmp_path):
    server.statuses = [404, 404]
    with pytest.raises(ConnectionError, match=f"cannot download {server.url} .HTTP status 404"):
        fetch(server, tmp_path / "x.zip")
    assert len(server.asked) == 1


def test_tries_again_when_the_server_is_in_trouble(server, tmp_path):
    server.statuses = [503, 429]
    fetch(server, tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_bytes() == CONTENT
    assert len(server.asked) == 3


def test_gives_up_after_some_attempts(server, tmp_path):
    server.statuses = [503] * 9
    with pytest.raises(ConnectionError, match="HTTP status 503"):
        fetch(server, tmp_path / "x.zip", attempts=3)
    assert len(server.asked) == 3


def test_takes_the_next_url_when_one_fails(server, tmp_path):
    server.statuses = [404]
    download(
        [server.url, server.url + "?2"], tmp_path / "x.zip", checksum=CHECKSUM, wait_seconds=0.01
    )
    assert (tmp_path / "x.zip").read_bytes() == CONTENT


def test_names_every_url_when_offline(tmp_path):
    with contextlib.closing(http.server.HTTPServer(("127.0.0.1", 0), Handler).socket) as closed:
        port = closed.getsockname()[1]
    urls = [f"http://127.0.0.1:{port}/a", f"http://127.0.0.1:{port}/b"]
    message = rf"cannot download {urls[0]} \(.*refused, after 2 attempts\) or {urls[1]} \("
    with pytest.raises(ConnectionError, match=message) as raised:
        download(urls, tmp_path / "x", checksum=CHECKSUM, attempts=2, wait_seconds=0.01)
    assert "\n" not in str(raised.value)


def test_says_that_the_disk_is_full(server, tmp_path):
    (tmp_path / "x.zip.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write .*x\.zip\.part: No space left on device"):
        fetch(server, tmp_path / "x.zip")
    assert not (tmp_path / "x.zip").exists()


def test_two_downloads_at_once_make_one_request(server, tmp_path):
    threads = [
        threading.Thread(target=fetch, args=(server, tmp_path / "x.zip")) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "x.zip").read_bytes() == CONTENT
    assert server.asked == [None]
