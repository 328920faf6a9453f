"""The optimizers on the manifold: where they lead, that they stay on it, and what torch asks of its
own optimizers.
"""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import cwy
from cwy.manifolds import reference
from cwy.optim import StiefelAdam, StiefelSGD

RULES = {
    "c-c": (StiefelSGD, {}),
    "e-c": (StiefelSGD, {"metric": "euclidean"}),
    "c-qr": (StiefelSGD, {"retraction": "qr"}),
    "e-qr": (StiefelSGD, {"metric": "euclidean", "retraction": "qr"}),
    "momentum": (StiefelSGD, {"momentum": 0.9}),
    "adam": (StiefelAdam, {}),
    "adam-c-qr": (StiefelAdam, {"metric": "canonical", "retraction": "qr"}),
}
every_rule = pytest.mark.parametrize("rule", RULES)
# Points of every kind, with the keys of their groups: two of one shape, which are updated
# together, among them.
KINDS = {
    "tall": ((9, 4), {}),
    "again": ((9, 4), {}),
    "wide": ((4, 9), {}),
    "square": ((5, 5), {}),
    "batched": ((3, 2, 7, 3), {}),
    "kernel": ((8, 3, 2, 2), {"kernel": True}),
}


def flat(x, group):
    return x.flatten(1) if group.get("kernel") else x


def points(dtype=torch.float64, kinds=KINDS):
    found = []
    for shape, group in (KINDS[k] for k in kinds):
        x = nn.Parameter(torch.empty(shape, dtype=dtype))
        n, m = flat(x, group).shape[-2:]
        q = cwy.init.haar(max(n, m), min(n, m), batch=flat(x, group).shape[:-2], dtype=dtype)
        x.data.copy_((q.mH if n < m else q).reshape(shape))
        found.append(x)
    return found


def make(rule, xs, kinds=KINDS, lr=0.1, **options):
    cls, given = RULES[rule]
    groups = [
        {
            "params": [x for x, k in zip(xs, kinds, strict=True) if bool(KINDS[k][1]) == kernel],
            "kernel": kernel,
        }
        for kernel in (False, True)
    ]
    return cls([g for g in groups if g["params"]], lr=lr, **given, **options)


def targets(xs, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(
            x.shape, dtype=x.dtype if x.dtype.itemsize > 2 else torch.float32, generator=g
        ).to(x.dtype)
        for x in xs
    ]


def loss_of(xs, ts):
    """Smooth, not convex, and different for every entry."""
    return sum(
        ((x - t).abs().square() * (x + t).abs().square()).sum() for x, t in zip(xs, ts, strict=True)
    )


