"""Where public data is looked for, and that a download is trusted only once it is the expected one. No network."""

from __future__ import annotations

import hashlib
import http.server
import os
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from raising import raises

from benchmarks.paper import sources
from benchmarks.paper.sources import DataSet, PublicFile, at_hand, find
from trimtab.core.errors import DataMissingError, FormatError

BODY = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def server(monkeypatch):
    """A loopback server whose answers a test sets by path: bytes, or a status code; it counts what is asked for."""
    monkeypatch.delenv("TRIMTAB_OFFLINE", raising=False)
    answers: dict[str, bytes | int] = {}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            answer = answers.get(self.path, 404)
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(b"<html>sign in</html>" if isinstance(answer, int) else answer)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        running.base = f"http://127.0.0.1:{running.server_port}"
        running.answers, running.asked = answers, asked
        _require_loopback(running.server_port)
        yield running
        running.shutdown()
        thread.join()


def _require_loopback(port: int) -> None:
    """Skip where the network is off to the last interface."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError as error:
        pytest.skip(f"no loopback interface ({error})")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory with ../shared/data of its own, and a checkout without."""
    work = tmp_path / "work" / "here"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "a" / "checkout" / "benchmarks" / "paper" / "s.py"))
    return work


def data_set(base: str = "http://127.0.0.1:9", names: tuple[str, ...] = ("one.bin",)) -> DataSet:
    public = tuple(PublicFile(f"{base}/set/{name}", SHA256, len(BODY)) for name in names)
    return DataSet("The Set", "the-set", files=("packed.gz",), public=public)


def lay_out(folder: Path) -> Path:
    (folder / "the-set").mkdir(parents=True)
    (folder / "the-set" / "packed.gz").write_bytes(b"packed")
    return folder


def cached_files() -> list[str]:
    return sorted(path.name for path in sources.cache_folder().rglob("*") if path.is_file())


def test_order_is_named_folder_then_public_source_then_shared(server, elsewhere, monkeypatch, tmp_path):
    shared = lay_out(elsewhere.parent / "shared" / "data")
    assert find(data_set(server.base)).origin == "../shared/data"
    assert find(data_set(server.base)).files == {"packed.gz": shared / "the-set" / "packed.gz"}
    server.answers["/set/one.bin"] = BODY
    found = find(data_set(server.base))
    assert found.origin == "public source " + server.base.removeprefix("http://") + "/set/one.bin"
    assert found.is_public
    assert found.files["one.bin"].read_bytes() == BODY
    named = lay_out(tmp_path / "named")
    monkeypatch.setenv("TRIMTAB_DATA", str(named))
    found = find(data_set(server.base))
    assert found.origin == "TRIMTAB_DATA"
    assert found.files == {"packed.gz": named / "the-set" / "packed.gz"}


def test_a_checkout_is_looked_beside_as_well_but_not_an_installed_package(elsewhere, tmp_path):
    lay_out(tmp_path / "a" / "shared" / "data")
    with pytest.raises(DataMissingError):
        find(data_set())
    (tmp_path / "a" / "checkout").mkdir()
    (tmp_path / "a" / "checkout" / "pyproject.toml").touch()
    assert find(data_set()).files["packed.gz"] == tmp_path / "a" / "shared" / "data" / "the-set" / "packed.gz"


def test_what_is_at_hand_is_said_without_asking_anybody(server, elsewhere, monkeypatch, tmp_path):
    server.answers["/set/one.bin"] = BODY
    asked = data_set(server.base)
    assert at_hand(asked) is None
    lay_out(elsewhere.parent / "shared" / "data")
    assert at_hand(asked) == "../shared/data"
    find(asked)  # fetches
    assert at_hand(asked) == str(sources.cache_folder())
    monkeypatch.setenv("TRIMTAB_DATA", str(lay_out(tmp_path / "named")))
    assert at_hand(asked) == "TRIMTAB_DATA"
    monkeypatch.setenv("TRIMTAB_DATA", str(tmp_path / "nowhere"))
    with raises(DataMissingError, code="data.missing", field="TRIMTAB_DATA"):
        at_hand(asked)


def test_offline_asks_nobody_and_says_how_to_get_the_data(server, elsewhere, monkeypatch):
    monkeypatch.setenv("TRIMTAB_OFFLINE", "1")
    server.answers["/set/one.bin"] = BODY
    with pytest.raises(DataMissingError) as raised:
        find(data_set(server.base))
    assert server.asked == []
    for said in ("TRIMTAB_DATA", "TRIMTAB_OFFLINE=1", "/set/one.bin", "../shared/data", "digits_resnet", "source_gpt"):
        assert said in str(raised.value)
    assert str(elsewhere.parent) not in str(raised.value)


