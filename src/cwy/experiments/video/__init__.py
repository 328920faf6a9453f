"""One-step-ahead video prediction: KTH, Weizmann and Moving MNIST."""

from .task import KTH, MovingMNIST, Weizmann

TASKS = (KTH, Weizmann, MovingMNIST)