def run(optimizer, xs, ts, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(xs, ts).backward()
        optimizer.step()


def errors(xs, kinds=KINDS):
    return [cwy.orthogonality_error(flat(x, KINDS[k][1])) for x, k in zip(xs, kinds, strict=True)]


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_every_kind_of_point_goes_down_and_stays_on_the_manifold(rule, dtype):
    xs = points(dtype)
    ts = targets(xs)
    optimizer = make(rule, xs, lr=3e-2 if rule.startswith("adam") else 3e-3)
    before = loss_of(xs, ts).item()
    run(optimizer, xs, ts, 50)
    assert loss_of(xs, ts).item() < 0.95 * before
    assert max(errors(xs)) <= 1e-13


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_reaches_the_eigenspace(rule, dtype):
    """The least of tr(XᴴAX)/2 over St(N, M) is half the sum of the M least eigenvalues, at their
    eigenvectors.
    """
    basis = cwy.init.haar(10, dtype=dtype)
    a = (basis * torch.linspace(-1, 1, 10, dtype=dtype)) @ basis.mH
    x = nn.Parameter(cwy.init.haar(10, 3, dtype=dtype))
    cls, given = RULES[rule]
    optimizer = cls([x], lr=0.1 if rule == "momentum" else 0.7, **given)
    for _ in range(600):
        optimizer.zero_grad()
        ((x.conj() * (a @ x)).real.sum() / 2).backward()
        optimizer.step()
    projector, eigenspace = (x @ x.mH).detach(), basis[:, :3] @ basis[:, :3].mH
    torch.testing.assert_close(projector, eigenspace, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", ["c-c", "e-c", "c-qr", "e-qr"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradient_descent_is_the_papers(rule, dtype):
    x, a = nn.Parameter(cwy.init.haar(9, 4, dtype=dtype)), torch.randn(9, 9, dtype=dtype)
    cls, given = RULES[rule]
    optimizer, y = cls([x], lr=0.3, **given), x.detach().clone()
    for _ in range(5):
        x.grad = a @ x.detach()
        optimizer.step()
        y = reference.step(
            y, a @ y, 0.3, **{"metric": "canonical", "retraction": "cayley", **given}
        )
    torch.testing.assert_close(x.detach(), y, atol=1e-10, rtol=0)


def test_adam_is_that_of_li_and_others_with_an_exact_cayley_step():
    x, a = (
        nn.Parameter(cwy.init.haar(9, 4, dtype=torch.float64)),
        torch.randn(9, 9, dtype=torch.float64),
    )
    optimizer = StiefelAdam([x], lr=0.3, betas=(0.8, 0.95), eps=1e-3)
    y, m, v, eye = (
        x.detach().clone(),
        torch.zeros(9, 4, dtype=torch.float64),
        0.0,
        torch.eye(9, dtype=torch.float64),
    )
    for k in range(1, 6):
        x.grad = a @ x.detach()
        optimizer.step()
        g = a @ y
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g.square().sum()
        w = m @ y.T / (1 - 0.8**k)
        w = w - y @ y.T @ w / 2
        w = w - w.T
        m, w = w @ y * (1 - 0.8**k), 0.3 * w / ((v / (1 - 0.95**k)).sqrt() + 1e-3)
        y = torch.linalg.solve(eye + w / 2, (eye - w / 2) @ y)
    torch.testing.assert_close(x.detach(), y, atol=1e-10, rtol=0)


SIZES = [1e-30, 1e-4, 1e-2, 1.0, 1e3, 1e12, 1e38]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["c-c", "e-c", "c-qr", "e-qr", "momentum", "adam"])
def test_ten_thousand_float32_steps_end_on_the_manifold(rule):
    """Gaussian and rank-1 gradients, zero and along the point itself, tiny to huge; rates 1e-4 to
    10.
    """
    x, sizes = (
        nn.Parameter(cwy.init.haar(8, 3, batch=(4, len(SIZES)))),
        torch.tensor(SIZES).reshape(-1, 1, 1),
    )
    cls, given = RULES[rule]
    optimizer = cls([x], error_if_nonfinite=False, **given)
    gaussian = torch.randn(50, len(SIZES), 8, 3)
    rank_1 = torch.randn(50, len(SIZES), 8, 1) @ torch.randn(50, len(SIZES), 1, 3)
    for k in range(10_000):
        inside = x.detach()[3] * (k % 3)
        x.grad = (
            torch.stack([gaussian[k % 50], rank_1[k % 50], torch.zeros_like(inside), inside])
            * sizes
        )
        optimizer.param_groups[0]["lr"] = (1e-4, 1e-2, 1, 10)[k % 4]
        optimizer.step()
    assert cwy.orthogonality_error(x) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["c-c", "e-c", "momentum", "adam"])
