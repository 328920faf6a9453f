"""Videos: real files written here, odd ones among them; the sets themselves where they are; frames
without a decoder.
"""

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import save

from cwy.experiments.data import DATASETS, DataError, kth, manage, moving, weizmann
from cwy.experiments.data.videos import Videos, _sha256, decode, kept, read, square, write
from tests.helpers.cli import COMMAND, run

pytestmark = pytest.mark.slow

av = pytest.importorskip("av")

LIST = """Some words first.
person01_boxing_d4\t\tframes\t1-106, 107-170, 171-245, 246-370

person02_walking_d1\t\tframes\t1-6, 9-16
person13_walking_d1\t\tframes\t3-7
person13_handclapping_d3\t*missing*
person20_walking_d4\t\tframes\t1-4, 5-9
"""


def write_video(path, frames, size=(160, 120), kept=1.0):
    """Frame t is grey of level 10 t, a white square in its upper left corner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = *size, "yuv420p", 4_000_000
        for t in range(frames):
            image = torch.full((size[1], size[0]), 10 * t, dtype=torch.uint8)
            image[:16, 20:36] = 250
            for packet in stream.encode(av.VideoFrame.from_ndarray(image.numpy(), format="gray")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    if kept < 1:
        content = path.read_bytes()
        path.write_bytes(content[: int(kept * len(content))])


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder that holds a KTH of three videos."""
    monkeypatch.setenv("CWY_FRAMES", str(tmp_path / "frames"))
    folder = tmp_path / "kth"
    folder.mkdir()
    (folder / kth.LIST).write_text(LIST)
    for name, frames in (
        ("person02_walking_d1", 16),
        ("person13_walking_d1", 20),
        ("person20_walking_d4", 9),
    ):
        write_video(folder / "walking" / f"{name}_uncomp.avi", frames)
    return tmp_path


def test_sequences_are_cut_by_person_and_range_and_come_from_the_cache_without_a_decoder(root):
    videos = kth.load("walking", root)
    assert {split: videos.lengths(split) for split in videos.sequences} == {
        "train": [6, 8],
        "validation": [5],
        "test": [4, 5],
    }
    assert videos.frames.shape == (28, 128, 128)
    # Frames 1 and 9 of the first video, 3 of the second; the left 20 columns, cut off, are where
    # no square is.
    start = [
        videos.sequences["train"][0][0],
        videos.sequences["train"][1][0],
        videos.sequences["validation"][0][0],
    ]
    for at, level in zip(start, (0, 80, 20), strict=True):
        assert videos.frames[at, 64:].float().mean() == pytest.approx(level, abs=4)
        assert videos.frames[at, 4:12, 4:12].float().mean() > 230
    # A process without PyAV and without the videos has the same frames.
    shutil.rmtree(root / "kth")
    call = f"""if True:
        import sys, torch
        from pathlib import Path
        sys.modules["av"] = None
        from cwy.experiments.data import DataError, kth
        from cwy.experiments.data.videos import decode
        print(int(kth.load("walking", Path({str(root)!r})).frames.long().sum()))
        try: decode(Path("x.avi"))
        except DataError as error: print(error)
    """
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{int(videos.frames.long().sum())}\ndecoding videos needs PyAV")
    assert "cwy[video]" in done.stdout


def test_the_cache_follows_its_sources_and_a_damaged_one_is_named(root):
    first = kth.load("walking", root)
    path = root / "kth/walking/person13_walking_d1_uncomp.avi"
    path.unlink()
    assert kth.load("walking", root).sequences["validation"] == []
    write_video(path, 24)
    again = kth.load("walking", root)
    assert again.lengths("validation") == [5]
    assert torch.equal(again.frames[:14], first.frames[:14])
    cache = next((root / "frames").iterdir())
    assert isinstance(read(cache)[0], Videos)
    content = bytearray(cache.read_bytes())
    content[-1] ^= 1
    for damaged in (bytes(content), bytes(content[:-1]), b""):
        cache.write_bytes(damaged)
        with pytest.raises(DataError, match=r"kth-walking.safetensors is damaged.*Delete it"):
            kth.load("walking", root)


def test_names_and_bounds_of_the_cache_are_hashed_and_one_of_before_still_loads(tmp_path):
    path = tmp_path / "some.safetensors"
    frames = torch.arange(6 * 4, dtype=torch.uint8).view(6, 2, 2)
    videos = Videos(frames, {"train": [(0, 2), (2, 3)], "validation": [(3, 5)], "test": [(5, 6)]})
    write(path, videos, {"version": "1"})
    content = path.read_bytes()
    found, made_of = read(path)
    assert (found.sequences, made_of) == (videos.sequences, {"version": "1"})
    for old, new in ((b"[3, 5]", b"[3, 4]"), (b"train", b"tr41n"), (b"1", b"2")):
        path.write_bytes(content.replace(old, new, 1))
        with pytest.raises(DataError, match=r"some\.safetensors"):
            read(path)
    for spans, whole in (
        ([(3, 5)], True),
        ([(3, 7)], False),
        ([(-1, 5)], False),
        ([(5, 3)], False),
        ([("3", 5)], False),
    ):
        # As before, when only the frames had a hash.
        about = {
            "sequences": videos.sequences | {"validation": spans},
            "made_of": {},
            "sha256": _sha256(frames),
        }
        path.write_bytes(save({"frames": frames}, {"cwy": json.dumps(about)}))
        if whole:
            assert read(path)[0].sequences == videos.sequences
        else:
            with pytest.raises(DataError, match=r"some\.safetensors"):
                read(path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda path: write_video(path, 12),
            r"decodes to 12 frames, and its sequences in 00sequences.txt go to frame 16",
        ),
        (lambda path: write_video(path, 16, kept=0.6), r"decodes to \d+ frames"),
        (lambda path: path.write_bytes(b""), "can't be decoded"),
        (lambda path: path.write_bytes(b"RIFF, but no video" * 99), "can't be decoded"),
    ],
    ids=["short", "cut", "empty", "other"],
)
def test_a_video_with_fewer_frames_than_its_sequences_is_refused_by_name(damage, words, root):
    damage(root / "kth/walking/person02_walking_d1_uncomp.avi")
    with pytest.raises(DataError, match=f"person02_walking_d1_uncomp.avi {words}"):
        kth.load("walking", root)
    assert not kept("kth-walking")


