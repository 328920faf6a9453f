"""One optimizer for a model with any mix of methods, and weights that carry the mark of the
manifold wherever they go.
"""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import cwy
from cwy.nn import OrthogonalRNN
from cwy.optim import Joint, StiefelAdam, StiefelSGD, for_model

MOVED = [name for name, method in cwy.METHODS.items() if method.on_manifold]


class Mix(nn.Module):
    """A layer of every kind that an optimizer may meet."""

    def __init__(self):
        super().__init__()
        self.kernel = cwy.orthogonal(nn.Conv1d(3, 8, 2), method="rgd-e-qr")
        self.mapped = cwy.orthogonal(nn.Linear(8, 6), method="tcwy")
        self.plain = nn.Linear(6, 6)
        self.moved = cwy.orthogonal(nn.Linear(6, 6), method="rgd-c-c", momentum=0.9)
        self.adam = cwy.orthogonal(nn.Linear(6, 9), method="rgd-adam", betas=(0.8, 0.99))

    def forward(self, x):
        return self.adam(
            self.moved(self.plain(self.mapped(self.kernel(x).amax(-1)).tanh()).tanh()).tanh()
        )

    def errors(self):
        weights = [
            self.kernel.weight.flatten(1),
            self.mapped.weight,
            self.moved.weight,
            self.adam.weight,
        ]
        return [cwy.orthogonality_error(w) for w in weights]


def train(model, optimizer, steps, seed=0, schedule=None):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(32, 3, 5, generator=g), torch.randn(32, 9, generator=g)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if schedule is not None:
            schedule.step()
    return losses


def test_every_parameter_goes_where_its_method_says():
    model = Mix()
    optimizer = for_model(
        model, lr=1e-3, orthogonal_lr=1e-2, optimizer=torch.optim.AdamW, weight_decay=0.1
    )
    assert isinstance(optimizer, Joint)
    assert [type(part) for part in optimizer.parts] == [torch.optim.AdamW, StiefelSGD, StiefelAdam]
    groups = [(g["name"], g["lr"], g["param_names"]) for g in optimizer.param_groups]
    assert groups == [
        (
            "free",
            1e-3,
            ["kernel.bias", "mapped.bias", "plain.weight", "plain.bias", "moved.bias", "adam.bias"],
        ),
        ("orthogonal", 1e-2, ["mapped.parametrizations.weight.original"]),
        ("manifold", 1e-2, ["kernel.weight"]),
        ("manifold", 1e-2, ["moved.weight"]),
        ("manifold", 1e-2, ["adam.weight"]),
    ]
    kernel, moved, adam = optimizer.param_groups[2:]
    assert (kernel["metric"], kernel["retraction"], kernel["kernel"], kernel["momentum"]) == (
        "euclidean",
        "qr",
        True,
        0.0,
    )
    assert (moved["metric"], moved["retraction"], moved["kernel"], moved["momentum"]) == (
        "canonical",
        "cayley",
        False,
        0.9,
    )
    assert adam["betas"] == (0.8, 0.99)
    losses = train(model, optimizer, 200)
    assert losses[-1] < 0.9 * losses[0]
    assert max(model.errors()) <= 1e-5


def test_without_the_manifold_it_is_torchs_own_optimizer():
    model = nn.Sequential(cwy.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4))
    optimizer = for_model(model, lr=1e-3, orthogonal_lr=1e-4, optimizer=torch.optim.RMSprop)
    assert type(optimizer) is torch.optim.RMSprop
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 1e-4]
    alone = for_model(cwy.orthogonal(nn.Linear(4, 4, bias=False), method="rgd-adam"))
    assert type(alone) is StiefelAdam


def test_all_parts_of_a_model_go_up_together():
    model = Mix()
    optimizer = for_model(model, optimizer=torch.optim.SGD, maximize=True)
    assert all(group["maximize"] for group in optimizer.param_groups)
    losses = train(model, optimizer, 20)
    assert losses[-1] > losses[0]


def test_a_joint_optimizer_stops_and_goes_on_bitwise():
    model = Mix()
    optimizer = for_model(model, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    train(model, optimizer, 5, schedule=schedule)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
    file.seek(0)
    other = Mix()
    again = for_model(other, lr=0.5)
    following = torch.optim.lr_scheduler.CosineAnnealingLR(again, 20)
    for thing, state in zip(
        (other, again, following), torch.load(file, weights_only=True), strict=True
    ):
        thing.load_state_dict(state)
    copied = copy.deepcopy((model, optimizer))
    pickled = pickle.loads(pickle.dumps((model.state_dict(), optimizer)))[1]
    assert [g["lr"] for g in pickled.param_groups] == [g["lr"] for g in optimizer.param_groups]
    expected = train(model, optimizer, 5, schedule=schedule)
    assert train(other, again, 5, schedule=following) == expected
    assert train(*copied, 1) == expected[:1]
    for part in again.parts:
        assert all(g in again.param_groups for g in part.param_groups)
        assert part.state is again.state


def test_a_closure_and_a_gradient_scaler_drive_the_joint_optimizer():
    model = Mix()
    optimizer = for_model(model, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(1e35 * model(torch.ones(2, 3, 5)).square().sum()).backward()
    scaler.step(optimizer)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True)
    ), "inf: skipped"
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, 5)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert calls == [True]