def test_ten_thousand_float32_steps_of_one_square_matrix_end_on_the_manifold(rule):
    """Steps that are verified, short and long, among those that take the general path."""
    x = nn.Parameter(cwy.init.haar(8))
    cls, given = RULES[rule]
    optimizer = cls([x], error_if_nonfinite=False, **given)
    gaussian, largest = torch.randn(50, 8, 8), 0.0
    for k in range(10_000):
        x.grad = gaussian[k % 50] * SIZES[k % len(SIZES)]
        optimizer.param_groups[0]["lr"] = (1e-4, 1e-2, 1, 10)[k // 7 % 4]
        optimizer.step()
        if k % 100 == 99:
            largest = max(largest, cwy.orthogonality_error(x))
    assert largest <= 2e-6


VERIFIED = pytest.mark.parametrize("rule", ["c-c", "e-c", "momentum", "adam"])


@VERIFIED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("shape", [(24, 24), (8, 2, 2, 2)], ids=str)
def test_a_verified_step_is_the_general_step(rule, dtype, maximize, shape, monkeypatch):
    x = nn.Parameter(cwy.init.haar(shape[0], dtype=dtype).reshape(shape))
    y = copy.deepcopy(x)
    cls, given = RULES[rule]
    group = {"kernel": len(shape) > 2}
    one, other = (
        cls([{"params": [p], **group}], lr=0.02, maximize=maximize, **given) for p in (x, y)
    )
    for k in range(8):
        (t,) = targets([x], seed=k)
        x.grad, y.grad = t, t.clone()
        one.step()
        with monkeypatch.context() as patch:
            patch.setattr(cwy.optim.base, "_LARGEST_VERIFIED", 0)
            other.step()
    tolerance = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(x.detach(), y.detach(), atol=tolerance, rtol=0)
    for key, value in other.state.get(y, {}).items():
        torch.testing.assert_close(one.state[x][key], value, atol=tolerance, rtol=tolerance)
        assert one.state[x][key].shape == value.shape


@VERIFIED
def test_one_square_matrix_is_refused_before_anything_changes(rule):
    x = nn.Parameter(cwy.init.haar(24))
    (x.grad,) = targets([x])
    cls, given = RULES[rule]
    optimizer = cls([x], lr=1e-2, **given)
    optimizer.step()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict()["state"])
    good = x.detach().clone()

    def unchanged(value):
        now = optimizer.state_dict()["state"]
        torch.testing.assert_close(now, state, atol=0, rtol=0)
        return torch.equal(x, value)

    x.data.mul_(2)
    with pytest.raises(ValueError, match=r"\(24, 24\)"):
        optimizer.step()
    assert unchanged(2 * good)
    x.data.copy_(good)
    x.grad[3, 5] = torch.nan
    with pytest.raises(RuntimeError, match=r"\(24, 24\)"):
        optimizer.step()
    assert unchanged(good)
    x.grad[3, 5] = 0
    optimizer.step()
    assert cwy.orthogonality_error(x) <= 1e-6


