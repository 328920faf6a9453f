"""The maps of the other papers: each is its definition, and those that have an inverse invert every
matrix of their set.
"""

import math

import pytest
import torch
from torch import nn

import cwy
from cwy.parametrizations import DTRIV, EURNN, EXPRNN, OWN, SCORNN, URNN, move_bases

REAL, COMPLEX = torch.float64, torch.complex128


def skew(x):
    return x.triu(1) - x.triu(1).mT


def eye(n, dtype=REAL):
    return torch.eye(n, dtype=dtype)


def series(a):
    """exp by its power series."""
    total = term = eye(a.shape[-1])
    for k in range(1, 80):
        term = term @ a / k
        total = total + term
    return total


def reflection(v):
    return eye(len(v), v.dtype) - 2 * torch.outer(v, v.conj()) / v.abs().square().sum()


def diagonal(phase):
    return torch.diag(torch.exp(1j * phase))


def urnn(chart, phase, v):
    n = chart.n
    k = torch.arange(n, dtype=REAL)
    f = torch.exp(-2j * math.pi * torch.outer(k, k) / n) / n**0.5
    d1, d2, d3 = map(diagonal, phase)
    return (
        d3
        @ reflection(v[1])
        @ f.mH
        @ d2
        @ eye(n, COMPLEX)[chart.permutation]
        @ reflection(v[0])
        @ f
        @ d1
    )


def eurnn(chart, theta, phi, phase):
    n, q, k = chart.n, diagonal(phase), 0
    for layer in range(chart.layers):
        f = eye(n, COMPLEX)
        for a in range(layer % 2, n - 1, 2):
            c, s, turn = theta[k].cos(), theta[k].sin(), torch.exp(1j * phi[k])
            f[a, a], f[a, a + 1], f[a + 1, a], f[a + 1, a + 1] = turn * c, -s, turn * s, c
            k += 1
        q = q @ f
    assert k == len(theta) == len(phi), "no angle is left over"
    return q


def own(chart, v):
    centred = v - torch.full((chart.n, chart.n), 1 / chart.n, dtype=REAL) @ v
    size, p = torch.linalg.eigh(centred.mT @ centred)
    return centred @ p @ torch.diag(size**-0.5) @ p.mT


def cayley(chart, x):
    half = skew(x) / 2
    return torch.linalg.inv(eye(chart.n) + half) @ (eye(chart.n) - half) @ torch.diag(chart.signs)


DEFINITIONS = {
    "exprnn": (lambda: EXPRNN(7, dtype=REAL), lambda chart, x: series(skew(x))),
    "dtriv": (lambda: DTRIV(7, dtype=REAL), lambda chart, x: chart.base @ series(skew(x))),
    "scornn": (lambda: SCORNN(7, negatives=2, dtype=REAL), cayley),
    "own": (lambda: OWN(9, 4, dtype=REAL), own),
    "own, N = M + 1": (lambda: OWN(9, 8, dtype=REAL), own),
    "urnn": (lambda: URNN(7, dtype=COMPLEX), urnn),
    "eurnn, N even": (lambda: EURNN(6, dtype=COMPLEX), eurnn),
    "eurnn, N odd": (lambda: EURNN(7, dtype=COMPLEX), eurnn),
    "eurnn, L odd": (lambda: EURNN(6, layers=3, dtype=COMPLEX), eurnn),
    "eurnn, L = 1": (lambda: EURNN(5, layers=1, dtype=COMPLEX), eurnn),
}


def draw(chart):
    """Free parameters around the method's own start, as a tuple."""
    free = chart.sample()
    return tuple(
        p + 0.3 * torch.randn_like(p) for p in (free if isinstance(free, tuple) else (free,))
    )


