"""The training loop of every task."""

from __future__ import annotations

import gc
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
from .checkpoint import Parts, State, environment
from .config import blaming_settings
from .display import Display
from .distributed import Group
from .folder import BEST, DIVERGED, WEIGHTS, Folder, Log
from .monitor import Clock, Diverged, Guard, Meter, all_finite
from .signals import Interrupted, Stop, Stopped
from .task import Batch, Best, Settings, Task, load

PATIENCE = 2.0
"""Seconds. A first pass that took longer is the estimate, and there is no second one."""


class Loop:
    """Train one run, from its settings to its record.

    Data and model are made here, before anything is written. A mistake leaves no folder behind.

    Args:
        settings: of the run.
        folder: where it lies. If it holds a checkpoint, the run continues from it.
        group: the processes.
        display: shows the progress.
    """

    def __init__(self, settings: Settings, folder: Folder, group: Group, display: Display) -> None:
        self.settings = settings
        self.folder = folder
        self.group = group
        self.display = display
        self.config = settings.config
        self.device = group.device
        if self.device.type == "cuda":
            # float32 means float32, in the baselines' cuDNN too.
            torch.backends.cudnn.allow_tf32 = False
        self.task = load(settings.task)(settings, self.device)
        torch.manual_seed(settings.seed)
        with blaming_settings():
            self.model = self.task.model()
        if self.device.type == "cuda":
            # What a run before this one left in the process does not count.
            gc.collect()
            torch.cuda.reset_peak_memory_stats(self.device)
        if group.rank:
            # All ranks have the same weights. What they draw in training differs.
            torch.manual_seed(settings.seed + group.rank)
        self.optimizer = optimizers.build(self.model, self.config)
        self.meter = Meter(self.device)
        self.guard = Guard(self.model, self.optimizer, self.device)
        crossings: dict[str, int | None] = {f"{value:g}": None for value in self.task.crossings}
        self.state = State(settings.to_dict(), crossings=crossings)
        # As it is now, because the code may change during the run.
        self.environment = environment(settings, self.device)
        self.clock = Clock()
        self.log: Log | None = None
        self.weight = 1.0
        self.last_read_step = 0
        self.last_read_seconds = 0.0
        self.stop = Stop()

    @property
    def step(self) -> int:
        """Return the number of steps done."""
        return self.state.step

    def run(
        self, stop: Stop | None = None, leave: Callable[[], str] | None = None
    ) -> dict[str, Any]:
        """Train to the end and return the record, which is written to the folder too.

        Args:
            stop: hears of signals.
            leave: for :meth:`Stop.ending` inside the first step. Otherwise a signal waits for
                the end of that step.

        Raises:
            Stopped: a signal came. The state is saved.
            Diverged: a loss or gradient was not finite, or a weight is no longer orthogonal.
                Such a gradient never reaches the weights.
        """
        self.stop = stop or self.stop
        first: AbstractContextManager[None] = nullcontext()
        if self.group.size == 1:  # several processes must stop at the same step
            self.task.heed = self.stop.heed
            if leave:
                first = self.stop.ending(leave)
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
            self._warn_of_warmup()
            try:
                self._steps(first)
                return self._finish()
            except Diverged as error:
                raise self._explained(error) from None

    def _explained(self, error: Diverged) -> Diverged:
        """Return the error with the last good checkpoint, and write it to the folder."""
        path = self.folder.last_checkpoint()
        kept = "There is no checkpoint yet."
        if path:
            kept = f"The last good checkpoint is {path}."
        message = (
            f"{error}: the run is stopped. {kept} A lower lr, a clip or a longer warmup may help, "
            "in another folder."
        )
        if self.group.first:
            self.folder.write_file(DIVERGED, f"{message}\n".encode())
        return Diverged(message)

    def _warn_of_warmup(self) -> None:
        """Print a warning if the run ends before its warm-up does."""
        warmup = self.config.warmup
        steps = self.task.iterations
        if warmup is not None and warmup > steps:
            self.display.say(
                f"Warning: warmup={warmup} is longer than the run, which has {steps} steps. The "
                f"learning rates only reach {100 * steps // warmup}% of what is set. Choose a "
                "smaller warmup, or warmup=none."
            )

    def _unused(self) -> set[str]:
        unused = set(self.task.unused)
        if not optimizers.is_constrained(self.model):
            unused.add("orthogonal_lr")
        return unused

    def _steps(self, first: AbstractContextManager[None]) -> None:
        if self.settings.compile:
            self.model.compile()
        model = self.group.wrap(self.model)
        plain = self.device.type == "cuda" and self.group.size == 1 and not self.settings.compile
        train = cudagraph.capture(
            lambda *batch: self.take_step(model, batch),
            enabled=plain and self.task.capturable,
            # A step that synchronizes, as torch's matrix exponential does, runs eagerly.
            on_failure=self._uncaptured,
        )
        estimated = self.device.type != "cpu" or self.group.size > 1
        while not self._has_ended or self.state.due:
            if not self.state.due:
                # The first step may compile for long.
                with first:
                    if not estimated:
                        self._estimate(model)
                        estimated = True
                    self._train(train)
                first = nullcontext()
                last = self.step == self.task.iterations
                self.state.due = self.step % self._period == 0 or last
                # With patience the run may end here.
                may_end = self.state.due and self.config.patience is not None
                if self.step % self.config.log_every == 0 or last or may_end:
                    self._read()
            with suppress(Interrupted):
                if self.state.due:
                    self._evaluate()
            done = self._has_ended and not self.state.due
            if done and self.step < self.task.iterations:
                self.display.say(
                    "The run ends here. Evaluations in a row that were not better than the best "
                    f"one: {self.config.patience} (patience)."
                )
            signal = self.group.agree_to_stop(self.stop.signal)
            if (self.step % self.config.save_every == 0 or signal) and not done:
                self._save()
            if signal and not done:
                raise Stopped(signal, f"at step {self.step}, and saved", self.folder.path)

    @property
    def _period(self) -> int:
        """Return the steps between two evaluations."""
        return self.config.evaluate_every or self.task.epoch or self.task.iterations

    @property
    def _has_ended(self) -> bool:
        """Return whether no step is left, or too many evaluations were not better."""
        if self.step == self.task.iterations:
            return True
        best = self.state.best
        if best is None or self.config.patience is None:
            return False
        return self.step - best["step"] >= self.config.patience * self._period

    def _uncaptured(self, error: cudagraph.CaptureError) -> None:
        """Drop the gradients of a capture that failed, and print why it did."""
        self.optimizer.zero_grad()
        self.display.say(f"The steps run without a CUDA graph: {error}")

    def _estimate(self, model: nn.Module) -> None:
        """Print how long the run will take, by the time of its first batch.

        The run's numbers do not depend on it.
        """
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
        self.display.estimate(self.settings, self.task.iterations - self.step, seconds)

    def _train(self, train: cudagraph.CapturedStep) -> None:
        batch, self.weight = self.group.share(self.task.batch(self.step))
        optimizers.set_rates(self.optimizer, self.task.rate(self.step))
        train(*batch)
        self.meter.steps += 1
        self.state.step += 1
        self.task.after_step(self.model, self.optimizer, self.step)
        self.display.tick(self.step)
        if not self.clock.going and train.settled:
            # The first steps compile kernels and capture a graph: they are not timed.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.clock.start()
            self.last_read_step = self.step
            self.last_read_seconds = self.clock.seconds

    def take_step(self, model: nn.Module, batch: Batch) -> None:
        """Take the part of a step that happens on the device. It does not synchronize."""
        with self._autocast():
            loss, metrics = self.task.loss(model, batch)
        weighted = loss
        if self.weight != 1:
            weighted = loss * self.weight
        weighted.backward()
        metrics = {"loss": loss, **metrics, **self.task.watch(self.model)}
        checked = loss
        if self.config.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            # An infinite norm clips finite gradients to zero.
            checked = loss + norm
        # After the clipping, by which one NaN reaches all gradients.
        self.guard.screen(checked)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.meter.add(metrics, self.weight)

    def _read(self) -> None:
        """Read the metrics since the last reading. The call synchronizes with the host."""
        error = self._check()
        metrics = self.meter.read(self.group)
        if error is not None:
            metrics["orthogonality_error"] = error
        now = self.clock.seconds
        steps = self.step - self.last_read_step
        if steps > 0:
            metrics["step_ms"] = (now - self.last_read_seconds) / steps * 1e3
        self.last_read_step = self.step
        self.last_read_seconds = now
        for text, step in self.state.crossings.items():
            if step is None and metrics["loss"] <= float(text):
                self.state.crossings[text] = self.step
        self._write("train", metrics)

    def _check(self) -> float | None:
        return self.guard.check(self.step, self.group, self.display.say)

    def _evaluate(self) -> None:
        self._check()
        self._note_memory()
        with self.clock.stopped():
            with self._evaluating():
                found = self.task.evaluate(self.model)
            self._check_metrics(found)
            if self.task.best is not None:
                self._keep_best(found, self.task.best)
            if self._has_ended:
                with self._evaluating():
                    added = self.task.at_end(self.model)
                self._check_metrics(added)
                for split, metrics in added.items():
                    found.setdefault(split, {}).update(metrics)
            for split, metrics in found.items():
                self._write(split, metrics)
            self.state.due = False

    def _check_metrics(self, found: dict[str, dict[str, float]]) -> None:
        """Raise if a metric is not finite."""
        for split, metrics in found.items():
            for name, value in metrics.items():
                if not math.isfinite(value):
                    raise Diverged(f"the {split} metric {name} is {value} after step {self.step}")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad(), self._autocast():
            yield
        self.model.train()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _note_memory(self) -> None:
        """Remember the peak memory of training. Evaluations are not counted."""
        if self.device.type == "cuda":
            self.state.peak_memory = max(
                self.state.peak_memory, torch.cuda.max_memory_allocated(self.device)
            )

    def _keep_best(self, found: dict[str, dict[str, float]], by: Best) -> None:
        value = found.get(by.split, {}).get(by.metric)
        if value is None:
            return
        # Rounding differs between ranks, which must end at one step.
        value = float(self.group.broadcast(repr(value).encode()))
        if self.state.best is not None and not by.better(value, self.state.best["value"]):
            return
        name = f"{by.split} {by.metric}"
        self.state.best = {"metric": name, "value": value, "step": self.step}
        self.state.weights = {
            name: part.to("cpu", copy=True) for name, part in self.model.state_dict().items()
        }
        self._write_weights(BEST, self.state.weights)

    def _write(self, split: str, metrics: dict[str, float]) -> None:
        self.state.final[split] = metrics
        if self.log is None:
            return
        times = {"seconds": self.clock.seconds}
        if self.task.epoch:
            times["epoch"] = self.step / self.task.epoch
        self.log.write(self.step, split, **times, **metrics)
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
            self.state.save(self.folder.checkpoints, self.group, self._parts())

    def _restore(self) -> None:
        restored = self.state.restore(
            self.folder.checkpoints,
            self.group,
            self._parts(),
            self.task.iterations,
            self.display.say,
        )
        if restored:
            self.clock = Clock(self.state.seconds)

    def _parts(self) -> Parts:
        return Parts(self.model, self.optimizer, self.meter)

    def _conclude(self) -> None:
        """Let the task conclude with the best state, once."""
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
            self._check_metrics(found)
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
        record = self.state.record(
            self.environment,
            processes=self.group.size,
            parameters=parameters,
            data=self.task.facts,
        )
        if self.log is not None:
            self.log.sync()
            self.folder.write_record(record)
            (self.folder.path / DIVERGED).unlink(missing_ok=True)
        return record

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.precision == "bfloat16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()