class Operations(TorchDispatchMode):
    """Count the operations that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.startswith("aten::")
        return func(*args, **(kwargs or {}))


# geoopt 0.5.1 takes 23, 29 and 44 for RiemannianSGD, with momentum, and RiemannianAdam.
FEW = {"c-c": 18, "e-c": 19, "momentum": 22, "adam": 29}


@pytest.mark.parametrize("rule", FEW)
def test_a_small_square_matrix_takes_few_operations(rule):
    """The time of a small step on a CPU is that of its calls."""
    x = nn.Parameter(cwy.init.haar(24))
    (x.grad,) = targets([x])
    cls, given = RULES[rule]
    optimizer = cls([x], lr=1e-3, **given)
    optimizer.step()
    with Operations() as seen:
        optimizer.step()
    assert seen.count <= FEW[rule]


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_state_dict_round_trip_is_bitwise(rule, dtype):
    xs = points(dtype)
    ts = targets(xs)
    optimizer = make(rule, xs, lr=1e-2)
    run(optimizer, xs, ts, 4)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    ys = [nn.Parameter(x.detach().clone()) for x in xs]
    other = make(rule, ys, lr=0.5)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert len(other.state) == len(optimizer.state)
    run(optimizer, xs, ts, 4)
    run(other, ys, ts, 4)
    assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
    assert len(optimizer.state) == (
        len(xs) if rule in ("momentum", "adam", "adam-c-qr") or dtype == torch.bfloat16 else 0
    )


@every_rule
def test_a_copied_or_pickled_optimizer_goes_on(rule):
    xs = points()
    ts = targets(xs)
    optimizer = make(rule, xs)
    run(optimizer, xs, ts, 2)
    for ys, other in (copy.deepcopy((xs, optimizer)), pickle.loads(pickle.dumps((xs, optimizer)))):
        run(other, ys, ts, 2)
    run(optimizer, xs, ts, 2)
    assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@every_rule
def test_together_or_one_by_one(rule):
    """Parameters of one shape are updated together; one without gradient is left out, and its count
    of steps, too.
    """
    xs = points(kinds=["tall"] * 3)
    alone = copy.deepcopy(xs)
    cls, given = RULES[rule]
    together, apart = cls(xs, lr=0.1, **given), [cls([x], lr=0.1, **given) for x in alone]
    for k in range(6):
        for x, y, t in zip(xs, alone, targets(xs, seed=k), strict=True):
            x.grad, y.grad = t, t.clone()
        if k % 2:
            before = xs[1].detach().clone()
            xs[1].grad = alone[1].grad = None
        together.step()
        for optimizer in apart:
            optimizer.step()
        assert not k % 2 or torch.equal(xs[1], before)
    for x, y in zip(xs, alone, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=0)


@every_rule
def test_zero_gradients_move_nothing_and_maximize_goes_up(rule):
    xs = points()
    ts, twins = targets(xs), copy.deepcopy(xs)
    optimizer = make(rule, xs)
    for x in xs:
        x.grad = torch.zeros_like(x)
    optimizer.step()
    for x, y in zip(xs, twins, strict=True):
        torch.testing.assert_close(x, y, atol=1e-14, rtol=0)
    down, up = make(rule, xs), make(rule, twins, maximize=True)
    for _ in range(3):
        for x, y, t in zip(xs, twins, ts, strict=True):
            x.grad, y.grad = t.clone(), -t
        down.step()
        up.step()
    for x, y in zip(xs, twins, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=0)


@every_rule
def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(rule):
    xs = points()
    ts, twins = targets(xs), copy.deepcopy(xs)
    optimizer, other = make(rule, xs), make(rule, twins)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(xs, ts)
        loss.backward()
        return loss

    expected = loss_of(xs, ts).item()
    assert optimizer.step(closure).item() == expected
    run(other, twins, ts, 1)
    assert all(torch.equal(x, y) for x, y in zip(xs, twins, strict=True))


@every_rule
def test_a_tensor_as_rate_and_schedulers(rule):
    xs = points()
    ts, twins = targets(xs), copy.deepcopy(xs)
    optimizer, other = (
        make(rule, xs, lr=1e-2),
        make(rule, twins, lr=torch.tensor(1e-2, dtype=torch.float64)),
    )
    schedules = [
        torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
            ],
            [2],
        )
        for o in (optimizer, other)
    ]
    for _ in range(6):
        run(optimizer, xs, ts, 1)
        run(other, twins, ts, 1)
        for schedule in schedules:
            schedule.step()
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-4)
    for x, y in zip(xs, twins, strict=True):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


@every_rule
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_the_rates_dtype_and_shape_do_not_matter(rule, shape):
    xs = points(torch.float32)
    twins, ts = copy.deepcopy(xs), targets(xs)
    run(make(rule, xs, lr=torch.full(shape, 0.125, dtype=torch.float64)), xs, ts, 2)
    run(make(rule, twins, lr=0.125), twins, ts, 2)
    torch.testing.assert_close(xs, twins)


class NoWaiting(TorchDispatchMode):
    """Fails at an operation that makes the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in (
            "aten::_local_scalar_dense",
            "aten::is_nonzero",
            "aten::_linalg_check_errors",
            "aten::nonzero",
        )
        return func(*args, **(kwargs or {}))


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_a_step_never_waits_for_the_device(rule, dtype, monkeypatch):
    # On the CPU the host reads freely. This is the step of every other device.
    for module in (cwy.optim.base, cwy.optim.batch):
        monkeypatch.setattr(module, "readable", lambda p: False)
    xs = points(dtype)
    optimizer = make(rule, xs, lr=torch.tensor(1e-2), error_if_nonfinite=False)
    optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(3, dtype=dtype))], "stiefel": False}
    )
    for _ in range(2):
        for group in optimizer.param_groups:
            for x, t in zip(group["params"], targets(group["params"]), strict=True):
                x.grad = t
        with NoWaiting():
            optimizer.step()


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_a_compiled_step_is_the_step(rule):
    # By columns in memory, as a factorisation leaves it.
    xs = [nn.Parameter(cwy.init.haar(9, 4).mT.contiguous().mT)]
    twins, ts = copy.deepcopy(xs), targets(xs)
    optimizer, other = (make(rule, ys, ["tall"]) for ys in (xs, twins))
    torch.compiler.reset()
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    for one, ys in (optimizer, xs), (other, twins):
        run(one, ys, ts, 3)
    torch.testing.assert_close(xs, twins)