@pytest.mark.parametrize("name", DEFINITIONS)
def test_is_its_definition(name):
    make, definition = DEFINITIONS[name]
    chart = make()
    free = draw(chart)
    torch.testing.assert_close(chart(*free), definition(chart, *free), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "chart",
    [URNN(7, batch=(2,), dtype=COMPLEX), EURNN(7, layers=4, batch=(2,), dtype=COMPLEX)],
    ids=repr,
)
def test_unitary_products_and_their_adjoints(chart):
    free, x = draw(chart), torch.randn(2, 3, 5, 7, dtype=COMPLEX)
    y = chart.multiply(*free, x)
    torch.testing.assert_close(y, torch.einsum("bij,bklj->bkli", chart(*free), x))
    torch.testing.assert_close(chart._times(free, y, True), x)


def test_unitary_products_never_form_the_matrix():
    # 2^15 x 2^15 complex64 would take 8 GiB.
    x = torch.randn(2, 2**15, dtype=torch.complex64)
    for chart in (URNN(2**15), EURNN(2**15, layers=4)):
        torch.testing.assert_close(
            chart.multiply(*chart.sample(), x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("size", [0, 1e-42])
def test_urnn_has_finite_gradients_of_zero_and_denormal_vectors(size):
    chart = URNN(6, dtype=torch.complex64)
    phase, v = chart.sample()
    v = (v * size).requires_grad_()
    (gradient,) = torch.autograd.grad(chart(phase, v).real.sum(), v)
    assert gradient.isfinite().all()


def fit(chart, target, steps=400):
    """How near LBFGS, a gradient descent, brings the map to a matrix."""
    free = [p.requires_grad_() for p in chart.sample()]
    optimizer = torch.optim.LBFGS(
        free, max_iter=steps, history_size=50, line_search_fn="strong_wolfe", tolerance_change=1e-16
    )

    def loss():
        optimizer.zero_grad()
        value = (chart(*free) - target).abs().square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (chart(*free) - target).abs().max().item()


@pytest.mark.slow
def test_eurnn_reaches_every_unitary_and_urnn_does_not():
    target = cwy.init.haar(8, dtype=COMPLEX)
    assert sum(p.numel() for p in EURNN(8).sample()) == 8**2, (
        "as many angles as U(N) has dimensions"
    )
    assert fit(EURNN(8, dtype=COMPLEX), target) < 1e-4
    assert min(fit(URNN(8, dtype=COMPLEX), target) for _ in range(4)) > 1e-2
    assert min(fit(EURNN(8, layers=6, dtype=COMPLEX), target) for _ in range(2)) > 1e-2


def test_dtriv_moves_its_base_and_nothing_else():
    model = nn.Sequential(
        *(cwy.orthogonal(nn.Linear(6, 6, dtype=REAL), method="dtriv") for _ in range(2)),
        nn.Linear(6, 6),
    )
    free = [layer.parametrizations.weight.original for layer in model[:2]]
    with torch.no_grad():
        for x in free:
            x.normal_()
    bases = [layer.parametrizations.weight[0].base.clone() for layer in model[:2]]
    weights = [layer.weight.detach().clone() for layer in model[:2]]
    expected = [base @ series(skew(x)) for base, x in zip(bases, free, strict=True)]
    moved = move_bases(model)
    assert all(a is b for a, b in zip(moved, free, strict=True))
    for layer, x, weight, base in zip(model, free, weights, expected, strict=False):
        assert not x.any()
        assert x.is_leaf
        torch.testing.assert_close(layer.parametrizations.weight[0].base, base, atol=1e-12, rtol=0)
        torch.testing.assert_close(layer.weight.detach(), weight, atol=1e-12, rtol=0)


def test_dtriv_stays_orthogonal_over_many_moves():
    layer = cwy.orthogonal(nn.Linear(12, 12), method="dtriv")
    for _ in range(500):
        with torch.no_grad():
            layer.parametrizations.weight.original.normal_()
        move_bases(layer)
    assert cwy.orthogonality_error(layer.weight) <= 1e-6


@pytest.mark.parametrize("make", [EXPRNN, DTRIV])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 33])
def test_float32_gradients_of_exponentials_are_exact(make, n):
    for size in (1e-3, 0.3, 1, 3, 30):
        x = (size * torch.randn(n, n)).requires_grad_()
        wide = x.detach().double().requires_grad_()
        chart, z = make(n), torch.randn(n, n)
        (found,) = torch.autograd.grad(chart(x), x, z)
        (truth,) = torch.autograd.grad(torch.linalg.matrix_exp(skew(wide)), wide, z.double())
        assert (found - truth).norm() <= 3e-7 * z.norm()


