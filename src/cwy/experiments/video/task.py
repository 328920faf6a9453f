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
from ..engine.task import Batch, Settings, Task
from .model import SHRINK, Predictor
from .pictures import STRIP, strip
from .recipes import KTH_RECIPES, METHODS, MOVING_RECIPES, WEIZMANN_RECIPES, VideoConfig

SHOWN = 16
"""Frames of a prediction that is kept to be looked at."""


class Video(Task[VideoConfig]):
    """Every frame but the first of a sequence is predicted from those before it; the loss is l1 over a frame, mean over frames.

    The frames lie on the device as bytes. Every epoch sees each training sequence once, in an order drawn by the seed. A batch
    is padded with zeros to its longest sequence, and from there to a multiple of ``bucket`` steps.
    """

    Config = VideoConfig
    best = ("validation", "loss", operator.lt)
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
        if videos.frames.shape[-1] % SHRINK:
            raise ConfigError(
                f"the side of a frame must be a multiple of {SHRINK}, got {videos.frames.shape[-1]}."
            )
        self.videos, self.frames = videos, videos.frames.to(device)
        self._order: tuple[int, list[int]] = -1, []

    @staticmethod
    @abstractmethod
    def load(action: str) -> Videos:
        """The videos of an action."""

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
        config, backend = self.config, "reference" if self.config.eager else "auto"
        return Predictor(
            self.settings.method, config.channels, config.kernel_size, self.dtype, backend
        ).to(self.device)

    @property
    def capturable(self) -> bool:
        return super().capturable and not self.config.eager

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.epoch)
        if self._order[0] != epoch:
            random = self.generator("epoch", epoch, device="cpu")
            self._order = (
                epoch,
                torch.randperm(len(self.videos.sequences["train"]), generator=random).tolist(),
            )
        size = self.config.batch_size
        return self._gather("train", self._order[1][index * size : (index + 1) * size])

    def _gather(self, split: str, chosen: list[int]) -> Batch:
        """Frames ``(B, T, S, S)``, the number of frames of each, and its share: B over the predictions of the whole batch."""
        spans = [self.videos.sequences[split][i] for i in chosen]
        lengths = [stop - start for start, stop in spans]
        steps = 1 + math.ceil((max(lengths) - 1) / self.config.bucket) * self.config.bucket
        starts, length = (
            torch.tensor(v).to(self.device, non_blocking=True)
            for v in ([a for a, _ in spans], lengths)
        )
        at = torch.arange(steps, device=self.device)
        inside = at < length[:, None]
        frames = self.frames[torch.where(inside, starts[:, None] + at, 0)] * inside[..., None, None]
        share = torch.full(
            (len(chosen),),
            len(chosen) / (sum(lengths) - len(lengths)),
            dtype=self.dtype,
            device=self.device,
        )
        return frames, length, share

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        frames, length, share = batch
        seen = frames.to(self.dtype) / 255
        error = (model(seen[:, :-1]) - seen[:, 1:]).abs().sum((-2, -1))
        counted = torch.arange(1, frames.shape[1], device=frames.device) < length[:, None]
        return ((error * counted).sum(1) * share).mean(), {}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        return {"validation": self._over(model, "validation")}

    def conclude(self, model: nn.Module) -> tuple[dict[str, dict[str, float]], dict[str, bytes]]:
        """Predicts the test persons by the best state, and keeps some frames to be looked at."""
        split = "test" if self.videos.sequences["test"] else "validation"
        return {split: self._over(model, split)} if split == "test" else {}, {
            STRIP: self._strip(model, split)
        }

    def _over(self, model: nn.Module, split: str) -> dict[str, float]:
        """The loss over all frames of a split; sequences of like length go together."""
        lengths, size = self.videos.lengths(split), self.config.test_batch_size
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with cudagraph.suspended():
            for chosen in (order[i : i + size] for i in range(0, len(order), size)):
                self.heed()
                loss, _ = self.loss(model, self._gather(split, chosen))
                total += loss.double() * sum(lengths[i] - 1 for i in chosen)
        return {"loss": (total / (sum(lengths) - len(lengths))).item()}

    def _strip(self, model: nn.Module, split: str) -> bytes:
        """True and predicted frames from the middle of the first sequence."""
        self.heed()
        frames, length, _ = self._gather(split, [0])
        predicted = model(frames[:, :-1].to(self.dtype) / 255)[0].clamp(0, 1) * 255
        first = max(0, (int(length) - 1 - SHOWN) // 2)
        shown = slice(first, min(first + SHOWN, int(length) - 1))
        return strip(frames[0, 1:][shown].cpu(), predicted[shown].round().to(torch.uint8).cpu())


class KTH(Video):
    """KTH: persons 1–12 train, 13–16 validate, 17–25 test; of the videos that are here."""

    name = "kth"
    recipes = KTH_RECIPES
    actions = kth.ACTIONS
    load = staticmethod(kth.load)

    @property
    def facts(self) -> dict[str, Any]:
        whole = sum(kth.PAPER[split][self.config.action] for split in SPLITS)
        return super().facts | {"part": f"{len(self.frames) / whole:.1%} of the set's frames"}


class Weizmann(Video):
    """Weizmann: five persons train, two validate, two test."""

    name = "weizmann"
    recipes = WEIZMANN_RECIPES
    actions = weizmann.ACTIONS
    load = staticmethod(weizmann.load)


class MovingMNIST(Video):
    """Two digits that move."""

    name = "movingmnist"
    recipes = MOVING_RECIPES
    actions = ("all",)

    @staticmethod
    def load(action: str) -> Videos:
        return moving.load()