@pytest.mark.gpu
@every_rule
def test_cuda_graph(rule):
    """Also with two large matrices of a shape, which would be solved as a batch."""
    large = [cwy.init.haar(n, m) for n, m in ((200, 200), (300, 150)) for _ in range(2)]
    xs = [nn.Parameter(x.detach().cuda()) for x in (*points(torch.float32), *large)]
    kinds = [*KINDS, *["tall"] * len(large)]
    twins = copy.deepcopy(xs)
    ts = [t.cuda() for t in targets([x.cpu() for x in xs])]
    lr = torch.tensor(1e-2, device="cuda")
    optimizer, other = (make(rule, ys, kinds, lr) for ys in (xs, twins))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(optimizer, xs, ts, 3)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss_of(xs, ts).backward()
        optimizer.step()
    for _ in range(5):
        graph.replay()
    run(other, twins, ts, 8)
    for x, y in zip(xs, twins, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)
    assert max(errors([x.cpu() for x in xs], kinds)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_free_groups_are_torchs(dtype, momentum):
    """A manifold's optimizer takes free parameters too, and does with them what torch does."""
    free = lambda ps: [{"params": ps, "stiefel": False}]
    pairs = [
        (
            lambda ps: StiefelSGD(free(ps), 0.1, momentum),
            lambda ps: torch.optim.SGD(ps, 0.1, momentum),
        ),
        (lambda ps: StiefelAdam(free(ps), 0.1), lambda ps: torch.optim.Adam(ps, 0.1)),
    ]
    for ours, theirs in pairs:
        xs = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((), (3,), (2, 5))]
        ys = copy.deepcopy(xs)
        one, other = ours(xs), theirs(ys)
        for k in range(5):
            for x, y, t in zip(xs, ys, targets(xs, seed=k), strict=True):
                x.grad, y.grad = t, t.clone()
            one.step()
            other.step()
        for x, y in zip(xs, ys, strict=True):
            tight = (
                {"atol": 1e-12, "rtol": 0}
                if dtype == torch.float64
                else {"atol": 2e-6, "rtol": 1e-5}
            )
            torch.testing.assert_close(x, y, **tight)


@every_rule
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_adds_up_small_steps(rule, half):
    """Steps below the parameter's own precision, in a float32 master."""
    kinds = ["tall", "wide", "kernel"]
    xs = points(half, kinds)
    cls, _ = RULES[rule]
    optimizer = make(rule, xs, kinds, lr=1e-4 if cls is StiefelSGD else 1e-3)
    start, ts = [x.detach().clone() for x in xs], targets(xs)
    for _ in range(300):
        for x, t in zip(xs, ts, strict=True):
            x.grad = t.clone()
        optimizer.step()
    for x, before, k in zip(xs, start, kinds, strict=True):
        master = optimizer.state[x]["master"]
        assert cwy.orthogonality_error(flat(master, KINDS[k][1])) <= 5e-6
        assert torch.equal(master.to(half), x)
        assert (x - before).abs().max() > 1e-2


def test_what_is_written_to_a_half_precision_parameter_counts():
    (x,) = points(torch.bfloat16, ["tall"])
    optimizer = StiefelSGD([x], lr=1e-2)
    x.grad = torch.ones_like(x)
    optimizer.step()
    (other,) = points(torch.bfloat16, ["tall"])
    with torch.no_grad():
        x.copy_(other)
    x.grad.zero_()
    optimizer.step()
    torch.testing.assert_close(x, other, atol=4e-3, rtol=0)


def nonfinite(value):
    x = nn.Parameter(torch.eye(3, 2))
    y = nn.Parameter(torch.eye(3, 2))
    x.grad, y.grad = torch.ones(3, 2), torch.tensor([[value, 0], [0, 0], [0, 0]])
    return x, y


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_raises_before_anything_moves(value):
    x, y = nonfinite(value)
    with pytest.raises(
        RuntimeError,
        match=r"StiefelSGD: the gradient of parameter 'y' \(3, 2\) has NaN or infinite.*changed",
    ):
        StiefelSGD([("x", x), ("y", y)], lr=0.1).step()
    assert torch.equal(x, torch.eye(3, 2))
    x, y = nonfinite(value)
    StiefelSGD([x, y], lr=0.1, error_if_nonfinite=False).step()
    assert torch.equal(y, torch.eye(3, 2))
    assert not torch.equal(x, torch.eye(3, 2))
    assert cwy.orthogonality_error(x) <= 1e-6


