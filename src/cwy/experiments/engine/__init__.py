"""The engine of every experiment.

A task is a subclass of :class:`~cwy.experiments.engine.task.Task` in a folder of its own, beside this one, whose
``__init__`` lists it in ``TASKS``; its name is added to ``HOMES`` in ``task.py``. It says:

- ``Config``, a frozen dataclass below :class:`~cwy.experiments.engine.config.Config`, and ``recipes``, functions
  ``method -> Config`` by name;
- ``model()``, ``iterations``, ``batch(step)``, ``loss(model, batch)``; and, where it needs them, ``evaluate(model)``,
  ``watch(model)`` (metrics of the gradients), ``rate(step)`` (a schedule), ``after_step(...)``, ``at_end(model)`` (with the
  last evaluation), ``conclude(model)`` (at the end, with the best state), ``facts`` (of the data).

``loop.Loop(settings, folder, group, display).run()`` trains one; the rest are its parts: config, checkpoint, log, run
(the folder), record, state, guard, signals, streams, distributed. ``command`` is what the command line calls.
"""