def test_the_check_names_a_short_video_and_what_is_not_the_papers(root):
    write_video(root / "kth/walking/person02_walking_d1_uncomp.avi", 12)
    done = run(COMMAND, "data", "check", "kth", CWY_DATA=str(root))
    assert done.returncode == 1
    assert "person02_walking_d1_uncomp.avi decodes to 12 frames" in done.stdout
    assert "20122" in done.stdout, "the paper's number beside"
    assert "They are NOT the paper's. Left out: person01_boxing_d4" in done.stdout
    assert "3 of 3 videos are here, 2 of them whole" in done.stdout


def test_the_list_counts_the_videos_of_a_part(root):
    for action in kth.ACTIONS:
        (root / "kth" / action).mkdir(exist_ok=True)
    (root / "kth/walking/person20_walking_d4_uncomp.avi").unlink()
    assert "2 of 3 videos" in run(COMMAND, "data", "list", CWY_DATA=str(root)).stdout


def test_the_check_goes_through_every_set_without_a_decoder(root):
    code = "import sys; sys.modules['av'] = None; from cwy.cli import main; main()"
    done = run(sys.executable, "-c", code, "data", "check", CWY_DATA=str(root))
    assert (done.returncode, done.stderr) == (1, "")
    rows = dict(re.findall(r"^ (\w+) +NO +(\d+ of \d+ \w+)", done.stdout, re.MULTILINE))
    assert rows == {
        "mnist": "0 of 4 files",
        "kth": "0 of 3 videos",
        "weizmann": "0 of 90 files",
        "tatoeba": "0 of 1 files",
    }
    assert "PyAV" in done.stdout


def test_a_part_of_the_videos_is_not_called_complete(root, monkeypatch):
    monkeypatch.setenv("CWY_DATA", str(root))
    for action in kth.ACTIONS:
        (root / "kth" / action).mkdir(exist_ok=True)
    listed = kth.listed(root / "kth")
    told = io.StringIO()
    some = replace(DATASETS["kth"], files=DATASETS["kth"].files[1:])
    assert len(listed) == 3
    monkeypatch.setitem(DATASETS, "kth", some)
    monkeypatch.setattr(manage, "KTH", some)
    assert manage.fetch("kth", Console(file=told)), "all three are here"
    listed[0].path(root / "kth").unlink()
    assert not manage.fetch("kth", Console(file=told))
    assert "2 of 3 videos are here" in told.getvalue()


def test_frames_of_any_size_become_squares(tmp_path):
    write_video(tmp_path / "a.avi", 2, size=(96, 192))
    assert square(decode(tmp_path / "a.avi")).shape == (2, 128, 128)


def test_digits_move_in_straight_lines_and_bounce():
    digit = torch.zeros(1, 28, 28, dtype=torch.uint8)
    digit[0, 10:18, 10:18] = 255
    frames = moving.make(digit.view(1, -1), 5, seed=0)
    assert frames.shape == (5, 20, 64, 64)
    assert torch.equal(frames, moving.make(digit.view(1, -1), 5, seed=0))
    assert (frames.flatten(2).count_nonzero(-1) >= 64).all(), "a digit never leaves"
    assert (frames.flatten(2).count_nonzero(-1) <= 128).all()
    rows = torch.arange(64.0)
    centre = (frames.float().sum(-1) * rows).sum(-1) / frames.float().sum((-1, -2))
    assert 0 < centre.diff(dim=1).abs().max() <= 5.5


needs_kth = pytest.mark.skipif(
    not (DATASETS["kth"].folder() / kth.LIST).exists(), reason="needs KTH in CWY_DATA"
)


@needs_kth
def test_the_statistics_are_the_papers():
    found = kth.statistics(kth.listed(DATASETS["kth"].folder()))
    assert {
        name: {action: found[action][name] for action in kth.ACTIONS} for name in kth.PAPER
    } == kth.PAPER


@needs_kth
def test_the_real_videos_have_the_frames_of_their_ranges(tmp_path, monkeypatch):
    monkeypatch.setenv("CWY_FRAMES", str(tmp_path))
    folder = DATASETS["kth"].folder()
    here = list(kth.here(folder, "running"))
    if not here:
        pytest.skip("needs videos of running in CWY_DATA")
    videos = kth.load("running")
    expected = {
        split: [b - a + 1 for v in here if v.split == split for a, b in v.ranges]
        for split in kth.PERSONS
    }
    assert {split: videos.lengths(split) for split in videos.sequences} == expected
    assert 60 < videos.frames.float().mean() < 200


@pytest.mark.skipif(not DATASETS["weizmann"].folder().exists(), reason="needs Weizmann in CWY_DATA")
def test_weizmann(tmp_path, monkeypatch):
    monkeypatch.setenv("CWY_FRAMES", str(tmp_path))
    videos = weizmann.load("walk")
    assert {split: videos.lengths(split) for split in videos.sequences} == {
        "train": [84, 68, 101, 43, 88],
        "validation": [119, 50],
        "test": [111, 120],
    }
