"""The tasks' data: what is asked is what is answered, drawn by the seed alone."""

import math

import pytest
import torch
from numpy.random import RandomState
from torch import nn

import cwy
from cwy.experiments.data.mnist import Mnist
from cwy.experiments.engine import task
from cwy.experiments.mnist.task import mnist

CPU = torch.device("cpu")


def make(what, method="cwy", seed=0, **settings):
    texts = tuple(f"{key}={value}" for key, value in settings.items())
    chosen = task.settings(what, method, seed, texts)
    return task.load(chosen.task)(chosen, CPU)


class Oracle(nn.Module):
    """Answers from the input alone, as a perfect memory would; keeps what it was shown."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        self.seen = x
        return self.answer(x)


def test_copying_asks_for_the_ten_symbols_after_the_cue():
    copying = make("copying/small", T=17, batch_size=5)

    def recall(x):
        y = torch.zeros_like(x)
        y[-10:] = x[:10]
        return 50.0 * nn.functional.one_hot(y, 9)

    oracle = Oracle(recall)
    loss, metrics = copying.loss(oracle, copying.batch(3))
    x = oracle.seen
    assert x.shape == (37, 5)
    assert ((x[:10] >= 1) & (x[:10] <= 8)).all()
    assert x[:10].unique().numel() > 4
    assert (x[27] == 9).all()
    assert not x[10:27].any()
    assert not x[28:].any()
    assert loss < 1e-6
    assert metrics["accuracy"] == 1

    blank = Oracle(
        lambda x: torch.cat([40.0 * torch.eye(9)[torch.zeros_like(x[:-10])], torch.zeros(10, 5, 9)])
    )
    blank_loss, _ = copying.loss(blank, copying.batch(3))
    assert blank_loss == pytest.approx(10 * math.log(9) / 37, rel=1e-5)


def test_adding_asks_for_the_sum_of_the_two_marked():
    adding = make("adding/small", T=11, batch_size=64)
    oracle = Oracle(lambda x: (x[..., 0] * x[..., 1]).sum(0).unsqueeze(-1))
    loss, metrics = adding.loss(oracle, adding.batch(0))
    assert oracle.seen.shape == (11, 64, 2)
    marks = oracle.seen[..., 1]
    assert (marks[:5].sum(0) == 1).all()
    assert (marks[5:].sum(0) == 1).all()
    assert (loss, metrics["accuracy"]) == (0, 1)
    many = make("adding/small", batch_size=20_000)
    always, _ = many.loss(Oracle(lambda x: torch.ones(x.shape[1], 1)), many.batch(0))
    assert always == pytest.approx(1 / 6, rel=0.05)


@pytest.mark.parametrize("what", ["copying/small", "adding/small"])
def test_batches_depend_on_seed_and_step_alone(what):
    first, again, other = make(what), make(what), make(what, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.batch(7), again.batch(7), strict=True))
    assert not torch.equal(first.batch(7)[0], first.batch(8)[0])
    assert not torch.equal(first.batch(7)[0], other.batch(7)[0])
    test = first.evaluate(
        Oracle(
            lambda x: torch.zeros(*x.shape[:2], 9) if x.dim() == 2 else torch.zeros(x.shape[1], 1)
        )
    )
    assert test["test"]["loss"] > 0


@pytest.fixture
def digits(monkeypatch):
    """Fewer images than MNIST's, of which each is its own."""
    images = torch.arange(23 * 784).remainder(251).to(torch.uint8).view(23, 784)
    monkeypatch.setattr(
        mnist, "load", lambda: Mnist(images, torch.arange(23) % 10, images[:5], torch.arange(5))
    )
    return images


def test_an_epoch_shows_every_image_once(digits):
    pixels = make("mnist/small", batch_size=4, pool=1)
    assert (pixels.epoch, pixels.iterations) == (6, 18)
    epochs = [[pixels.batch(step) for step in range(start, start + 6)] for start in (0, 6)]
    assert [len(labels) for _, labels in epochs[0]] == [4, 4, 4, 4, 4, 3]
    orders = [torch.cat([images for images, _ in epoch]) for epoch in epochs]
    for order in orders:
        assert sorted(map(tuple, order.tolist())) == sorted(map(tuple, digits.tolist()))
    assert not torch.equal(*orders)
    # Straight to the second epoch, as a resumed run goes.
    assert torch.equal(make("mnist/small", batch_size=4, pool=1).batch(8)[0], epochs[1][2][0])


def test_pixels_come_one_by_one_in_order_or_permuted_as_published(digits):
    order = RandomState(92916).permutation(784)
    for name, expected in ("mnist", digits), ("pmnist", digits[:, order]):
        pixels = make(f"{name}/170", batch_size=23)
        oracle = Oracle(lambda x: torch.eye(10)[torch.zeros(x.shape[1], dtype=torch.long)])
        images, labels = pixels.batch(0)
        _, metrics = pixels.loss(oracle, (images, labels))
        assert oracle.seen.shape == (784, 23, 1)
        assert torch.equal((oracle.seen.squeeze(-1).mT * 255).round().to(torch.uint8), images)
        assert sorted(map(tuple, images.tolist())) == sorted(map(tuple, expected.tolist()))
        assert metrics["accuracy"] == pytest.approx((labels == 0).float().mean())
        assert torch.equal(pixels.test_images, expected[:5])
    assert make("mnist/small").test_images.shape == (5, 49)


@pytest.mark.parametrize("method", ["cwy", "urnn", "lstm"])
@torch.no_grad()
def test_a_network_starts_as_the_paper_says(method):
    torch.manual_seed(0)
    model = make("copying/1000", method).model()
    assert not model.readout.bias.any()
    weight = model.readout.weight
    assert weight.std() == pytest.approx(math.sqrt(2 / weight.shape[1]), rel=0.1)
    if method != "lstm":
        assert model.core.weight_ih_l0.std() == pytest.approx(math.sqrt(2 / 10), rel=0.1)
        assert 0.005 < model.core.bias_ih_l0.abs().max() <= 0.01
    if method == "cwy":
        angles = torch.linalg.eigvals(model.core.weight_hh_l0).angle()
        assert angles.abs().max() > 3
        assert angles.abs().mean() == pytest.approx(math.pi / 2, rel=0.15)


def test_a_free_rnn_may_start_orthogonal():
    copying = make("copying/small", "rnn", init="haar")
    assert "init" not in copying.unused
    assert cwy.orthogonality_error(copying.model().core.weight_hh_l0) < 1e-5
