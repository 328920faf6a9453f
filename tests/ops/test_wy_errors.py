"""Bad input gets an error that names the call, what came, what is allowed and what to do."""

import pytest
import torch

import cwy
from cwy.ops import cwy_matrix, cwy_multiply, householder_vectors, tcwy_matrix, wy_factors

HAAR = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q


def layer(weight, method="cwy", **options):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return cwy.orthogonal(module, method=method, **options)


CASES = [
    (lambda: cwy_matrix([[1.0]]), TypeError, ["cwy_matrix", "torch.Tensor", "list"]),
    (lambda: cwy_matrix(torch.ones(3)), ValueError, ["cwy_matrix", "(*, N, L)", "(3,)"]),
    (
        lambda: wy_factors(torch.ones(3, 2, dtype=torch.long)),
        TypeError,
        ["wy_factors", "int64", ".float()"],
    ),
    (
        lambda: tcwy_matrix(torch.ones(2, 3)),
        ValueError,
        ["tcwy_matrix", "N = 2, M = 3", "Transpose"],
    ),
    (
        lambda: cwy_matrix(torch.ones(3, 2), signs=torch.ones(2)),
        ValueError,
        ["cwy_matrix", "signs", "(3,)", "(2,)"],
    ),
    (
        lambda: cwy_matrix(torch.ones(3, 2), signs=[1, 1, 1]),
        TypeError,
        ["cwy_matrix", "signs", "Tensor", "list"],
    ),
    (
        lambda: cwy_matrix(torch.ones(3, 2), signs=torch.ones(3, device="meta")),
        ValueError,
        ["cwy_matrix", "signs", "cpu", "meta"],
    ),
    (
        lambda: tcwy_matrix(torch.ones(5, 3, 2), signs=torch.ones(2)),
        ValueError,
        ["tcwy_matrix", "signs", "(5, 2)", "(2,)"],
    ),
    (
        lambda: cwy_multiply(torch.ones(4, 2), torch.ones(4, 3)),
        ValueError,
        ["cwy_multiply", "(4, 2)", "(4, 3)"],
    ),
    (
        lambda: cwy_multiply(torch.ones(6, 4, 2), torch.ones(5, 4)),
        ValueError,
        ["cwy_multiply", "(6, '...', 4)"],
    ),
    (
        lambda: cwy_matrix(torch.ones(3, 2), backend="triton"),
        ValueError,
        ["wy", '"triton"', '"analytic"'],
    ),
    (
        lambda: cwy_matrix(torch.ones(3, 2, dtype=torch.float64), backend="cuda"),
        ValueError,
        ["wy", "on cpu", "float64"],
    ),
    (
        lambda: cwy_multiply(wy_factors(torch.ones(3, 2)), torch.ones(3), backend="cuda"),
        ValueError,
        ["cwy_multiply", '"cuda"'],
    ),
    (lambda: householder_vectors(torch.ones(3)), ValueError, ["householder_vectors", "(3,)"]),
    (lambda: householder_vectors(torch.eye(3).long()), TypeError, ["householder_vectors", "int64"]),
    (lambda: householder_vectors(torch.eye(2, 3)), ValueError, ["N = 2, M = 3", "transpose"]),
    (lambda: householder_vectors(torch.full((2, 2), torch.nan)), ValueError, ["NaN"]),
    (
        lambda: householder_vectors(2 * torch.eye(3)),
        ValueError,
        ["not orthogonal", "is 3", "linalg.qr"],
    ),
    (lambda: householder_vectors(torch.eye(3), 4), ValueError, ["between 1 and 3", "got 4"]),
    (lambda: householder_vectors(torch.eye(3), 0), ValueError, ["between 1 and 3", "got 0"]),
    (
        lambda: householder_vectors(torch.eye(3, 2), 1),
        ValueError,
        ["2, the number of columns", "got 1"],
    ),
    (
        lambda: householder_vectors(HAAR, 2),
        ValueError,
        ["2 reflections do not reach", "reflections=5"],
    ),
    (
        lambda: householder_vectors(1e160 * torch.eye(3, dtype=torch.float64)),
        ValueError,
        ["householder_vectors", "float64"],
    ),
    (
        lambda: householder_vectors(torch.full((2, 2), 1e160, dtype=torch.float64)),
        ValueError,
        ["householder_vectors", "float64"],
    ),
    (lambda: householder_vectors(torch.eye(3, device="meta")), ValueError, ["meta", "no values"]),
    (lambda: householder_vectors(torch.eye(3).to_sparse()), TypeError, ["sparse", ".to_dense()"]),
    (
        lambda: wy_factors(torch.ones(3, 2).to(torch.float8_e4m3fn)),
        TypeError,
        ["wy_factors", "float8", ".float()"],
    ),
    (
        lambda: cwy_matrix(torch.ones(3, 2).to_sparse()),
        TypeError,
        ["cwy_matrix", "sparse", ".to_dense()"],
    ),
    (
        lambda: cwy_matrix(torch.nested.nested_tensor([torch.ones(3, 2)])),
        TypeError,
        ["cwy_matrix", "nested", "padded"],
    ),
    (
        lambda: cwy_multiply(torch.ones(3, 2), torch.ones(3).to_sparse()),
        TypeError,
        ["cwy_multiply", "x", "sparse"],
    ),
    (
        lambda: cwy_multiply(torch.ones(3, 2), torch.ones(3, device="meta")),
        ValueError,
        ["cwy_multiply", "cpu", "meta"],
    ),
    (
        lambda: cwy_matrix(torch.ones(3, 2), signs=torch.full((3,), 0.5)),
        ValueError,
        ["signs", "±1", "0.5", "sgn"],
    ),
    (
        lambda: cwy_matrix(torch.ones(3, 2), signs=torch.full((3,), torch.nan)),
        ValueError,
        ["signs", "nan"],
    ),
    (
        lambda: tcwy_matrix(torch.ones(3, 2), signs=torch.tensor([1j, 2j])),
        ValueError,
        ["signs", "modulus 1", "2j"],
    ),
    (
        lambda: cwy_matrix(torch.ones(3, 2), signs=torch.ones(3).bool()),
        TypeError,
        ["signs", "bool"],
    ),
    (
        lambda: layer(torch.ones(3, 3).to(torch.float8_e4m3fn)),
        TypeError,
        ["orthogonal", "weight", "float8"],
    ),
    (lambda: layer(torch.eye(3).to_sparse()), TypeError, ["orthogonal", "weight", "sparse"]),
    (
        lambda: layer(torch.nested.nested_tensor([torch.eye(3)])),
        TypeError,
        ["orthogonal", "weight", "nested"],
    ),
    (
        lambda: layer(torch.ones(3, 1).expand(3, 3), "rgd"),
        ValueError,
        ["'rgd'", "share memory", "clone"],
    ),
    (
        lambda: layer(torch.eye(3), init=torch.eye(3, device="meta")),
        ValueError,
        ["meta", "no values"],
    ),
    (lambda: cwy.orthogonality_error(torch.ones(3)), ValueError, ["orthogonality_error", "(3,)"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), CASES)
def test_errors(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_a_named_backend_serves_or_raises():
    v = torch.randn(4, 2)
    with pytest.raises(ValueError, match=r"torch\.func transform"):
        torch.func.vmap(lambda v: cwy_matrix(v, backend="analytic"))(v.expand(2, 4, 2))


@pytest.mark.parametrize("method", ["cwy", "hr", "tcwy", "scornn"])
@pytest.mark.parametrize("value", [0.5, float("nan"), 0.0])
def test_a_state_dict_with_other_signs_is_refused(method, value):
    module = layer(torch.eye(3), method)
    state = {key: x.clone() for key, x in module.state_dict().items()}
    key = "parametrizations.weight.0.signs"
    before = state[key].clone()
    state[key][1] = value
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="signs must be ±1"):
            module.load_state_dict(state, strict=strict)
    assert torch.equal(module.state_dict()[key], before)
