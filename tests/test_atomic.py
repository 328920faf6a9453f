"""Files that appear whole or not at all."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from cwy import _atomic


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    # An attempt that was killed.
    (tmp_path / ".file.partial").write_bytes(b"half")
    for content in (b"one", b"", b"two"):
        _atomic.write(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    _atomic.write(path, b"old")

    def fail():
        with _atomic.whole(path) as partial:
            partial.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
@pytest.mark.parametrize("name", ["file", ".file.partial"])
def test_a_link_is_replaced_and_not_followed(name, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / name).symlink_to(victim)
    _atomic.write(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"mine"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()


def test_many_may_write_a_shared_file_at_once(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([number]) * 100_000 for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: _atomic.write(path, content, shared=True), contents))
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]