@pytest.mark.parametrize("make", [EXPRNN, DTRIV])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_batches_of_gradients_of_exponentials(make, batch):
    chart = make(4, batch=batch, dtype=REAL)
    x = torch.randn(*batch, 4, 4, dtype=REAL, requires_grad=True)
    assert torch.autograd.gradcheck(chart, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(chart, x, check_batched_grad=True)
    q, z = chart(x), torch.randn(3, *batch, 4, 4, dtype=REAL)
    looped = torch.stack([torch.autograd.grad(q, x, one, retain_graph=True)[0] for one in z])
    pulled = torch.func.vjp(chart, x)[1]
    torch.testing.assert_close(torch.vmap(pulled)(z)[0], looped)


@pytest.mark.parametrize("make", [EXPRNN, DTRIV])
@pytest.mark.parametrize("dtype", [torch.float32, REAL])
def test_exponentials_of_huge_arguments_stay_in_the_group_or_raise(make, dtype):
    chart = make(5, dtype=dtype)
    for size in (1e3, 1e4, 1e5, 1e6, 3e6):
        weight = chart(size * torch.randn(5, 5, dtype=dtype))
        assert cwy.orthogonality_error(weight) <= 8 * torch.finfo(dtype).eps
    for x in (1e10 * torch.randn(5, 5, dtype=dtype), torch.full((5, 5), math.inf, dtype=dtype)):
        with pytest.raises(ValueError, match="norm of A"):
            chart(x)
        assert torch.vmap(chart)(x[None]).isnan().all()


@pytest.mark.parametrize("n", [128, 200])
@pytest.mark.parametrize("size", [0.3, 10, 1e3])
def test_a_state_keeps_its_norm_by_exponentials_in_float32(n, size):
    """1e-4 over 1,000 linear steps, also from parameters that training has made large."""
    h = start = torch.randn(4, n)
    weight = EXPRNN(n)(size * torch.randn(n, n))
    for _ in range(1000):
        h = h @ weight.mT
    torch.testing.assert_close(h.norm(dim=-1), start.norm(dim=-1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("negatives", range(5))
def test_scornn_determinant(negatives):
    weight = cwy.orthogonal(nn.Linear(4, 4), method="scornn", negatives=negatives).weight
    assert torch.linalg.det(weight).item() == pytest.approx((-1) ** negatives, abs=1e-5)


def test_own_columns_have_zero_mean():
    weight = cwy.orthogonal(nn.Conv2d(3, 8, 3), method="own").weight.flatten(1)
    assert cwy.orthogonality_error(weight) <= 1e-6
    assert weight.mean(1).abs().max() <= 1e-7
    # N = M + 1 leaves one matrix up to signs and order, and V is far from orthonormal.
    assert cwy.orthogonality_error(OWN(65, 64)(torch.randn(65, 64))) <= 1e-6


def test_own_has_derivatives_where_singular_values_are_equal():
    chart = OWN(6, 3, dtype=REAL)
    v = chart(chart.sample()).detach().requires_grad_()
    torch.testing.assert_close(torch.linalg.svdvals(v), torch.ones(3, dtype=REAL))
    assert torch.autograd.gradcheck(chart, v, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(chart, v, check_fwd_over_rev=True)
    # The derivative of the polar factor at an orthonormal point is the projection onto the
    # tangent space.
    z = torch.randn(6, 3, dtype=REAL)
    z = z - z.mean(0)
    (grad,) = torch.autograd.grad(chart(v), v, z)
    torch.testing.assert_close(grad, z - v @ (v.mT @ z + z.mT @ v) / 2)


def test_own_refuses_a_rank_below_m():
    chart, v = OWN(5, 2), torch.randn(5, 1).repeat(1, 2)
    with pytest.raises(ValueError, match="rank below M"):
        chart(v)
    assert torch.compile(chart, fullgraph=True, backend="aot_eager")(v).isnan().all()


def planes(*angles):
    """Rotations by these angles, in random planes."""
    a = torch.zeros(2 * len(angles), 2 * len(angles), dtype=REAL)
    for i, angle in enumerate(angles):
        a[2 * i, 2 * i + 1] = angle
    p = cwy.init.haar(len(a), dtype=REAL)
    return p @ torch.linalg.matrix_exp(skew(a)) @ p.mT


def near(size, n=12):
    return torch.linalg.matrix_exp(size * skew(torch.randn(n, n, dtype=REAL)))


def haar(n, determinant):
    q = cwy.init.haar(n, dtype=REAL)
    q[0] *= determinant * torch.linalg.det(q).sign()
    return q


PI = math.pi
ROTATIONS = {
    "identity": lambda: eye(9),
    "1 x 1": lambda: eye(1),
    "minus identity": lambda: -eye(8),
    "minus identity in 2": lambda: -eye(2),
    "cyclic shift": lambda: eye(9).roll(1, 0),
    "two swaps": lambda: eye(8)[[1, 0, 3, 2, 4, 5, 6, 7]],
    "equal angles": lambda: planes(1.3, 1.3, 1.3, -1.3),
    "nearly equal angles": lambda: planes(1, 1 + 1e-6, 1 + 1e-9, 1 + 1e-13, -1),
    "half turns": lambda: planes(PI, PI, PI, 0, 0),
    "nearly half turns": lambda: planes(
        PI, PI - 1e-15, PI - 1e-12, PI - 1e-10, PI - 1e-7, PI - 1e-3
    ),
    "up to half a turn": lambda: planes(*torch.linspace(0, PI, 16).tolist()),
    "Haar": lambda: haar(190, 1),
    "identity + 1e-4": lambda: near(1e-4),
    "identity + 1e-8": lambda: near(1e-8),
    "minus identity + 1e-4": lambda: -near(1e-4),
    "minus identity + 1e-8": lambda: -near(1e-8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [EXPRNN, DTRIV, SCORNN])
@pytest.mark.parametrize("name", ROTATIONS)
def test_inverts_every_rotation(name, make, dtype):
    q = ROTATIONS[name]().to(dtype)
    chart = make(len(q), dtype=dtype)
    free = chart.right_inverse(q)
    bound = 5e-6 if dtype == torch.float32 else 1e-12
    assert (chart(free) - q).abs().max() <= bound
    # Scaling and squaring adds up rounding with the norm of A.
    assert cwy.orthogonality_error(chart(free)) <= (4 * bound if make is EXPRNN else bound)
    assert free.abs().max() <= {EXPRNN: PI + 1e-6, DTRIV: 0, SCORNN: 1e3}[make]


@pytest.mark.parametrize("make", [DTRIV, SCORNN])
@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_inverts_reflections_too(make, n):
    batch = torch.stack([haar(n, 1), haar(n, -1), eye(n).flip(0), -eye(n)])
    chart = make(n, batch=(4,), dtype=REAL)
    torch.testing.assert_close(chart(chart.right_inverse(batch)), batch, atol=1e-12, rtol=0)


def test_scornn_keeps_its_signs_where_they_serve():
    chart = SCORNN(6, negatives=2, dtype=REAL)
    before, x = chart.signs.clone(), draw(chart)[0]
    torch.testing.assert_close(skew(chart.right_inverse(chart(x))), skew(x))
    assert torch.equal(chart.signs, before)
    chart.right_inverse(-chart(torch.zeros(6, 6, dtype=REAL)))
    assert torch.equal(chart.signs, -before)


def complex_layer(method, **options):
    return cwy.orthogonal(nn.Linear(4, 4, dtype=torch.complex64), method=method, **options)


def linear(method, n=4, m=4, **options):
    return cwy.orthogonal(nn.Linear(m, n), method=method, **options)


ERRORS = [
    (
        lambda: EXPRNN(3).right_inverse(torch.eye(3).flip(0)),
        ValueError,
        ["determinant is -1", "Flip the sign", "'cwy'"],
    ),
    (lambda: OWN(4, 2).right_inverse(torch.eye(4, 2)), ValueError, ["zero mean", "0.5", "'tcwy'"]),
    (lambda: linear("own", 6, 3, init="identity"), ValueError, ["zero mean"]),
    (
        lambda: linear("urnn"),
        ValueError,
        ["'urnn' serves complex weights", "torch.float32", "'cwy'"],
    ),
    (lambda: linear("own"), ValueError, ["'own' serves tall weights", "4 x 4"]),
    (lambda: linear("scornn", negatives=5), ValueError, ["negatives", "between 0 and 4", "got 5"]),
    (lambda: linear("exprnn", reflections=2), TypeError, ["no option 'reflections'", "no options"]),
    (lambda: complex_layer("eurnn", layers=5), ValueError, ["layers", "between 1 and 4", "got 5"]),
    (
        lambda: complex_layer("eurnn", init="henaff"),
        ValueError,
        ["no inverse", "init must be 'random'", "'hr'"],
    ),
    (
        lambda: complex_layer("urnn", init="identity"),
        ValueError,
        ["subset of U(N)", "no matrix can be assigned", "'cwy'"],
    ),
    (lambda: complex_layer("scornn"), ValueError, ["'scornn' serves real weights", "complex64"]),
    (lambda: EXPRNN(4, dtype=torch.complex64), TypeError, ["real dtype", "complex64"]),
    (lambda: OWN(4, 2, dtype=torch.complex64), TypeError, ["real dtype", "complex64"]),
    (lambda: URNN(4, dtype=torch.float32), TypeError, ["complex dtype", "float32"]),
    (lambda: DTRIV(4, 3), ValueError, ["DTRIV is square", "TCWY"]),
    (lambda: OWN(4), ValueError, ["zero mean", "CWY"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS)
def test_errors(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make",
    [EXPRNN, DTRIV, SCORNN, lambda n: OWN(n, n // 2)],
    ids=["exprnn", "dtriv", "scornn", "own"],
)
def test_flags_change_nothing(make, compiled, device):
    chart = make(96).to(device)
    x = torch.randn_like(chart.sample()) / 10

    def gradient(call, x):
        x = x.clone().requires_grad_()
        weight = call(x)
        (weight * torch.arange(96, dtype=x.dtype, device=device)[:, None]).sum().backward()
        return weight, x.grad

    truth = gradient(chart, x.double())
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast(device, dtype=torch.bfloat16):
            ours = gradient(
                torch.compile(chart, fullgraph=True, backend="aot_eager") if compiled else chart, x
            )
    finally:
        torch.set_float32_matmul_precision("highest")
    assert cwy.orthogonality_error(ours[0]) <= 5e-6
    for a, b in zip(ours, truth, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize(
    "op", [torch.ops.cwy.matrix_exp, torch.ops.cwy.cayley, torch.ops.cwy.matrix_exp_slope]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_ops_are_well_registered(op, device):
    count = 2 if op is torch.ops.cwy.matrix_exp_slope else 1
    args = tuple(
        torch.randn(2, 4, 4, dtype=REAL, device=device, requires_grad=True) for _ in range(count)
    )
    torch.library.opcheck(op.default, args)
    assert torch.autograd.gradcheck(op, args, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(op, args, check_fwd_over_rev=True)


# With N = M + 1 the map bends too much for the differences that these checks take.
@pytest.mark.parametrize("name", [name for name in DEFINITIONS if "M + 1" not in name])
def test_transforms_and_higher_derivatives(name):
    chart = DEFINITIONS[name][0]()
    free = tuple(p.requires_grad_() for p in draw(chart))
    assert torch.autograd.gradcheck(chart, free, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(chart, free, check_fwd_over_rev=True)
    pair = tuple(torch.stack([p, p.flip(-1)]).detach() for p in free)
    torch.testing.assert_close(
        torch.vmap(chart)(*pair)[1], chart(*(p[1] for p in pair)), atol=1e-12, rtol=0
    )
