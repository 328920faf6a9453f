"""One-step-ahead video prediction."""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ... import cudagraph
from ..data import kth, moving, weizmann
from ..data.videos import SPLITS, Videos
from ..engine.config import ConfigError, choose
from ..engine.task import Batch, Best, Settings, Task
from .model import SHRINK, Predictor
from .pictures import STRIP, strip
from .recipes import KTH_RECIPES, METHODS, MOVING_RECIPES, WEIZMANN_RECIPES, VideoConfig

SHOWN = 16
"""Frames of the prediction that a run keeps as a picture."""


class Video(Task[VideoConfig]):
    """Predict every frame but the first of a sequence from those before it.

    The loss is l1 over a frame, averaged over frames. The frames lie on the device as bytes. Every
    epoch sees each training sequence once, in an order drawn by the seed. A batch is padded with
    zeros to its longest sequence, and from there to a multiple of ``bucket`` steps.
    """

    Config = VideoConfig
    best = Best("validation", "loss", better=operator.lt)
    actions: ClassVar[tuple[str, ...]]
    config: VideoConfig

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        choose(f"action of {self.name}", self.config.action, self.actions)
        videos = self.load(self.config.action)
        missing = [split for split in SPLITS[:2] if not videos.sequences[split]]
        if missing:
            raise ConfigError(
                f"no {' or '.join(missing)} videos of {self.name}/{self.config.action} are here."
            )
        side = videos.frames.shape[-1]
        if side % SHRINK:
            raise ConfigError(f"the side of a frame must be a multiple of {SHRINK}, got {side}.")
        self.videos = videos
        self.frames = videos.frames.to(device)
        self._shuffled_epoch = -1
        self._order: list[int] = []

    @staticmethod
    @abstractmethod
    def load(action: str) -> Videos:
        """Load the videos of an action."""

    @classmethod
    def methods(cls) -> list[str]:
        return list(METHODS)

    @property
    def epoch(self) -> int:
        return math.ceil(len(self.videos.sequences["train"]) / self.config.batch_size)

    @property
    def iterations(self) -> int:
        return self.config.epochs * self.epoch

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "sequences": [len(self.videos.sequences[split]) for split in SPLITS],
            "frames": [sum(self.videos.lengths(split)) for split in SPLITS],
        }

    def model(self) -> Predictor:
        backend = "auto"
        if self.config.eager:
            backend = "reference"
        model = Predictor(
            self.settings.method,
            self.config.channels,
            self.config.kernel_size,
            self.dtype,
            backend,
        )
        return model.to(self.device)

    @property
    def capturable(self) -> bool:
        return super().capturable and not self.config.eager

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.epoch)
        if self._shuffled_epoch != epoch:
            generator = self.generator("epoch", epoch, device="cpu")
            count = len(self.videos.sequences["train"])
            self._order = torch.randperm(count, generator=generator).tolist()
            self._shuffled_epoch = epoch
        size = self.config.batch_size
        return self._gather("train", self._order[index * size : (index + 1) * size])

    def _gather(self, split: str, chosen: list[int]) -> Batch:
        """Return the chosen sequences as a batch.

        Returns:
            Frames ``(B, T, S, S)``, the frames of each sequence ``(B,)``, and weights ``(B,)``: B
            over the number of predictions in the batch.
        """
        spans = [self.videos.sequences[split][i] for i in chosen]
        starts = [start for start, _ in spans]
        lengths = [stop - start for start, stop in spans]
        steps = 1 + math.ceil((max(lengths) - 1) / self.config.bucket) * self.config.bucket
        first = torch.tensor(starts).to(self.device, non_blocking=True)
        length = torch.tensor(lengths).to(self.device, non_blocking=True)
        at = torch.arange(steps, device=self.device)
        inside = at < length[:, None]
        places = torch.where(inside, first[:, None] + at, 0)
        frames = self.frames[places] * inside[..., None, None]
        share = len(chosen) / (sum(lengths) - len(lengths))
        weight = torch.full((len(chosen),), share, dtype=self.dtype, device=self.device)
        return frames, length, weight

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        frames, length, weight = batch
        pixels = frames.to(self.dtype) / 255
        error = (model(pixels[:, :-1]) - pixels[:, 1:]).abs().sum((-2, -1))
        counted = torch.arange(1, frames.shape[1], device=frames.device) < length[:, None]
        return ((error * counted).sum(1) * weight).mean(), {}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        return {"validation": self._over(model, "validation")}

    def conclude(self, model: nn.Module) -> tuple[dict[str, dict[str, float]], dict[str, bytes]]:
        """Evaluate the best state on the test part, and keep some of its frames as a picture.

        The picture is of the validation part if there is no test part.
        """
        if not self.videos.sequences["test"]:
            return {}, {STRIP: self._strip(model, "validation")}
        return {"test": self._over(model, "test")}, {STRIP: self._strip(model, "test")}

    def _over(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the loss over all frames of a split, in batches of similar length."""
        lengths = self.videos.lengths(split)
        size = self.config.test_batch_size
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with cudagraph.suspended():
            for start in range(0, len(order), size):
                chosen = order[start : start + size]
                self.heed()
                loss, _ = self.loss(model, self._gather(split, chosen))
                total += loss.double() * sum(lengths[i] - 1 for i in chosen)
        return {"loss": (total / (sum(lengths) - len(lengths))).item()}

    def _strip(self, model: nn.Module, split: str) -> bytes:
        """Return true and predicted frames from the middle of the first sequence as a PNG."""
        self.heed()
        frames, length, _ = self._gather(split, [0])
        predicted = model(frames[:, :-1].to(self.dtype) / 255)[0].clamp(0, 1) * 255
        first = max(0, (int(length) - 1 - SHOWN) // 2)
        shown = slice(first, min(first + SHOWN, int(length) - 1))
        return strip(frames[0, 1:][shown].cpu(), predicted[shown].round().to(torch.uint8).cpu())


class KTH(Video):
    """Predict the next frame of KTH videos: persons 1–12 train, 13–16 validate, 17–25 test."""

    name = "kth"
    recipes = KTH_RECIPES
    actions = kth.ACTIONS
    load = staticmethod(kth.load)

    @property
    def facts(self) -> dict[str, Any]:
        whole = sum(kth.PAPER[split][self.config.action] for split in SPLITS)
        return super().facts | {"part": f"{len(self.frames) / whole:.1%} of the set's frames"}


class Weizmann(Video):
    """Predict the next frame of Weizmann videos: five persons train, two validate, two test."""

    name = "weizmann"
    recipes = WEIZMANN_RECIPES
    actions = weizmann.ACTIONS
    load = staticmethod(weizmann.load)


class MovingMNIST(Video):
    """Predict the next frame of two moving digits."""

    name = "movingmnist"
    recipes = MOVING_RECIPES
    actions = ("all",)

    @staticmethod
    def load(action: str) -> Videos:
        return moving.load()
