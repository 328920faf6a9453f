"""The front door: every layer, initial values, determinants, and errors that help."""

import copy
import math

import pytest
import torch
from torch import nn

import cwy
from tests.helpers.largest import Largest

LAYERS = [
    (lambda: nn.Linear(6, 6), "weight"),
    (lambda: nn.Linear(9, 4), "weight"),
    (lambda: nn.Linear(4, 9), "weight"),
    (lambda: nn.Conv1d(3, 8, 5), "weight"),
    (lambda: nn.Conv2d(4, 8, 3, groups=2), "weight"),
    (lambda: nn.Conv3d(2, 40, 2), "weight"),
    (lambda: nn.ConvTranspose2d(4, 8, 3), "weight"),
    (lambda: nn.RNNCell(3, 7), "weight_hh"),
    (lambda: nn.GRUCell(3, 7), "weight_hh"),
    (lambda: nn.RNN(3, 7), "weight_hh_l0"),
    (lambda: nn.Embedding(50, 8), "weight"),
    (lambda: nn.Bilinear(3, 5, 4), "weight"),
    (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight"),
]


@pytest.mark.parametrize(("make", "name"), LAYERS)
def test_every_layer(make, name):
    module = make()
    shape = getattr(module, name).shape
    assert cwy.orthogonal(module, name) is module
    weight = getattr(module, name)
    assert weight.shape == shape
    flat = weight.flatten(1) if isinstance(module, nn.modules.conv._ConvNd) else weight
    assert cwy.orthogonality_error(flat) <= 1e-5


@pytest.mark.parametrize(("make", "name"), LAYERS)
def test_the_orthogonality_error_of_a_module_and_of_its_weight(make, name):
    """Kernels are flattened as `orthogonal` does it; a module counts by its worst weight."""
    module = cwy.orthogonal(make(), name)
    assert cwy.orthogonality_error(getattr(module, name)) <= 1e-5
    model = nn.Sequential(
        module, nn.Linear(3, 3), cwy.orthogonal(nn.Linear(3, 3), method="rgd-c-c")
    )
    assert cwy.orthogonality_error(model) <= 1e-5
    with torch.no_grad():
        model[2].weight *= 3
    assert cwy.orthogonality_error(model) == pytest.approx(8, rel=1e-5)
    with pytest.raises(ValueError, match=r"Linear has no weight that cwy\.orthogonal constrains"):
        cwy.orthogonality_error(model[1])


def test_a_batch_counts_by_its_worst_matrix():
    batch = torch.eye(3).repeat(4, 1, 1)
    batch[2] *= 2
    assert cwy.orthogonality_error(batch) == 3
    assert cwy.orthogonality_error(torch.zeros(2, 3, 3)) == 1


def test_named_constraints():
    model = nn.Sequential(
        cwy.orthogonal(nn.Linear(4, 4), reflections=2),
        nn.Sequential(cwy.orthogonal(nn.Linear(4, 4, dtype=torch.complex64), method="urnn")),
        cwy.orthogonal(nn.Conv2d(2, 4, 3), method="rgd-c-c"),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    )
    model.append(model[0])
    first, second, third = cwy.named_constraints(model)

    assert first.module is model[0]
    assert first.name == "weight"
    assert first.map is model[0].parametrizations.weight[0]
    assert first.free == (model[0].parametrizations.weight.original,)

    chain = model[1][0].parametrizations.weight
    assert second.module is model[1][0]
    assert second.map is chain[0]
    assert [id(p) for p in second.free] == [id(chain.original0), id(chain.original1)]

    layer, name, chart, (free,) = third
    assert layer is model[2]
    assert name == "weight"
    assert isinstance(chart, cwy.METHODS["rgd-c-c"].build)
    assert free is layer.weight

    assert list(cwy.named_constraints(cwy.bake(model))) == []


def test_a_constraint_among_other_parametrizations():
    layer = nn.utils.parametrizations.weight_norm(cwy.orthogonal(nn.Linear(4, 4)), "bias", dim=None)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    (found,) = cwy.named_constraints(layer)
    assert found.map is layer.parametrizations.weight[0]
    assert found.free == (layer.parametrizations.weight.original,)


def test_a_fused_rnn_uses_the_constrained_weight():
    rnn, x = cwy.orthogonal(nn.RNN(3, 7, nonlinearity="relu"), "weight_hh_l0"), torch.randn(5, 2, 3)
    plain = nn.RNN(3, 7, nonlinearity="relu")
    plain.load_state_dict({n: getattr(rnn, n).detach() for n in plain.state_dict()})
    torch.testing.assert_close(rnn(x)[0], plain(x)[0])
    rnn(x)[0].sum().backward()
    assert rnn.parametrizations.weight_hh_l0.original.grad.abs().max() > 0


def linear(n, m=None, **options):
    return cwy.orthogonal(nn.Linear(m or n, n, dtype=torch.float64), **options)


def det(layer):
    return round(torch.linalg.det(layer.weight).item(), 6)


def test_an_orthogonal_weight_is_kept():
    for sign in (1, -1):
        module = nn.Linear(6, 6)
        nn.init.orthogonal_(module.weight)
        with torch.no_grad():
            module.weight[0] *= sign * torch.linalg.det(module.weight).sign()
        before = module.weight.detach().clone()
        torch.testing.assert_close(
            cwy.orthogonal(module).weight.detach(), before, atol=5e-6, rtol=0
        )


def holding(q):
    """A layer without a constraint whose weight is q."""
    module = nn.Linear(q.shape[1], q.shape[0], bias=False, dtype=q.dtype)
    with torch.no_grad():
        module.weight.copy_(q)
    return module


@pytest.mark.parametrize("method", [name for name, m in cwy.METHODS.items() if m.real])
@pytest.mark.parametrize("size", [(16, 16), (16, 5), (5, 16)])
def test_a_nearly_orthogonal_weight_takes_its_polar_factor(method, size, recwarn):
    """A checkpoint that was stored in bfloat16 is as good as one in float32."""
    kind = cwy.METHODS[method].kind
    if kind not in ("any", "square" if size[0] == size[1] else "tall") or method == "own":
        pytest.skip("not for this weight")
    stored = (
        cwy.orthogonal(nn.Linear(*size[::-1], bias=False), method=method)
        .weight.detach()
        .bfloat16()
        .float()
    )
    assert cwy.orthogonality_error(stored) > 4e-4
    u, _, vh = torch.linalg.svd(stored.double(), full_matrices=False)
    for options in ({}, {"init": "nearest"}):
        kept = cwy.orthogonal(holding(stored), method=method, **options).weight
        torch.testing.assert_close(kept.double(), u @ vh, atol=2e-6, rtol=0)
    assert not recwarn.list


@pytest.mark.parametrize("options", [{}, {"init": "identity"}])
def test_few_reflections_keep_what_was_stored_in_bfloat16(options, recwarn):
    q = trained(linear(24, reflections=5, **options)).weight.detach()
    kept = cwy.orthogonal(holding(q.bfloat16().float()), reflections=5).weight
    assert cwy.orthogonality_error(kept) <= 1e-5
    assert (kept - q).abs().max() < 5e-3
    assert not recwarn.list


def unreachable():
    """A weight that two reflections do not reach."""
    return cwy.init.haar(6)


REPLACED = [
    pytest.param(
        unreachable, {"reflections": 2}, "2 reflections do not reach", id="few reflections"
    ),
    pytest.param(
        lambda: -torch.eye(5), {"method": "exprnn"}, "determinant is -1", id="determinant"
    ),
    pytest.param(lambda: 1.1 * torch.eye(5), {}, r"is 0\.21", id="further than 0.1"),
]


@pytest.mark.parametrize(("make", "options", "why"), REPLACED)
def test_a_warning_states_why_a_nearly_orthogonal_weight_is_not_kept(make, options, why, recwarn):
    q = make()
    with pytest.warns(UserWarning, match=rf"(?s){why}.*init='random'.*init='nearest'") as caught:
        layer = cwy.orthogonal(holding(q), **options)
    assert [warning.filename for warning in caught] == [__file__], "it points to the call"
    assert (layer.weight - q).abs().max() > 1e-2
    cwy.orthogonal(holding(q), init="random", **options)
    if cwy.orthogonality_error(q) > 0.1:
        layer = cwy.orthogonal(holding(q), init="nearest", **options)
        torch.testing.assert_close(layer.weight.detach(), torch.eye(5), atol=1e-6, rtol=0)
    else:
        with pytest.raises(ValueError, match=why):
            cwy.orthogonal(holding(q), init="nearest", **options)
    assert not recwarn.list


def test_a_weight_that_is_far_from_orthogonal_is_replaced_silently(recwarn):
    for far in (torch.zeros(5, 5), 2 * torch.eye(5), torch.full((5, 5), torch.nan)):
        cwy.orthogonal(holding(far))
    for columns in (128, 192, 256):
        # Entry by entry, fresh layers of torch seem nearly orthogonal.
        cwy.orthogonal(nn.Linear(64, columns))
    for singular in (torch.zeros(5, 5), torch.ones(5, 5), torch.eye(5).tril(-1)):
        with pytest.raises(ValueError, match="rank below 5"):
            cwy.orthogonal(holding(singular), init="nearest")
    q = cwy.init.haar(5, 3)
    stretched = q @ torch.diag(torch.tensor([0.2, 1.0, 7.0]))
    torch.testing.assert_close(
        cwy.orthogonal(holding(stretched), init="nearest").weight.detach(), q, atol=1e-5, rtol=0
    )
    assert not recwarn.list


@pytest.mark.parametrize("reflections", [1, 2, 5, 6])
def test_random_has_determinant_by_the_number_of_reflections(reflections):
    assert det(linear(6, reflections=reflections)) == (-1) ** reflections
    assert det(linear(6, reflections=reflections, init="random")) == (-1) ** reflections


@pytest.mark.parametrize("method", ["cwy", "hr"])
def test_a_matrix_of_either_determinant_can_be_assigned(method):
    layer = linear(5, method=method)
    for q in (torch.eye(5), -torch.eye(5), torch.eye(5)[[1, 0, 2, 3, 4]]):
        layer.weight = q.double()
        torch.testing.assert_close(layer.weight.detach(), q.double(), atol=1e-12, rtol=0)
        twin = linear(5, method=method)
        twin.load_state_dict(layer.state_dict())
        assert torch.equal(twin.weight, layer.weight), "the signs are saved"
        (layer.weight * torch.randn(5, 5)).sum().backward()
        assert layer.parametrizations.weight.original.grad.abs().max() > 0


def test_identity_is_exact_and_learns():
    for options in ({}, {"reflections": 3}):
        layer = linear(6, init="identity", **options)
        assert torch.equal(layer.weight, torch.eye(6, dtype=torch.float64))
        target = torch.linalg.matrix_exp(
            0.3 * (torch.ones(6, 6).triu(1) - torch.ones(6, 6).tril(-1))
        ).double()
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
        first = None
        for _ in range(200):
            loss = (layer.weight - target).square().sum()
            first = first or loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.item() < (1e-6 if not options else 0.7) * first
    assert torch.equal(linear(9, 4, init="identity").weight, torch.eye(9, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("init", "low", "high"),
    [("henaff", -math.pi, math.pi), ("helfrich", 0, math.pi / 2), ("helfrich-exp", 0, 1)],
)
@pytest.mark.parametrize(("n", "reflections"), [(6, None), (7, None), (7, 4), (7, 5)])
def test_plane_rotations(init, low, high, n, reflections):
    weight = linear(n, init=init, reflections=reflections).weight.detach()
    planes = (reflections or n) // 2
    for k in range(planes):
        block = weight[2 * k : 2 * k + 2, 2 * k : 2 * k + 2]
        angle = torch.atan2(block[0, 1], block[0, 0])
        expected = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()]).reshape(2, 2)
        torch.testing.assert_close(block, expected, atol=1e-12, rtol=0)
        assert low <= angle <= high
    torch.testing.assert_close(
        weight[2 * planes :, 2 * planes :], torch.eye(n - 2 * planes, dtype=torch.float64)
    )


