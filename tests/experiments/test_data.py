"""Data sets over a real HTTP server: cut connections, wrong bytes, archives that reach out; and
files that are not MNIST.
"""

import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cwy.experiments.data import (
    DATASETS,
    DataError,
    DataSet,
    File,
    default_root,
    ensure,
    fetch,
    inspect,
)
from cwy.experiments.data.folders import frames_root, tokens_root
from cwy.experiments.data.mnist import load, read_idx
from tests.helpers.cli import COMMAND, run
from tests.helpers.server import Server

pytest.importorskip("platformdirs")

CONTENT = os.urandom(300_000)


def test_data_lie_where_the_user_says_or_in_a_cache(tmp_path, monkeypatch):
    for name in ("CWY_DATA", "CWY_FRAMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert default_root() == tmp_path / "cwy"
    # What an earlier version left there is used on every system.
    (tmp_path / "cwy").mkdir()
    assert default_root() == tmp_path / "cwy"
    assert frames_root() == tmp_path / "cwy" / "frames"
    assert tokens_root() == tmp_path / "cwy" / "tokens"
    monkeypatch.setenv("CWY_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CWY_FRAMES", str(tmp_path / "frames"))
    assert (default_root(), frames_root()) == (tmp_path / "data", tmp_path / "frames")


def dataset(home, content=CONTENT, name="file", archive=False):
    return DataSet(
        "some", "", home, (File(name, len(content), hashlib.sha256(content).hexdigest(), archive),)
    )


def left(folder):
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    )


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_download_goes_on_where_it_stopped(ranges, tmp_path):
    some = dataset("http://127.0.0.1:9/")
    (tmp_path / "some").mkdir()
    (tmp_path / "some/.file.partial").write_bytes(CONTENT[:50_000])
    with Server(ranges=ranges, cut=100_000 if ranges else None, file=CONTENT) as server:
        seen = []
        folder = fetch(dataset(server.home), tmp_path, lambda file, done: seen.append(done))
        assert server.asked == [
            f"bytes={start}-" for start in ((50_000, 150_000, 250_000) if ranges else (50_000,))
        ]
    assert (folder / "file").read_bytes() == CONTENT
    assert left(tmp_path) == ["some/file"]
    assert seen[-1] == len(CONTENT)
    assert fetch(some, tmp_path) == folder, "what is there is not asked for again"


def test_several_processes_may_fetch_at_once(tmp_path):
    with Server(cut=40_000, file=CONTENT) as server:
        some = dataset(server.home)
        imports = "from pathlib import Path; from cwy.experiments.data import *"
        call = f"{imports}; fetch({some!r}, Path({str(tmp_path)!r}))"
        processes = [subprocess.Popen([sys.executable, "-c", call]) for _ in range(4)]
        assert [process.wait() for process in processes] == [0] * 4
        assert len(server.asked) == 8, "one fetches, the others wait"
    assert (tmp_path / "some/file").read_bytes() == CONTENT
    assert left(tmp_path) == ["some/file"]


@pytest.mark.parametrize(
    "wrong",
    [CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), CONTENT + b"more", CONTENT[:-1]],
    ids=["flipped", "longer", "shorter"],
)
def test_wrong_bytes_are_refused_and_what_was_there_is_kept(wrong, tmp_path):
    with Server(file=wrong) as server:
        some = dataset(server.home, CONTENT)
        (tmp_path / "some").mkdir()
        (tmp_path / "some/file").write_bytes(b"the user's")
        with pytest.raises(DataError, match=some.files[0].sha256):
            fetch(some, tmp_path)
    assert (tmp_path / "some/file").read_bytes() == b"the user's"
    if len(wrong) >= len(CONTENT):
        assert left(tmp_path) == ["some/file"]


def test_a_file_of_unknown_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[fetch.__module__], "LIMIT", 100_000)
    file = File("file", None, hashlib.sha1(CONTENT).hexdigest())
    with Server(file=CONTENT) as server, pytest.raises(DataError, match="longer than 100000 bytes"):
        fetch(DataSet("some", "", server.home, (file,)), tmp_path)
    assert left(tmp_path) == []