def test_a_point_off_the_manifold_is_refused_or_moved_to_it_as_asked():
    x = nn.Parameter(torch.randn(4, 6, 2, dtype=torch.float64))
    before = x.detach().clone()
    with pytest.raises(
        ValueError,
        match=r"parameter 0 of its group, \(4, 6, 2\).*not on the manifold"
        r".*project=True.*'stiefel': False",
    ):
        StiefelSGD([x])
    assert torch.equal(x, before)
    StiefelSGD([x], project=True)
    u, _, vh = torch.linalg.svd(before, full_matrices=False)
    torch.testing.assert_close(x.detach(), u @ vh)
    kernel = nn.Parameter(torch.randn(4, 8, 3, 3).contiguous(memory_format=torch.channels_last))
    optimizer = StiefelSGD([{"params": [kernel], "kernel": True}], lr=0.1, project=True)
    assert cwy.orthogonality_error(kernel.flatten(1)) <= 1e-6
    kernel.grad = torch.randn_like(kernel)
    optimizer.step()
    assert cwy.orthogonality_error(kernel.flatten(1)) <= 1e-6
    assert kernel.is_contiguous(memory_format=torch.channels_last)


@every_rule
def test_what_is_written_off_the_manifold_is_refused_or_moved_back_as_asked(rule):
    xs = points()
    optimizer, ts = make(rule, xs), targets(xs)
    run(optimizer, xs, ts, 1)
    before = [x.detach().clone() for x in xs]
    with torch.no_grad():
        xs[-1].mul_(3)
    with pytest.raises(ValueError, match=r"\(8, 3, 2, 2\)"):
        run(optimizer, xs, ts, 1)
    assert all(torch.equal(x, y) for x, y in zip(xs[:-1], before[:-1], strict=True)), (
        "nothing has moved"
    )
    for group in optimizer.param_groups:
        group |= {"project": True, "lr": 0.0}
    with torch.no_grad():
        xs[0].mul_(1e-3)
        xs[1].mul_(1 + 1e-3)
    run(optimizer, xs, ts, 1)
    for x, y in zip(xs, before, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=0)


def double_by_data(xs):
    xs[-1].data.mul_(2)


def average_with_others(xs):
    vector = nn.utils.parameters_to_vector(xs)
    others = nn.utils.parameters_to_vector(points(xs[0].dtype))
    nn.utils.vector_to_parameters((vector + others) / 2, xs)


@every_rule
@pytest.mark.parametrize("write", [double_by_data, average_with_others])
def test_what_torch_does_not_count_as_a_write_is_refused_or_moved_back_as_asked(rule, write):
    xs = points()
    optimizer, ts = make(rule, xs), targets(xs)
    run(optimizer, xs, ts, 2)
    write(xs)
    before = [x.detach().clone() for x in xs]
    with pytest.raises(ValueError, match=r"\(\d+, "):
        run(optimizer, xs, ts, 1)
    assert all(torch.equal(x, y) for x, y in zip(xs, before, strict=True)), "nothing has moved"
    for group in optimizer.param_groups:
        group["project"] = True
    run(optimizer, xs, ts, 1)
    assert max(errors(xs)) <= 1e-13


@every_rule
def test_a_small_write_that_torch_does_not_count_is_mended(rule):
    xs = points()
    optimizer, ts = make(rule, xs), targets(xs)
    run(optimizer, xs, ts, 1)
    for x in xs:
        x.data.mul_(1 + 1e-3)
    run(optimizer, xs, ts, 1)
    assert max(errors(xs)) <= 1e-13


@every_rule
def test_where_the_host_cannot_look_a_point_off_the_manifold_stays(rule, monkeypatch):
    """As on a GPU, where a later step raises."""
    for module in (cwy.optim.base, cwy.optim.batch):
        monkeypatch.setattr(module, "readable", lambda p: False)
    xs = points()
    optimizer, ts = make(rule, xs), targets(xs)
    run(optimizer, xs, ts, 1)
    before = [x.detach().clone() for x in xs]
    xs[-1].data.mul_(2)
    run(optimizer, xs, ts, 1)
    assert torch.equal(xs[-1].detach(), 2 * before[-1])
    assert not any(torch.equal(x, y) for x, y in zip(xs[:-1], before[:-1], strict=True))
    assert max(errors(xs)[:-1]) <= 1e-13