@pytest.mark.parametrize("seed", range(4))
def test_haar_serves_rotations_whatever_the_seed(seed):
    torch.manual_seed(seed)
    layer = cwy.orthogonal(nn.Linear(5, 5), method="exprnn", init="haar")
    assert cwy.orthogonality_error(layer) < 1e-5
    assert torch.linalg.det(layer.weight) > 0


def test_haar_is_uniform():
    # The trace of a Haar matrix has mean 0 and variance 1; complex, E|trace|² = 1.
    for dtype in (torch.float64, torch.complex128):
        trace = cwy.init.haar(4, 4, batch=(4000,), dtype=dtype).diagonal(dim1=-2, dim2=-1).sum(-1)
        assert trace.mean().abs() < 0.06
        assert trace.abs().square().mean().item() == pytest.approx(1, abs=0.08)


def trained(layer):
    """Away from its start, by a few steps towards a random matrix."""
    target = torch.randn_like(layer.weight)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        (layer.weight - target).abs().square().sum().backward()
        optimizer.step()
    return layer


@pytest.mark.parametrize(("n", "reflections"), [(6, 3), (12, 3), (9, 8), (40, 8)])
def test_few_reflections_with_signs_are_found_again(n, reflections):
    """A start at the identity has signs; what is trained from there survives bake and a new
    constraint.
    """
    layer = trained(linear(n, init="identity", reflections=reflections))
    weight = layer.weight.detach().clone()
    layer.weight = weight
    torch.testing.assert_close(layer.weight.detach(), weight, atol=1e-10, rtol=0)
    again = cwy.orthogonal(cwy.bake(layer), reflections=reflections)
    torch.testing.assert_close(again.weight.detach(), weight, atol=1e-10, rtol=0)