@pytest.mark.parametrize("where", ["headers", "body"])
def test_a_server_that_drips_is_not_waited_for(where, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[fetch.__module__], "PATIENCE", 1.0)
    ended = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self):
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\n"
                + (b"" if where == "headers" else b"Content-Length: 300000\r\n\r\n")
            )
            with suppress(OSError):
                while not ended.wait(0.05):
                    self.wfile.write(b"x")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(DataError, match="took longer than 1 seconds"):
                fetch(dataset(f"http://127.0.0.1:{server.server_port}/"), tmp_path)
        finally:
            ended.set()
            server.shutdown()
    assert left(tmp_path) == ([] if where == "headers" else ["some/.file.partial"])


@pytest.mark.parametrize("scheme", ["ftp", "file", "http"])
def test_only_redirects_to_the_web_are_followed(scheme, tmp_path):
    with Server(file=CONTENT) as server:

        class Elsewhere(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(302)
                self.send_header("Location", server.home.replace("http", scheme) + "file")
                self.end_headers()

            def log_message(self, *_):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as first:
            threading.Thread(target=first.serve_forever, daemon=True).start()
            some = dataset(f"http://127.0.0.1:{first.server_port}/")
            if scheme == "http":
                assert (fetch(some, tmp_path) / "file").read_bytes() == CONTENT
            else:
                with pytest.raises(DataError, match=scheme):
                    fetch(some, tmp_path)
            first.shutdown()
        assert len(server.asked) == (scheme == "http")


def test_what_cannot_be_had_is_named_with_its_hash_and_place(tmp_path):
    with Server() as server:
        some = dataset(server.home)
    for home, reason in (
        (some.home, "refused"),
        ("http://nowhere.invalid/", "cannot fetch file from"),
    ):
        with pytest.raises(DataError, match=reason) as error:
            ensure(dataset(home), tmp_path)
        assert f"{tmp_path / 'some/file'}\n(sha256 {some.files[0].sha256})" in str(error.value)
    assert left(tmp_path) == []
    with Server() as server, pytest.raises(DataError, match="404"):
        fetch(dataset(server.home), tmp_path)


def test_a_damaged_file_is_refused_and_fetched_anew_on_demand(tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some/file").write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    with Server(file=CONTENT) as server:
        with pytest.raises(DataError, match=r"wrong content.*cwy data fetch some"):
            ensure(dataset(server.home), tmp_path)
        assert (fetch(dataset(server.home), tmp_path) / "file").read_bytes() == CONTENT


def archive(kind, member):
    content = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(content, "w") as out:
            out.writestr("inner/a.txt", "a")
            out.writestr(member, "b")
    else:
        with tarfile.open(fileobj=content, mode="w:gz") as out:
            for name in ("inner/a.txt", member):
                info = tarfile.TarInfo(name)
                info.size = 1
                out.addfile(info, io.BytesIO(b"a"))
    return content.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_an_archive_that_reaches_out_of_its_folder_is_refused(kind, tmp_path):
    for member, whole in (
        ("b.txt", True),
        ("../../b.txt", False),
        (str(tmp_path / "b.txt"), False),
    ):
        content = archive(kind, member)
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        with Server(**{f"pack.{kind}": content}) as server:
            some = dataset(server.home, content, f"pack.{kind}", archive=True)
            if whole:
                ended = root / "some/.pack.partial/half.txt"
                ended.parent.mkdir(parents=True)
                ended.touch()
                fetch(some, root)
                assert left(root / "some/pack") == ["b.txt", "inner/a.txt"]
                assert not ended.parent.exists(), "nor is what an attempt that was ended had left"
            else:
                with pytest.raises(DataError, match="outside"):
                    fetch(some, root)
                assert left(root) == [f"some/pack.{kind}"]
                assert not any(path.is_dir() for path in root.glob("some/*")), (
                    "nothing is left half-unpacked"
                )
    assert not (tmp_path / "b.txt").exists()


def test_a_file_of_unknown_size_is_known_by_its_hash_and_an_unpacked_archive_is_enough(tmp_path):
    content = archive("zip", "b.txt")
    file = File("pack.zip", None, hashlib.sha1(content).hexdigest(), archive=True)
    with Server(cut=50, **{"pack.zip": content}) as server:
        some = DataSet("some", "", server.home, (file,))
        folder = fetch(some, tmp_path)
        assert len(server.asked) == -(-len(content) // 50), "cut connections go on"
        (folder / "pack.zip").unlink()
        assert ensure(some, tmp_path) == folder
        assert len(server.asked) == -(-len(content) // 50)
    with (
        Server(**{"pack.zip": content[:-1] + b"?"}) as server,
        pytest.raises(DataError, match=f"expected sha1 {file.sha256}"),
    ):
        fetch(DataSet("other", "", server.home, (file,)), tmp_path)
    assert left(tmp_path / "other") == []


def test_a_file_that_is_not_idx_is_refused_by_name(tmp_path):
    header = lambda *shape: b"".join(n.to_bytes(4, "big") for n in shape)
    good = bytes([0, 0, 8, 3]) + header(2, 3, 4) + bytes(range(24))
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(good))
    assert read_idx(path, (2, 3, 4)).flatten().tolist() == list(range(24))
    for content, message in (
        (gzip.compress(good)[:-9], "not a whole gzip file"),
        (good, "not a whole gzip file"),
        (gzip.compress(bytes([0, 0, 8, 1]) + good[4:]), "magic"),
        (gzip.compress(good[:4] + header(2, 4, 3) + good[16:]), r"shape is \(2, 4, 3\)"),
        (gzip.compress(good[:-1]), "holds 23 values"),
        (gzip.compress(b""), "magic"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"images.gz: .*{message}"):
            read_idx(path, (2, 3, 4))


needs_mnist = pytest.mark.skipif(
    any(inspect(DATASETS["mnist"].folder() / file.name, file) for file in DATASETS["mnist"].files),
    reason="needs MNIST in CWY_DATA",
)


@needs_mnist
def test_mnist_is_mnist():
    data = load()
    assert [tuple(part.shape) for part in data] == [(60000, 784), (60000,), (10000, 784), (10000,)]
    assert data.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test_labels.bincount().tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert data.train_images.float().mean().item() == pytest.approx(33.318, abs=1e-3)


@pytest.mark.slow
@needs_mnist
def test_commands_check_what_is_here(tmp_path):
    real = default_root()
    (tmp_path / "mnist").mkdir()
    names = [file.name for file in DATASETS["mnist"].files]
    for name in names:
        (tmp_path / "mnist" / name).symlink_to(real.resolve() / "mnist" / name)
    done = run(COMMAND, "data", "check", "mnist", CWY_DATA=str(tmp_path))
    assert (done.returncode, "4 of 4 files" in done.stdout) == (0, True)
    (tmp_path / "mnist" / names[0]).unlink()
    done = run(COMMAND, "data", "check", CWY_DATA=str(tmp_path))
    assert (done.returncode, done.stdout.count("gz is missing")) == (1, 1)
    assert "3 of 4 files" in done.stdout
    assert re.findall(r"^ (\w+) +(?:yes|NO) ", done.stdout, re.MULTILINE) == list(DATASETS), (
        "a summary of every set"
    )
    assert "3 of 4 files" in run(COMMAND, "data", "list", CWY_DATA=str(tmp_path)).stdout
    for call in (
        ("data", "list"),
        ("data", "check", "mnist"),
        ("train", "mnist/small", "--out", tmp_path / "run"),
    ):
        done = run(COMMAND, *map(str, call), CWY_DATA=str(tmp_path / ("x" * 300)))
        assert (
            done.returncode,
            "cannot read the data folder" in done.stderr,
            "Traceback" in done.stderr,
        ) == (1, True, False)


@pytest.mark.slow
def test_commands_name_a_mistake_plainly(tmp_path):
    done = run(COMMAND, "data", "fetch", "mnits")
    assert (done.returncode, done.stdout) == (1, "")
    assert "'mnits' is not known. Did you mean 'mnist'?" in done.stderr
    (tmp_path / "taken").touch()
    proxy = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    done = run(COMMAND, "data", "fetch", "mnist", CWY_DATA=str(tmp_path / "taken/here"), **proxy)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "train-images-idx3-ubyte.gz" in done.stderr
    assert Path(tmp_path / "taken").is_file()
    done = run(
        COMMAND,
        "train",
        "mnist/small",
        "--out",
        tmp_path / "run",
        CWY_DATA=str(tmp_path / "data"),
        **proxy,
    )
    file = DATASETS["mnist"].files[0]
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{tmp_path / 'data/mnist' / file.name}\n(sha256 {file.sha256})" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
    assert left(tmp_path / "data") == []