@pytest.mark.parametrize(
    ("method", "kind"), [("rgd-adam", torch.optim.AdamW), ("rgd-c-c", torch.optim.SGD)]
)
@pytest.mark.parametrize(
    "cycle",
    [partial(OneCycleLR, max_lr=0.1, total_steps=20), partial(CyclicLR, base_lr=0.01, max_lr=0.1)],
)
def test_schedules_of_momentum_reach_every_part(method, kind, cycle):
    layer = cwy.orthogonal(nn.Linear(4, 4), method=method)
    optimizer = for_model(layer, optimizer=kind)
    schedule, seen = cycle(optimizer), []
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()
        seen.append(
            [g["betas"][0] if "betas" in g else g["momentum"] for g in optimizer.param_groups]
        )
    assert all(free == moved for free, moved in seen)
    assert seen[0] > seen[1] > seen[2]
    assert cwy.orthogonality_error(layer.weight) <= 1e-6


def test_of_unlike_parts_no_momentum_is_cycled():
    optimizer = for_model(Mix(), optimizer=torch.optim.Adam)
    with pytest.raises(ValueError, match="cycle_momentum"):
        OneCycleLR(optimizer, 0.1, 10)
    OneCycleLR(optimizer, 0.1, 10, cycle_momentum=False)


def test_groups_can_be_added_to_a_joint_optimizer():
    optimizer = for_model(Mix(), lr=1e-2)
    free, point = nn.Parameter(torch.ones(3)), nn.Parameter(torch.eye(3))
    optimizer.add_param_group({"params": [("a", free)]})
    optimizer.add_param_group({"params": [("b", point)], "stiefel": True, "lr": 0.1})
    free.grad, point.grad = torch.ones(3), torch.randn(3, 3)
    optimizer.step()
    assert (free < 1).all()
    assert not torch.equal(point, torch.eye(3))
    assert cwy.orthogonality_error(point) <= 1e-6
    optimizer.load_state_dict(optimizer.state_dict())
    assert (
        sum(len(part.param_groups) for part in optimizer.parts) == len(optimizer.param_groups) == 7
    )
    alone = Joint([StiefelSGD([nn.Parameter(torch.eye(3))])])
    with pytest.raises(ValueError, match="no part is an optimizer of free parameters"):
        alone.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@pytest.mark.parametrize("method", MOVED)
def test_the_mark_goes_where_the_module_goes(method):
    layer = cwy.orthogonal(nn.Conv2d(3, 5, 3, bias=False), method=method)
    with torch.device("meta"):
        empty = cwy.orthogonal(nn.Conv2d(3, 5, 3, bias=False), method=method)
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert list(layer.state_dict()) == ["weight"]
    assert "on_manifold" in repr(layer)
    for moved in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(layer).double(),
        empty,
    ):
        optimizer = for_model(nn.Sequential(moved), lr=0.1)
        before = moved.weight.detach().clone()
        moved(torch.ones(1, 3, 4, 4, dtype=before.dtype)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(moved.weight, before)
        assert cwy.orthogonality_error(moved.weight.flatten(1)) <= 1e-5
    cwy.bake(layer)
    assert type(for_model(layer)) is torch.optim.Adam
    assert "on_manifold" not in repr(layer)


@pytest.mark.parametrize("method", MOVED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_a_recurrent_network_is_trained_on_the_manifold(method, dtype):
    rnn = OrthogonalRNN(3, 6, 2, "modrelu", dtype=dtype, method=method)
    optimizer = for_model(rnn, lr=1e-2, orthogonal_lr=1e-3)
    x = torch.randn(9, 4, 3, dtype=dtype)
    before = rnn.weight_hh_l0.detach().clone()
    for _ in range(5):
        optimizer.zero_grad()
        (rnn(x)[0] - 1).abs().square().sum().backward()
        optimizer.step()
    assert not torch.equal(rnn.weight_hh_l0, before)
    assert max(cwy.orthogonality_error(w) for w in (rnn.weight_hh_l0, rnn.weight_hh_l1)) <= 1e-13


def test_torchs_rnn_becomes_one_on_the_manifold():
    theirs, x = nn.RNN(3, 6), torch.randn(9, 4, 3)
    with pytest.raises(ValueError, match=r"n=6"):
        OrthogonalRNN.from_torch(theirs, method="rgd-c-c")
    nn.init.orthogonal_(theirs.weight_hh_l0)
    torch.testing.assert_close(
        OrthogonalRNN.from_torch(theirs, method="rgd-c-c")(x)[0], theirs(x)[0], atol=1e-5, rtol=0
    )


def test_an_orthogonal_weight_is_kept_and_another_replaced():
    layer = nn.Linear(6, 4)
    nn.init.orthogonal_(layer.weight)
    weight, before = layer.weight, layer.weight.detach().clone()
    cwy.orthogonal(layer, method="rgd")
    assert layer.weight is weight
    torch.testing.assert_close(layer.weight.detach(), before)
    other = cwy.orthogonal(nn.Linear(6, 6), method="rgd", init="identity")
    assert torch.equal(other.weight, torch.eye(6))
    assert (
        cwy.orthogonality_error(cwy.orthogonal(nn.Linear(6, 6), method="rgd-adam").weight) <= 1e-6
    )


def test_a_loaded_weight_off_the_manifold_is_refused_before_any_part_moves():
    model = Mix()
    optimizer = for_model(model, lr=1e-2)
    model.load_state_dict(model.state_dict() | {"moved.weight": torch.randn(6, 6)})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'moved.weight' \(6, 6\)"):
        train(model, optimizer, 1)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True)
    )