def test_one_complex_reflection_is_found_again():
    layer = trained(
        cwy.orthogonal(nn.Linear(6, 6, dtype=torch.complex128), reflections=1, init="identity")
    )
    with torch.no_grad():
        layer.parametrizations.weight.original1.fill_(1)
    weight = layer.weight.detach().clone()
    layer.weight = weight
    torch.testing.assert_close(layer.weight.detach(), weight, atol=1e-10, rtol=0)


def test_the_complex_identity_is_exact():
    layer = cwy.orthogonal(nn.Linear(6, 6, dtype=torch.complex64), init="identity")
    assert torch.equal(layer.weight, torch.eye(6, dtype=torch.complex64))


def test_bake_cuts_the_old_optimizer_off():
    layer = linear(6, reflections=2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    weight = cwy.bake(layer).weight.detach().clone()
    optimizer.step()
    assert torch.equal(layer.weight, weight)
    layer(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad.shape == (6, 6)


def test_an_old_gradient_is_not_taken_for_that_of_the_vectors():
    module = nn.Linear(6, 6)
    module(torch.ones(2, 6)).sum().backward()
    cwy.orthogonal(module, reflections=2)(torch.ones(2, 6)).sum().backward()
    assert module.parametrizations.weight.original.grad.shape == (6, 2)


def test_init_on_the_meta_device():
    with torch.device("meta"):
        layer = cwy.orthogonal(nn.Linear(4, 4), init="identity")
    layer.to_empty(device="cpu").load_state_dict(
        cwy.orthogonal(nn.Linear(4, 4), init="identity").state_dict()
    )
    assert torch.equal(layer.weight, torch.eye(4))


def test_init_may_be_a_matrix():
    q = torch.linalg.qr(torch.randn(5, 5)).Q
    layer = cwy.orthogonal(nn.Linear(5, 5), init=q)
    torch.testing.assert_close(layer.weight.detach(), q, atol=5e-6, rtol=0)
    exact = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    flipped = exact.numpy()[::-1]
    for array in (q.numpy(), exact.numpy(), flipped):
        array.flags.writeable = False
        layer = cwy.orthogonal(nn.Linear(5, 5), init=array)
        torch.testing.assert_close(
            layer.weight.detach(), torch.tensor(array.copy()).float(), atol=5e-6, rtol=0
        )


def test_a_very_tall_weight_never_makes_an_n_by_n_object():
    module, q = nn.Linear(50, 30000, bias=False), torch.linalg.qr(torch.randn(30000, 50)).Q
    with Largest() as seen:
        cwy.orthogonal(module)
        module.weight.square().sum().backward()
        module.weight = q
    assert seen.largest <= 30000 * 50
    assert cwy.orthogonality_error(module.weight) <= 1e-5


def test_complex_weights_reach_every_unitary():
    q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.complex128)).Q
    layer = cwy.orthogonal(nn.Linear(6, 6, dtype=torch.complex128))
    layer.weight = q
    torch.testing.assert_close(layer.weight.detach(), q, atol=1e-12, rtol=0)
    tall = cwy.orthogonal(nn.Linear(3, 6, dtype=torch.complex128))
    tall.weight = q[:, :3]
    torch.testing.assert_close(tall.weight.detach(), q[:, :3], atol=1e-12, rtol=0)


