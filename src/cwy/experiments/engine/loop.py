"""The training loop of every task."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch

from . import checkpoint, optimizers
from .clock import Clock
from .display import Display
from .distributed import Group
from .log import Log
from .meter import Diverged, Guard, Meter, all_finite
from .run import BEST, WEIGHTS, Folder, environment, now
from .signals import Stop
from .task import Better, Settings, load

WARN, LIMIT = 1e-4, 1e-2


class Stopped(Exception):
    """A signal asked the run to stop, and it is saved."""

    def __init__(self, signal: int, step: int) -> None:
        super().__init__(f"stopped at step {step}, and saved")
        self.status = 128 + signal


class Loop:
    """One run, from its settings to its record.

    Nothing of a run is written before its data and model are there, so that a mistake leaves no folder behind.

    Args:
        settings: of the run.
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
        self.model = self.task.model()
        self.optimizer = optimizers.build(self.model, self.config)
        self.meter, self.clock, self.step = Meter(self.device), Clock(), 0
        self.best: dict[str, Any] | None = None
        self.crossings: dict[str, int | None] = {f"{value:g}": None for value in self.task.crossings}
        self.final: dict[str, dict[str, float]] = {}
        self.started, self.read_at = now(), (0, 0.0)
        self.checked: tuple[int, float | None] = (-1, None)
        self.warned = False
        self.lock = None
        if group.first:
            if not folder.exists:
                folder.create(settings)
            self.lock = folder.lock()
        self._restore()
        self.log = Log(folder.path, self.step) if group.first else None
        self.guard = Guard(self.model.parameters(), self.device)

    def run(self) -> dict[str, Any]:
        """Trains to the end and returns the record, which lies in the folder too.

        Raises:
            Stopped: a signal came; the state is saved.
            Diverged: a loss or gradient was not finite (its step is not taken), or a weight no longer orthogonal.
        """
        total, period = self.task.iterations, self.config.evaluate_every or self.task.epoch or self.task.iterations
        if self.settings.compile:
            self.model.compile()
        model = self.group.wrap(self.model)
        self.display.begin(self.settings, self.step, total)
        try:
            with Stop() as stop:
                while self.step < total:
                    self._train(model)
                    last = self.step == total
                    if self.step % self.config.log_every == 0 or last:
                        self._read()
                    if self.step % period == 0 or last:
                        self._evaluate()
                    signal = self.group.agree_to_stop(stop.signal)
                    if (self.step % self.config.save_every == 0 or signal) and not last:
                        self._save()
                    if signal and not last:
                        raise Stopped(signal, self.step)
                return self._finish()
        except Diverged as error:
            path = self.folder.last_checkpoint()
            kept = f"The last good checkpoint is {path}." if path else "There is no checkpoint yet."
            raise Diverged(f"{error}: the run is stopped. {kept}") from None
        finally:
            self.display.end()
            if self.log is not None:
                self.log.close()
            if self.lock is not None:
                self.lock.close()

    def _train(self, model: torch.nn.Module) -> None:
        batch, weight = self.group.share(self.task.batch(self.step))
        rate = self.task.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate
        with self._autocast():
            loss, metrics = self.task.loss(model, batch)
        (loss if weight == 1 else loss * weight).backward()
        self.guard.screen(loss)
        metrics = {"loss": loss, **metrics, **self.task.watch(self.model)}
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.task.after_step(self.model, self.optimizer, self.step)
        self.meter.add(metrics, weight)
        if not self.clock.going:
            # The first step here compiles kernels: it is not timed.
            self._wait()
            self.clock.start()
            self.read_at = self.step, self.clock.seconds

    def _read(self) -> None:
        """Reads the metrics of the steps since the last reading: here the host waits for the device."""
        error = self._check()
        metrics = self.meter.read(self.group)
        if error is not None:
            metrics["orthogonality_error"] = error
        seconds = self.clock.seconds
        steps, before = self.step - self.read_at[0], self.read_at[1]
        if steps:
            metrics["step_ms"] = (seconds - before) / steps * 1e3
        self.read_at = self.step, seconds
        for text, step in self.crossings.items():
            if step is None and metrics["loss"] <= float(text):
                self.crossings[text] = self.step
        self.final["train"] = metrics
        self._write("train", metrics)

    def _check(self) -> float | None:
        """The orthogonality error; raises where a run can't go on. Waits for the device."""
        if self.checked[0] != self.step:
            self.guard.check(self.step, self.group)
            self.checked = self.step, optimizers.worst_orthogonality(self.model)
        error = self.checked[1]
        # Written so that a NaN stops the run.
        if error is not None and not error <= LIMIT:
            raise Diverged(f"the orthogonality error after step {self.step} is {error:.1e}, above {LIMIT:.0e}")
        if error is not None and error > WARN and not self.warned:
            self.warned = True
            self.display.say(f"Warning: the orthogonality error after step {self.step} is {error:.1e}, above {WARN:.0e}.")
        return error

    def _evaluate(self) -> None:
        self._check()
        with self.clock.stopped(), torch.no_grad(), self._autocast():
            self.model.eval()
            found = self.task.evaluate(self.model)
            self.model.train()
            for split, metrics in found.items():
                if not all(map(math.isfinite, metrics.values())):
                    raise Diverged(f"the {split} metrics at step {self.step} are not finite")
                self.final[split] = metrics
                self._write(split, metrics)
            if self.task.best is not None:
                self._keep_best(found, *self.task.best)

    def _keep_best(self, found: dict[str, dict[str, float]], split: str, metric: str, better: Better) -> None:
        value = found.get(split, {}).get(metric)
        if value is not None and (self.best is None or better(value, self.best["value"])):
            self.best = {"metric": f"{split} {metric}", "value": value, "step": self.step}
            if self.group.first:
                self._write_weights(BEST)

    def _write(self, split: str, metrics: dict[str, float]) -> None:
        if self.log is not None:
            epoch = {"epoch": self.step / self.task.epoch} if self.task.epoch else {}
            self.log.write(self.step, split, seconds=self.clock.seconds, **epoch, **metrics)
            self.display.show(self.step, split, metrics)

    def _write_weights(self, name: str) -> None:
        if not all_finite(self.model.state_dict()):
            raise Diverged(f"a weight is not finite after step {self.step}")
        self.folder.write_weights(name, self.model)

    def _save(self) -> None:
        self._check()
        with self.clock.stopped():
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "meter": self.meter.state_dict(self.group),
                "random": {name: self.group.gather(state) for name, state in self._random().items()},
                "seconds": self.clock.seconds,
                "started": self.started,
                "best": self.best,
                "crossings": self.crossings,
                "final": self.final,
            }
            if not all_finite(state):
                raise Diverged(f"a weight or what the optimiser remembers is not finite after step {self.step}")
            if self.log is not None:
                self.log.sync()
                checkpoint.save(self.folder.checkpoints, self.step, state)
            # A rank that leaves early would have torchrun end the one that writes.
            self.group.wait()

    def _restore(self) -> None:
        content = checkpoint.last(self.folder.checkpoints, self.display.say) if self.group.first else b""
        content = self.group.broadcast(content)
        if not content:
            return
        state = checkpoint.parse(content)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.meter.load_state_dict(state["meter"])
        rank = self.group.rank % len(state["random"]["cpu"])
        torch.set_rng_state(state["random"]["cpu"][rank])
        if "cuda" in state["random"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"][rank], self.device)
        self.step, self.clock, self.started = state["step"], Clock(state["seconds"]), state["started"]
        self.best, self.crossings, self.final = state["best"], state["crossings"], state["final"]
        self.read_at = self.step, self.clock.seconds

    def _finish(self) -> dict[str, Any]:
        record = {
            **environment(self.settings, self.device),
            "started": self.started,
            "status": "finished",
            "steps": self.step,
            "seconds": self.clock.seconds,
            "processes": self.group.size,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "final": self.final,
            "best": self.best,
        }
        if self.crossings:
            record["crossings"] = self.crossings
        if self.log is not None:
            self.log.sync()
            self._write_weights(WEIGHTS)
            self.folder.write_record(record)
        return record

    def _random(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16) if self.settings.precision == "bfloat16" else nullcontext()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
