"""Videos as one array of gray frames: decoded once, kept with hashes, read without a decoder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ... import _atomic
from .fetch import DataError, digest
from .folders import frames_root

VERSION = "1"
"""The version of how frames are made. A cache of another version is made again."""
SIDE = 128
SPLITS = ("train", "validation", "test")

Span = tuple[int, int]


@dataclass(frozen=True)
class Videos:
    """Hold sequences of frames.

    Attributes:
        frames: uint8 ``(F, H, W)``, all sequences one after another.
        sequences: where the sequences of each split start and stop among the frames.
    """

    frames: Tensor
    sequences: dict[str, list[Span]]

    def lengths(self, split: str) -> list[int]:
        """Return the number of frames of each sequence."""
        return [stop - start for start, stop in self.sequences[split]]


def kept(name: str) -> bool:
    """Return whether decoded videos of this name are in the cache."""
    return _path(name).exists()


def cached(name: str, sources: Mapping[str, Path], make: Callable[[], Videos]) -> Videos:
    """Return the videos that ``make`` decodes, from the cache if it was made of the same files.

    Args:
        name: of the file in :func:`~.folders.frames_root`.
        sources: every file that the frames are made of. If empty, the cache is taken as it is.
        make: decodes the sources.
    """
    path = _path(name)
    of = {key: digest(source) for key, source in sources.items()}
    if path.exists():
        videos, made_of = read(path)
        if not sources or made_of == {"version": VERSION, "sources": of}:
            return videos
    videos = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, videos, {"version": VERSION, "sources": of})
    except OSError as error:
        raise DataError(
            f"cannot keep decoded videos at {path}: {error}. Set CWY_FRAMES to a folder for them."
        ) from error
    return videos


def write(path: Path, videos: Videos, made_of: dict) -> None:
    """Write videos to a file, with their hash and the sources that they are made of."""
    from safetensors.torch import save

    frames = videos.frames.contiguous()
    about = {"sequences": videos.sequences, "made_of": made_of, "sha256": _sha256(frames)}
    about["digest"] = _digest(about, frames)
    _atomic.write(path, save({"frames": frames}, {"cwy": json.dumps(about)}))


def read(path: Path) -> tuple[Videos, dict]:
    """Return the videos in a file and what they are made of. A damaged file raises by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["cwy"])
            frames = file.get_tensor("frames")
        if _sha256(frames) != about["sha256"]:
            raise ValueError("its frames are not those of its hash")
        # A cache that was made before there was such a hash has none.
        if about.get("digest", _digest(about, frames)) != _digest(about, frames):
            raise ValueError("its names and bounds are not those of its hash")
        videos = Videos(
            frames, {split: _spans(about["sequences"][split], frames) for split in SPLITS}
        )
        return videos, about["made_of"]
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OSError,
    ) as error:
        raise DataError(
            f"{path} is damaged: {error}. Delete it to decode the videos again."
        ) from None


def decode(path: Path) -> Tensor:
    """Return every frame of a video in gray, uint8 ``(F, H, W)``. Damaged videos raise."""
    try:
        import av
    except ImportError:
        raise DataError(
            'decoding videos needs PyAV. To install:\n\n    pip install "cwy[video]"\n\n'
            "Or decode them elsewhere (`cwy data decode`), "
            "and set CWY_FRAMES to a copy of the folder with the frames."
        ) from None
    import numpy as np

    try:
        with av.open(str(path)) as video:
            gray = [frame.to_ndarray(format="gray") for frame in video.decode(video=0)]
    except (av.FFmpegError, IndexError) as error:
        raise DataError(f"{path} can't be decoded: {error}. Get it anew.") from error
    if not gray:
        raise DataError(f"{path} has no frames. Get it anew.")
    return torch.from_numpy(np.stack(gray))


def square(frames: Tensor) -> Tensor:
    """Resize the middle square of each frame to SIDE x SIDE, bilinearly."""
    height, width = frames.shape[-2:]
    side = min(height, width)
    top = (height - side) // 2
    left = (width - side) // 2
    cut = frames[:, top : top + side, left : left + side]
    resized = interpolate(cut[:, None].float(), (SIDE, SIDE), mode="bilinear", align_corners=False)
    return resized[:, 0].round_().to(torch.uint8)


def assemble(parts: dict[str, list[Tensor]]) -> Videos:
    """Return the sequences of each split, one after another."""
    frames: list[Tensor] = []
    sequences: dict[str, list[Span]] = {}
    start = 0
    for split, theirs in parts.items():
        sequences[split] = []
        for part in theirs:
            stop = start + len(part)
            frames.append(part)
            sequences[split].append((start, stop))
            start = stop
    return Videos(torch.cat(frames), sequences)


def _path(name: str) -> Path:
    return frames_root() / f"{name}.safetensors"


def _spans(found: list[list[int]], frames: Tensor) -> list[Span]:
    """Check where sequences start and stop: in order, and among the frames."""
    if frames.dim() != 3 or frames.dtype != torch.uint8:
        raise ValueError("its frames are no gray images")
    spans = []
    for start, stop in found:
        if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= len(frames):
            raise ValueError(
                f"a sequence goes from {start} to {stop}, and there are {len(frames)} frames"
            )
        spans.append((start, stop))
    return spans


def _digest(about: dict, frames: Tensor) -> str:
    """Hash the names, the bounds, the shape and the hash of the frames."""
    named = [about["sequences"], about["made_of"], list(frames.shape), about["sha256"]]
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _sha256(frames: Tensor) -> str:
    return hashlib.sha256(frames.numpy().data).hexdigest()