def test_bake_then_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = nn.Sequential(
        cwy.orthogonal(nn.Linear(6, 6)),
        nn.ReLU(),
        cwy.orthogonal(nn.Conv1d(4, 8, 3), method="tcwy"),
    )
    model = cwy.bake(model).eval()
    x = torch.randn(2, 4, 6)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x), atol=1e-5, rtol=0)


def test_bake_leaves_other_parametrizations_alone():
    layer = cwy.orthogonal(nn.Linear(4, 4))
    nn.utils.parametrizations.weight_norm(layer, "bias", dim=None)
    twin = copy.deepcopy(layer)
    cwy.bake(layer)
    assert list(layer.parametrizations) == ["bias"]
    assert set(twin.parametrizations) == {"weight", "bias"}
    assert torch.equal(layer(torch.ones(4)), twin(torch.ones(4)))


ERRORS = [
    (lambda: cwy.orthogonal(torch.ones(2, 2)), TypeError, ["torch.nn.Module", "Tensor"]),
    (lambda: cwy.orthogonal(nn.Linear(3, 3), "bias"), ValueError, ["bias", "matrix", "(3,)"]),
    (lambda: cwy.orthogonal(nn.Linear(3, 3), "wieght"), ValueError, ["wieght", "It has weight"]),
    (
        lambda: cwy.orthogonal(nn.Sequential(nn.Linear(3, 3))),
        ValueError,
        ["Sequential", "Pass the layer"],
    ),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 3), method="cvy"),
        ValueError,
        ["'cvy'", "Did you mean 'cwy'"],
    ),
    (lambda: cwy.orthogonal(nn.Linear(3, 3), method="tensor"), ValueError, ["Registered: cwy"]),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 3), reflections=4),
        ValueError,
        ["reflections", "between 1 and 3", "got 4"],
    ),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 3), reflections=0),
        ValueError,
        ["between 1 and 3", "got 0"],
    ),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 5), reflections=2),
        ValueError,
        ["exactly M = 3", "got 2"],
    ),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 3), method="tcwy", reflections=2),
        ValueError,
        ["exactly M = 3", "CWY or HR"],
    ),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 3), reflections=2.0),
        ValueError,
        ["whole number", "got 2.0"],
    ),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 3), reflections=True),
        ValueError,
        ["whole number", "got True"],
    ),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 3), init=[[1.0]]),
        ValueError,
        ["unknown init", "torch.Tensor or a NumPy array"],
    ),
    (lambda: cwy.orthogonal(nn.LazyLinear(3)), ValueError, ["no shape yet", "Run the module once"]),
    (lambda: cwy.orthogonal(nn.Linear(3, 3), method="CWY"), ValueError, ["Did you mean 'cwy'"]),
    (lambda: cwy.init.haar(3, 5), ValueError, ["haar", "3 x 5"]),
    (lambda: cwy.bake(3), TypeError, ["bake", "torch.nn.Module", "int"]),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 3), reflection=2),
        TypeError,
        ["'reflection'", "Did you mean 'reflections'"],
    ),
    (lambda: cwy.orthogonal(nn.Linear(3, 3), init="harr"), ValueError, ["'harr'", "'haar'"]),
    (
        lambda: cwy.orthogonal(nn.Linear(3, 5), init="henaff"),
        ValueError,
        ["henaff", "square", "5 x 3"],
    ),
    (
        lambda: cwy.orthogonal(nn.Linear(5, 5), init="haar", reflections=2),
        ValueError,
        ["haar", "2 reflections"],
    ),
    (
        lambda: cwy.orthogonal(nn.Linear(5, 5), init=torch.ones(5, 5)),
        ValueError,
        ["n=5", "is 5"],
    ),
    (
        lambda: cwy.orthogonal(cwy.orthogonal(nn.Linear(3, 3))),
        ValueError,
        ["parametrized already", "cwy.bake"],
    ),
    (lambda: cwy.parametrizations.CWY(4, 3), ValueError, ["CWY is square", "TCWY"]),
    (lambda: cwy.parametrizations.TCWY(3, 4), ValueError, ["M <= N"]),
    (lambda: cwy.METHODS["cwyy"], ValueError, ["'cwy'"]),
    (
        lambda: cwy.orthogonality_error(torch.eye(3).to_sparse()),
        TypeError,
        ["orthogonality_error", "dense"],
    ),
    (
        lambda: cwy.orthogonality_error(torch.empty(3, 3, device="meta")),
        ValueError,
        ["orthogonality_error", "meta"],
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS)
def test_errors(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_integer_weights_are_refused():
    module = nn.Linear(3, 3)
    module.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.long), requires_grad=False)
    with pytest.raises(TypeError, match=r"int64.*\.float\(\)"):
        cwy.orthogonal(module)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.full((5, 5), torch.nan), "NaN"),
        (2 * torch.eye(5), "is 3"),
        (torch.eye(4), r"\(5, 5\).*\(4, 4\)"),
        (torch.linalg.qr(torch.randn(5, 5)).Q, "2 reflections"),
        (torch.eye(5) * 1j, "real and can't become"),
    ],
)
def test_a_bad_assignment_is_refused_and_changes_nothing(value, words):
    layer = cwy.orthogonal(nn.Linear(5, 5), reflections=2)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=words):
        layer.weight = value
    for key, old in before.items():
        assert torch.equal(layer.state_dict()[key], old)


def test_an_error_leaves_the_module_as_it_was():
    module = nn.Linear(5, 5)
    before = module.weight
    with pytest.raises(ValueError, match="haar"):
        cwy.orthogonal(module, init="haar", reflections=2)
    assert module.weight is before
    assert type(module) is nn.Linear
