"""MNIST pixel by pixel, plain and permuted."""

from .task import PermutedPixels, Pixels

TASKS = (Pixels, PermutedPixels)
