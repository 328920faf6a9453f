"""The training loop of every task."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any

import torch
from torch import Tensor, nn

from ... import cudagraph
from . import optimizers
from .clock import Clock
from .config import blaming_settings
from .display import Display
from .distributed import Group
from .guard import Guard
from .log import Log
from .meter import Diverged, Meter, all_finite
from .record import environment, record
from .run import BEST, DIVERGED, WEIGHTS, Folder
from .signals import Interrupted, Stop, Stopped
from .state import State
from .task import Batch, Better, Settings, Task, load

PATIENCE = 2.0
"""Seconds: a first pass that took longer is the estimate, and there is no second."""


class Loop:
    """One run, from its settings to its record.

    Args:
        settings: of the run. Its data and model are made here, before anything is written: a mistake leaves no folder behind.
        folder: where it lies; if it holds a checkpoint, the run goes on from it.
        group: the processes.
        display: what is shown.
    """

    def __init__(self, settings: Settings, folder: Folder, group: Group, display: Display) -> None:
        self.settings, self.folder, self.group, self.display = settings, folder, group, display
        self.config, self.device = settings.config, group.device
        if self.device.type == "cuda":
            # float32 means float32, in the baselines' cuDNN too.
            torch.backends.cudnn.allow_tf32 = False
        self.task = load(settings.task)(settings, self.device)
        torch.manual_seed(settings.seed)
        with blaming_settings():
            self.model = self.task.model()
        if group.rank:
            # The weights are the same everywhere; what is drawn in training is not.
            torch.manual_seed(settings.seed + group.rank)
        self.optimizer = optimizers.build(self.model, self.config)
        self.meter, self.guard = Meter(self.device), Guard(self.model, self.device)
        self.state = State(
            settings.to_dict(), crossings={f"{value:g}": None for value in self.task.crossings}
        )
        # As it is now: the code may be changed while the run goes on.
        self.environment, self.clock = environment(settings, self.device), Clock()
        self.log: Log | None = None
        self.read_at, self.weight = (0, 0.0), 1.0
        self.stop = Stop()

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state.step

    def run(
        self, stop: Stop | None = None, leave: Callable[[], str] | None = None
    ) -> dict[str, Any]:
        """Trains to the end and returns the record, which lies in the folder too.

        Args:
            stop: what hears of signals.
            leave: for :meth:`Stop.ending` amid the first step; without it, a signal waits for the end of that step.

        Raises:
            Stopped: a signal came; the state is saved.
            Diverged: a loss or gradient was not finite (it never reaches the weights), or a weight no longer orthogonal.
        """
        self.stop = stop or self.stop
        first: AbstractContextManager[None] = nullcontext()
        if self.group.size == 1:  # several processes must stop at the same step
            self.task.heed = self.stop.heed
            first = self.stop.ending(leave) if leave else first
        with ExitStack() as opened:
            if self.group.first:
                opened.enter_context(self.folder.claim(self.settings))
            self._restore()
            if self.group.first:
                self.log = opened.enter_context(
                    closing(Log(self.folder.path, self.step, self.state.due))
                )
            self.display.begin(
                self.settings, self._unused(), self.step, self.task.iterations, self.task.facts
            )
            opened.callback(self.display.end)
            try:
                self._steps(first)
                return self._finish()
            except Diverged as error:
                path = self.folder.last_checkpoint()
                kept = (
                    f"The last good checkpoint is {path}."
                    if path
                    else "There is no checkpoint yet."
                )
                told = f"{error}: the run is stopped. {kept}"
                if self.group.first:
                    self.folder.write_file(DIVERGED, f"{told}\n".encode())
                raise Diverged(told) from None

    def _unused(self) -> set[str]:
        free = next(optimizers.constrained(self.model), None) is None
        return self.task.unused | ({"orthogonal_lr"} if free else set())

    def _steps(self, first: AbstractContextManager[None]) -> None:
        if self.settings.compile:
            self.model.compile()
        model = self.group.wrap(self.model)
        alone = self.device.type == "cuda" and self.group.size == 1 and not self.settings.compile
        wanted = alone and self.task.capturable
        train = cudagraph.capture(
            lambda *batch: self._step(model, batch),
            enabled=wanted,
            # A step that synchronizes, as torch's matrix exponential does, runs eagerly.
            on_failure=lambda error: self.optimizer.zero_grad(),
        )
        total, period = (
            self.task.iterations,
            self.config.evaluate_every or self.task.epoch or self.task.iterations,
        )
        foreseen = self.device.type != "cpu" or self.group.size > 1
        while self.step < total or self.state.due:
            last = self.step == total
            if not self.state.due:
                # The first step may compile for long.
                with first:
                    if not foreseen:
                        self._foresee(model)
                        foreseen = True
                    self._train(train)
                first, last = nullcontext(), self.step == total
                if self.step % self.config.log_every == 0 or last:
                    self._read()
                self.state.due = self.step % period == 0 or last
            with suppress(Interrupted):
                if self.state.due:
                    self._evaluate(last)
            done = last and not self.state.due
            signal = self.group.agree_to_stop(self.stop.signal)
            if (self.step % self.config.save_every == 0 or signal) and not done:
                self._save()
            if signal and not done:
                raise Stopped(signal, f"at step {self.step}, and saved", self.folder.path)

    def _foresee(self, model: nn.Module) -> None:
        """Tell how long the run will take, by the time of its first batch; nothing that the run depends on changes."""
        batch, _ = self.group.share(self.task.batch(self.step))
        seconds = 0.0
        with torch.random.fork_rng(devices=[]):
            # The first pass sets up what the others find.
            for _ in range(2):
                begin = time.perf_counter()
                with self._autocast():
                    loss, _ = self.task.loss(model, batch)
                loss.backward()
                seconds = time.perf_counter() - begin
                if seconds > PATIENCE:
                    break
        self.optimizer.zero_grad()
        self.display.foretell(self.settings, self.task.iterations - self.step, seconds)

    def _train(self, train: cudagraph.CapturedStep) -> None:
        batch, self.weight = self.group.share(self.task.batch(self.step))
        rate = self.task.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate
        train(*batch)
        self.meter.steps += 1
        self.state.step += 1
        self.task.after_step(self.model, self.optimizer, self.step)
        self.display.tick(self.step)
        if not self.clock.going and train.settled:
            # The first steps compile kernels and record a graph: they are not timed.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.clock.start()
            self.read_at = self.step, self.clock.seconds

    def _step(self, model: nn.Module, batch: Batch) -> None:
        """All of a step that happens on the device; nothing here waits for it."""
        with self._autocast():
            loss, metrics = self.task.loss(model, batch)
        (loss if self.weight == 1 else loss * self.weight).backward()
        self.guard.screen(loss)
        metrics = {"loss": loss, **metrics, **self.task.watch(self.model)}
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.meter.add(metrics, self.weight)

    def _read(self) -> None:
        """Reads the metrics of the steps since the last reading: here the host waits for the device."""
        error = self._check()
        metrics = self.meter.read(self.group)
        if error is not None:
            metrics["orthogonality_error"] = error
        (before, then), now = self.read_at, self.clock.seconds
        if self.step > before:
            metrics["step_ms"] = (now - then) / (self.step - before) * 1e3
        self.read_at = self.step, now
        for text, step in self.state.crossings.items():
            if step is None and metrics["loss"] <= float(text):
                self.state.crossings[text] = self.step
        self._write("train", metrics)

    def _check(self) -> float | None:
        return self.guard.check(self.step, self.group, self.display.say)

    def _evaluate(self, last: bool) -> None:
        self._check()
        self._note_memory()
        with self.clock.stopped():
            with self._evaluating():
                found = self.task.evaluate(self.model)
                for split, metrics in self.task.at_end(self.model).items() if last else ():
                    found.setdefault(split, {}).update(metrics)
            for split, metrics in found.items():
                if not all(map(math.isfinite, metrics.values())):
                    raise Diverged(f"the {split} metrics after step {self.step} are not finite")
                self._write(split, metrics)
            if self.task.best is not None:
                self._keep_best(found, *self.task.best)
            self.state.due = False

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad(), self._autocast():
            yield
        self.model.train()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _note_memory(self) -> None:
        """What training has taken; evaluating is not counted."""
        if self.device.type == "cuda":
            self.state.peak_memory = max(
                self.state.peak_memory, torch.cuda.max_memory_allocated(self.device)
            )

    def _keep_best(
        self, found: dict[str, dict[str, float]], split: str, metric: str, better: Better
    ) -> None:
        value = found.get(split, {}).get(metric)
        if value is not None and (
            self.state.best is None or better(value, self.state.best["value"])
        ):
            self.state.best = {"metric": f"{split} {metric}", "value": value, "step": self.step}
            self.state.weights = {
                name: part.to("cpu", copy=True) for name, part in self.model.state_dict().items()
            }
            self._write_weights(BEST, self.state.weights)

    def _write(self, split: str, metrics: dict[str, float]) -> None:
        self.state.final[split] = metrics
        if self.log is not None:
            epoch = {"epoch": self.step / self.task.epoch} if self.task.epoch else {}
            self.log.write(self.step, split, seconds=self.clock.seconds, **epoch, **metrics)
            self.display.show(self.step, split, metrics)

    def _write_weights(self, name: str, weights: dict[str, Tensor]) -> None:
        if not all_finite(weights):
            raise Diverged(f"a weight is not finite after step {self.step}")
        if self.group.first:
            self.folder.write_weights(name, weights)

    def _save(self) -> None:
        self._check()
        with self.clock.stopped():
            if self.log is not None:
                self.log.sync()
            self.state.seconds = self.clock.seconds
            self.state.save(self.folder, self.group, self.model, self.optimizer, self.meter)

    def _restore(self) -> None:
        parts = self.model, self.optimizer, self.meter
        if self.state.restore(
            self.folder, self.group, *parts, self.display.say, self.task.iterations
        ):
            self.clock = Clock(self.state.seconds)

    def _conclude(self) -> None:
        """What is done with the best state, once."""
        if self.state.best is None or type(self.task).conclude is Task.conclude:
            return
        # A run that ends in here evaluates again: what it had logged of this step is dropped.
        self.state.due = True
        self._save()
        if not self.group.first:
            return
        self.model.load_state_dict(self.state.weights)
        try:
            with self.clock.stopped(), self._evaluating():
                found, made = self.task.conclude(self.model)
        except Interrupted:
            raise Stopped(
                self.stop.signal, f"at step {self.step}, and saved", self.folder.path
            ) from None
        for split, metrics in found.items():
            self._write(split, metrics)
        for name, content in made.items():
            self.folder.write_file(name, content)

    def _finish(self) -> dict[str, Any]:
        self._write_weights(WEIGHTS, self.model.state_dict())
        if self.state.weights:
            self._write_weights(BEST, self.state.weights)
        self._conclude()
        self.state.seconds = self.clock.seconds
        parameters = sum(p.numel() for p in self.model.parameters())
        made = record(self.environment, self.state, self.group.size, parameters, self.task.facts)
        if self.log is not None:
            self.log.sync()
            self.folder.write_record(made)
            (self.folder.path / DIVERGED).unlink(missing_ok=True)
        return made

    def _autocast(self):
        return (
            torch.autocast(self.device.type, torch.bfloat16)
            if self.settings.precision == "bfloat16"
            else nullcontext()
        )
