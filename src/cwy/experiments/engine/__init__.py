"""The engine of every experiment.

A task is a subclass of :class:`~cwy.experiments.engine.task.Task` in a folder of its own, next to
this one. The folder's ``__init__`` lists it in ``TASKS``, and its name is added to ``HOMES`` in
``task.py``. It has:

- ``Config``, a frozen dataclass below :class:`~cwy.experiments.engine.config.Config`, and
  ``recipes``, functions ``method -> Config`` by name.
- ``model()``, ``iterations``, ``batch(step)``, ``loss(model, batch)``.
- It may have ``evaluate(model)``, ``watch(model)`` (metrics of the gradients), ``rate(step)`` (a
  schedule), ``after_step(...)`` and ``facts`` (of the data).
- It may have ``at_end(model)`` (with the last evaluation) and ``conclude(model)`` (at the end,
  with the best state).

``loop.Loop(settings, folder, group, display).run()`` trains one. ``runner`` starts what the
command line asks for, and ``listing`` prints tasks and runs. The parts of the loop are ``config``,
``monitor`` (metrics, time, divergence), ``checkpoint``, ``folder`` (of a run), ``signals``,
``optimizers``, ``distributed`` and ``display``.
"""