def off():
    layer = cwy.orthogonal(nn.Linear(4, 4), method="rgd-c-c")
    nn.init.normal_(layer.weight)
    return layer


def test_a_marked_weight_off_the_manifold_is_refused_or_moved_back_as_asked():
    layer = off()
    with pytest.raises(ValueError, match=r"'weight' \(4, 4\)"):
        for_model(layer)
    for_model(layer, project=True)
    assert cwy.orthogonality_error(layer.weight) <= 1e-6


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: for_model(3), TypeError, ["for_model", "torch.nn.Module", "int"]),
        (lambda: for_model(nn.ReLU()), ValueError, ["ReLU", "no parameters"]),
        (
            lambda: cwy.orthogonal(off(), method="rgd"),
            ValueError,
            ["lives on the manifold already", "cwy.bake"],
        ),
        (
            lambda: cwy.orthogonal(nn.Linear(3, 3), method="rgd-c-c", reflections=2),
            TypeError,
            ["'rgd-c-c'", "momentum"],
        ),
        (
            lambda: cwy.orthogonal(nn.Linear(3, 3), method="rgd-c-q"),
            ValueError,
            ["Did you mean 'rgd-c-qr'"],
        ),
        (lambda: for_model(nn.Linear(3, 3), lr="1e-3"), TypeError, ["lr", "number", "'1e-3'"]),
        (
            lambda: for_model(nn.Linear(3, 3), lr=1e-3, optimizer="adam"),
            TypeError,
            ["optimizer", "type str", "optimizer=torch.optim.AdamW"],
        ),
    ],
)
def test_errors(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: for_model(m, torch.optim.AdamW, lr=1e-2),
        lambda m: for_model(m, torch.optim.AdamW),
        lambda m: for_model(m, 1e-2, torch.optim.AdamW),
    ],
)
def test_an_optimizer_in_the_place_of_a_learning_rate_is_named(call):
    with pytest.raises(
        TypeError, match=r"for_model: (orthogonal_)?lr must be a number.*AdamW.*optimizer=AdamW"
    ):
        call(nn.Linear(3, 3))


def test_constrained_parameters_decay_only_when_told():
    def decays(**options):
        groups = for_model(Mix(), optimizer=torch.optim.AdamW, **options).param_groups
        return [(g["name"], g["weight_decay"]) for g in groups if "weight_decay" in g]

    assert decays() == [("free", 0.01), ("orthogonal", 0.0)]
    assert decays(weight_decay=0.1) == [("free", 0.1), ("orthogonal", 0.0)]
    assert decays(orthogonal_weight_decay=0.2) == [("free", 0.01), ("orthogonal", 0.2)]
    assert decays(orthogonal_weight_decay=0.2, hold_length=True) == [
        ("free", 0.01),
        ("orthogonal", 0.0),
    ]
    with pytest.raises(
        ValueError, match=r"Rprop has no weight decay, but orthogonal_weight_decay is 0\.1"
    ):
        for_model(Mix(), optimizer=torch.optim.Rprop, orthogonal_weight_decay=0.1)
    with pytest.raises(ValueError, match="orthogonal_weight_decay must be at least 0, got -1"):
        for_model(Mix(), orthogonal_weight_decay=-1)