def test_a_named_folder_that_is_not_there_is_not_passed_over(elsewhere, monkeypatch, tmp_path):
    lay_out(elsewhere.parent / "shared" / "data")
    monkeypatch.setenv("TRIMTAB_DATA", str(tmp_path / "nowhere"))
    with raises(DataMissingError, code="data.missing", field="TRIMTAB_DATA"):
        find(data_set())


def test_a_download_is_kept_and_not_asked_for_again(server, elsewhere, monkeypatch):
    server.answers |= {"/set/one.bin": BODY, "/set/two.bin": BODY}
    both = data_set(server.base, ("one.bin", "two.bin"))
    assert find(both).origin.endswith("/set")
    assert cached_files() == ["one.bin", "two.bin"]
    monkeypatch.setenv("TRIMTAB_OFFLINE", "1")
    assert find(both).is_public
    assert server.asked == ["/set/one.bin", "/set/two.bin"]


@pytest.mark.parametrize("sent", [BODY[:-1] + b"x", BODY + b"x", BODY * 3], ids=["changed", "longer", "much longer"])
def test_a_download_that_is_not_the_expected_one_is_an_error_and_gone(server, elsewhere, sent):
    lay_out(elsewhere.parent / "shared" / "data")
    server.answers["/set/one.bin"] = sent
    with raises(FormatError, code="format.invalid"):
        find(data_set(server.base))
    assert cached_files() == []


def test_a_download_stops_once_it_is_too_long(server, elsewhere, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1000)
    taken = []
    real_open = urllib.request.urlopen

    def counting(*args, **kwargs):
        response = real_open(*args, **kwargs)
        read = response.read
        response.read = lambda size: taken.append(size) or read(size)
        return response

    monkeypatch.setattr(urllib.request, "urlopen", counting)
    server.answers["/set/one.bin"] = BODY * 3
    with pytest.raises(FormatError):
        find(data_set(server.base))
    assert sum(taken) <= len(BODY) + 1000


@pytest.mark.parametrize("answer", [404, 503, BODY[:1000], b""], ids=["missing", "busy", "cut short", "empty"])
def test_a_public_source_that_fails_is_passed_over_and_named(server, elsewhere, answer):
    server.answers["/set/one.bin"] = answer
    with raises(DataMissingError, code="data.missing", field="The Set"):
        find(data_set(server.base))
    assert cached_files() == []
    lay_out(elsewhere.parent / "shared" / "data")
    assert find(data_set(server.base)).origin == "../shared/data"


def test_a_broken_connection_leaves_nothing(server, elsewhere, monkeypatch):
    def broken(url, timeout):
        assert timeout <= 5
        raise TimeoutError("timed out")

    monkeypatch.setattr(urllib.request, "urlopen", broken)
    with raises(DataMissingError, code="data.missing", field="The Set"):
        find(data_set(server.base))
    assert cached_files() == []


def test_a_damaged_cached_file_is_fetched_again(server, elsewhere, monkeypatch):
    server.answers["/set/one.bin"] = BODY
    path = find(data_set(server.base)).files["one.bin"]
    path.write_bytes(BODY[:-1] + b"x")
    monkeypatch.setenv("TRIMTAB_OFFLINE", "1")
    with raises(DataMissingError, code="data.missing", field="The Set"):
        find(data_set(server.base))
    monkeypatch.delenv("TRIMTAB_OFFLINE")
    assert find(data_set(server.base)).files["one.bin"].read_bytes() == BODY


def test_a_cache_that_cannot_be_written_is_passed_over(server, elsewhere, monkeypatch, tmp_path):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    server.answers["/set/one.bin"] = BODY
    lay_out(elsewhere.parent / "shared" / "data")
    assert find(data_set(server.base)).origin == "../shared/data"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file"
    with sources.written_whole(path) as stream:
        stream.write(b"old")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), sources.written_whole(path) as stream:
        stream.write(b"new" * (1 // 0))
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["file"]


def test_what_is_written_whole_may_be_read_as_any_new_file(tmp_path, monkeypatch):
    """A cache may be several users'. The umask is not read, as it is every thread's while it is."""
    (tmp_path / "plain").write_bytes(b"")
    monkeypatch.delattr(os, "umask")
    with sources.written_whole(tmp_path / "found") as stream:
        stream.write(b"bytes")
    assert (tmp_path / "found").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert sources.cache_folder().name == "trimtab"