@pytest.mark.gpu
@every_rule
def test_on_a_gpu_an_uncounted_write_is_refused_by_a_later_step(rule):
    xs = [nn.Parameter(x.detach().cuda()) for x in points(torch.float32)]
    optimizer, ts = make(rule, xs), [t.cuda() for t in targets([x.cpu() for x in xs])]
    run(optimizer, xs, ts, 2)
    xs[-1].data.mul_(2)
    before = xs[-1].detach().clone()
    with pytest.raises(ValueError, match=r"\(8, 3, 2, 2\)"):  # noqa: PT012
        for _ in range(5):
            run(optimizer, xs, ts, 1)
            torch.cuda.synchronize()
    assert torch.equal(xs[-1], before)


def sparse():
    x = nn.Parameter(torch.eye(3))
    x.grad = torch.eye(3).to_sparse()
    StiefelSGD([x]).step()


def nested():
    with warnings.catch_warnings():
        # torch warns that nested tensors are a prototype.
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.eye(3, 2), torch.eye(4, 2)])


X = torch.eye(3, 2)
ERRORS = [
    (lambda: StiefelSGD([nn.Parameter(X)], lr=-1.0), ValueError, ["StiefelSGD", "lr", "-1.0"]),
    (lambda: StiefelSGD([nn.Parameter(X)], lr=torch.ones(2)), ValueError, ["one element", "(2,)"]),
    (
        lambda: StiefelSGD([nn.Parameter(X)], lr=-torch.ones(1)),
        ValueError,
        ["StiefelSGD", "lr", "at least 0", "-1."],
    ),
    (
        lambda: StiefelSGD([nn.Parameter(X)], momentum=1.0),
        ValueError,
        ["momentum", "below 1", "1.0"],
    ),
    (
        lambda: StiefelSGD([nn.Parameter(X)], metric="flat"),
        ValueError,
        ["metric", "'canonical', 'euclidean'", "'flat'"],
    ),
    (
        lambda: StiefelSGD([nn.Parameter(X)], retraction="exp"),
        ValueError,
        ["retraction", "'cayley', 'qr'", "'exp'"],
    ),
    (
        lambda: StiefelAdam([nn.Parameter(X)], betas=(0.9, 1.0)),
        ValueError,
        ["StiefelAdam", "betas", "(0.9, 1.0)"],
    ),
    (lambda: StiefelAdam([nn.Parameter(X)], eps=-1), ValueError, ["eps", "-1"]),
    (
        lambda: StiefelSGD([("bias", nn.Parameter(torch.ones(3)))]),
        ValueError,
        ["'bias' (3,)", "matrix", "for_model"],
    ),
    (lambda: StiefelSGD([nn.Parameter(X * torch.nan)], project=True), ValueError, ["NaN"]),
    (
        lambda: StiefelSGD([nn.Parameter(X.long(), requires_grad=False)]),
        TypeError,
        ["StiefelSGD", "float16 to float64", "int64"],
    ),
    (lambda: StiefelSGD([nn.Parameter(X.to(torch.float8_e4m3fn))]), TypeError, ["float8_e4m3fn"]),
    (lambda: StiefelSGD([nn.Parameter(X.to_sparse())]), TypeError, ["StiefelSGD", "dense"]),
    (lambda: StiefelSGD([nn.Parameter(nested())]), TypeError, ["StiefelSGD", "nested"]),
    (lambda: StiefelSGD([nn.Parameter(X)], differentiable=True), TypeError, ["differentiable"]),
    (lambda: StiefelSGD([]), ValueError, ["empty parameter list"]),
    (sparse, RuntimeError, ["StiefelSGD", "sparse"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS)
def test_errors(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = StiefelSGD([nn.Parameter(torch.eye(3, 2))])
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))]})
    assert len(optimizer.param_groups) == 1


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["tall", "square"])
def test_gradients_of_any_size_are_gradients(rule, dtype, kind):
    """From subnormal ones to those whose products overflow."""
    for size in (*(torch.finfo(dtype).tiny * 10.0**k for k in (2, -1, -4)), torch.finfo(dtype).max):
        (x,) = points(dtype, [kind])
        optimizer = make(rule, [x], [kind], lr=1.0)
        for _ in range(20):
            before, x.grad = x.detach().clone(), torch.sgn(torch.randn_like(x)) * size
            optimizer.step()
            assert cwy.orthogonality_error(x) < 1e-5
            assert size < 1 or (x - before).abs().max() > 1e-2
