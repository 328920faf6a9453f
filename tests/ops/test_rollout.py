"""The recurrence: every backend, nonlinearity, memory mode and layout against the definition in
float64.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from cwy.nn import OrthogonalRNN
from cwy.ops import WY, cwy_matrix, rollout, wy_factors
from cwy.ops.recurrence import factors as forms
from cwy.ops.recurrence.nonlinearities import NONLINEARITIES
from cwy.ops.recurrence.steps import TORCH
from cwy.ops.recurrence.transition import Formed, LowRank
from cwy.testing import assert_as_close
from tests.helpers.recurrence import double, problem, run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize(
    ("n", "batch", "steps"),
    [
        (1, 1, 1),
        (1, 130, 257),
        (7, 3, 2),
        (7, 130, 257),
        (33, 1, 257),
        (190, 130, 3),
        (33, 130, 17),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "cudnn"])
def test_backends_are_as_accurate_as_plain_torch(backend, n, batch, steps, nonlinearity, device):
    if backend == "cudnn" and (nonlinearity not in ("relu", "tanh") or device == "cpu"):
        pytest.skip("what it can't serve raises, which another test checks")
    given = problem(n, batch, steps, device=device)
    truth = run(double(given), nonlinearity, backend="reference")
    plain = run(given, nonlinearity, backend="reference")
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is filled with NaN
    try:
        ours = run(given, nonlinearity, backend=backend, strided=True)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, p, t in zip(ours, plain, truth, strict=True):
        # cuDNN approximates tanh: over few steps that is far more than float32's rounding. It
        # adds up all steps in float32.
        assert_as_close(
            a, p, t, factor=2 if backend == "torch" else 200 if nonlinearity == "tanh" else 8
        )


def layouts():
    for f, memory, last, factors, packed in itertools.product(
        NONLINEARITIES,
        ("store", "checkpoint", "reversible"),
        (False, True),
        (False, True),
        (False, True),
    ):
        if not (memory == "reversible" and NONLINEARITIES[f].irreversible):
            yield pytest.param(
                f,
                memory,
                last,
                factors,
                packed,
                id=f"{f}-{memory}-last={last}-factors={factors}-packed={packed}",
            )


@pytest.mark.parametrize(("f", "memory", "last", "factors", "packed"), list(layouts()))
def test_every_mode_equals_the_definition(f, memory, last, factors, packed):
    given = problem(6, 5, 70, torch.float64, reflections=2)
    options = {"output": "last" if last else "all", "memory": memory}
    if packed:
        options["lengths"] = torch.tensor([70, 3, 70, 1, 65])
    ours = run(given, f, factors, **options)
    truth = run(given, f, backend="reference", **{**options, "memory": "store"})
    for a, t in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, t, atol=1e-8, rtol=1e-8)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from(["abs", "modrelu", "tanh"])
)
def test_what_lies_beyond_a_sequence_changes_nothing(lengths, f):
    given = problem(4, len(lengths), 9, torch.float64)
    ends = torch.tensor(lengths)
    beyond = torch.arange(9)[:, None] >= ends
    other = {**given, "x": given["x"].detach().masked_fill(beyond[..., None], 7.0)}
    for a, b in zip(run(given, f, lengths=ends), run(other, f, lengths=ends), strict=True):
        assert torch.equal(a, b)
    states, last = rollout(
        given["x"], given["h0"], cwy_matrix(given["v"]), given["bias"], f, lengths=ends
    )
    assert (states[beyond] == 0).all()
    assert torch.equal(last, states[ends - 1, torch.arange(len(lengths))])
    alone, _ = rollout(
        given["x"][: lengths[0], :1], given["h0"][:1], cwy_matrix(given["v"]), given["bias"], f
    )
    torch.testing.assert_close(states[: lengths[0], :1], alone)


@pytest.mark.parametrize("f", NONLINEARITIES)
def test_derivatives_of_second_order(f):
    for dtype in (torch.float64, torch.complex128):
        if dtype.is_complex and not NONLINEARITIES[f].complex:
            continue
        x = torch.randn(3, 2, 3, dtype=dtype, requires_grad=True)
        h0 = torch.randn(2, 3, dtype=dtype, requires_grad=True)
        v = torch.randn(3, 3, dtype=dtype, requires_grad=True)
        bias = torch.rand(3, dtype=torch.float64, requires_grad=True)
        call = lambda x, h0, v, bias: rollout(x, h0, cwy_matrix(v), bias, f)
        assert gradcheck(call, (x, h0, v, bias), check_forward_ad=True)
        assert gradgradcheck(call, (x, h0, v, bias))


@pytest.mark.parametrize("f", ["abs", "tanh"])
def test_transforms(f):
    given = problem(4, 3, 5, torch.float64)

    def loss(x):
        return rollout(x, given["h0"], cwy_matrix(given["v"]), given["bias"], f)[0].square().sum()

    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(loss)(x), torch.stack([loss(one) for one in x]))
    (slope,) = torch.autograd.grad(loss(given["x"]), given["x"])
    _, tangent = torch.func.jvp(loss, (given["x"].detach(),), (x[0],))
    torch.testing.assert_close(tangent, (slope * x[0]).sum())


def test_a_function_takes_the_slow_path():
    given = problem(4, 3, 5, torch.float64)
    for a, b in zip(run(given, torch.tanh), run(given, "tanh"), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="callable"):
        run(given, torch.tanh, backend="torch")


def test_the_norm_is_kept():
    """An orthogonal transition neither explodes nor vanishes: 1e-4 over 1,000 steps, 1e-3 over
    10,000.
    """
    for n, steps, bound in ((128, 1000, 1e-4), (190, 10_000, 1e-3)):
        h0 = torch.randn(2, n)
        _, last = rollout(
            torch.zeros(steps, 2, n),
            h0,
            cwy_matrix(torch.randn(n, n)),
            None,
            "identity",
            output="last",
        )
        assert ((last.norm(dim=-1) / h0.norm(dim=-1)) - 1).abs().max() <= bound


@pytest.mark.parametrize("device", DEVICES)
def test_a_transition_formed_from_factors_is_rounded_once(device):
    n = 40
    u, t = wy_factors(torch.randn(n, n, device=device))
    signs = torch.randint(0, 2, (n,), device=device).float() * 2 - 1
    rows = torch.eye(n, device=device).repeat(4, 1)  # so many that a formed Q is cheaper
    _, q = rollout(
        torch.zeros(1, 4 * n, n, device=device), rows, WY(u, t), None, "identity", signs=signs
    )
    truth = (
        torch.eye(n, dtype=torch.float64, device=device) - u.double() @ t.double() @ u.double().mT
    ) * signs.double()
    assert (q[:n].mT - truth).abs().max() <= torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize(("reflections", "form"), [(1, LowRank), (8, Formed)])
def test_a_layer_decides_once_between_the_forms(reflections, form, monkeypatch):
    questions = []
    answer = forms.factors_are_cheaper

    def ask(*question):
        questions.append(answer(*question))
        return questions[-1]

    monkeypatch.setattr(forms, "factors_are_cheaper", ask)
    layer = OrthogonalRNN(3, 8, reflections=reflections)
    layer(torch.randn(40, 2, 3))
    assert questions == [form is LowRank]
    factors = wy_factors(torch.randn(8, reflections))
    low_rank = forms.takes_low_rank(factors, 80, torch.float32)
    transition = forms.decide(factors, None, torch.float32, low_rank=low_rank)
    assert type(transition) is form


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("reflections", [1, 6])  # by factors, and formed
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_factors_with_signs_and_their_derivatives(dtype, reflections, learnt):
    u, t, x, h0 = (
        torch.randn(*s, dtype=dtype, requires_grad=True)
        for s in ((6, reflections), [reflections] * 2, (3, 4, 6), (4, 6))
    )
    signs = torch.randn(6, dtype=dtype).sgn().requires_grad_(learnt)
    call = lambda x, h0, u, t, signs: rollout(x, h0, WY(u, t), None, "identity", signs=signs)[0]
    formed = lambda x, h0, u, t, signs: rollout(
        x, h0, (torch.eye(6) - u @ t @ u.mH) * signs, None, "identity"
    )[0]
    inputs = x, h0, u, t, signs
    leaves = [p for p in inputs if p.requires_grad]
    ours, wanted = call(*inputs), formed(*inputs)
    torch.testing.assert_close(ours, wanted)
    z = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, z), torch.autograd.grad(wanted, leaves, z), strict=True
    ):
        torch.testing.assert_close(a, b)
    assert gradgradcheck(call, inputs)
    assert gradcheck(
        call,
        (x, h0, u, t, signs.detach().requires_grad_()),
        check_forward_ad=True,
        check_backward_ad=False,
    )


@pytest.mark.parametrize("reflections", [2, 6])
def test_a_compiler_takes_a_transition_of_any_layout(reflections):
    u, t, x = (
        torch.randn(*shape, requires_grad=True)
        for shape in ((6, reflections), [reflections] * 2, (5, 3, 6))
    )
    weight = torch.randn(6, 6)

    def call(x, u, t, weight):
        turned = WY(*(part.mT.contiguous().mT for part in (u, t)))
        by_factors, _ = rollout(x, x[0], turned, None, "tanh", weight=weight.mT)
        formed, _ = rollout(x, x[0], (torch.eye(6) - u @ t @ u.mT).mT, None, "tanh")
        return by_factors + formed

    slopes = [
        torch.autograd.grad(form(x, u, t, weight).sum(), (x, u, t))
        for form in (call, torch.compile(call))
    ]
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b)


def test_reversible_recovers_two_thousand_steps():
    given = problem(64, 4, 2000)
    stored = run(given, "abs", output="last")
    recovered = run(given, "abs", output="last", memory="reversible")
    for a, b in zip(recovered, stored, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


@pytest.mark.parametrize("shape", [(0, 3, 4), (5, 0, 4), (1, 1, 4)])
def test_no_steps_and_no_sequences(shape):
    x, h0 = torch.randn(shape, requires_grad=True), torch.randn(shape[1], 4, requires_grad=True)
    states, last = rollout(x, h0, cwy_matrix(torch.randn(4, 4)))
    assert states.shape == shape
    assert last.shape == h0.shape
    (states.sum() + last.sum()).backward()
    assert x.grad.shape == shape
    if shape[1] == 0:
        states, _ = rollout(x, h0, Q, lengths=torch.ones(0, dtype=torch.long))
        assert states.shape == shape


def test_no_units_and_no_inputs():
    states, last = rollout(torch.zeros(5, 3, 0), torch.zeros(3, 0), torch.zeros(0, 0), None, "tanh")
    assert (states.shape, last.shape) == ((5, 3, 0), (3, 0))
    states, _ = rollout(torch.zeros(5, 3, 0), X[0], Q, None, "tanh", weight=torch.zeros(4, 0))
    assert torch.equal(states, X)


def test_complex_signs_make_it_complex():
    x, v = torch.randn(5, 3, 4), torch.randn(4, 2)
    signs = torch.randn(4, dtype=torch.complex64).sgn()
    ours, _ = rollout(x, x[0], wy_factors(v), None, "identity", signs=signs)
    wanted, _ = rollout(x, x[0], cwy_matrix(v, signs=signs), None, "identity")
    torch.testing.assert_close(ours, wanted)
    assert cwy_matrix(v.bfloat16(), signs=signs).dtype == torch.complex64


@pytest.mark.parametrize("f", ["modrelu", "abs"])
@pytest.mark.parametrize("factors", [False, True])
def test_a_batch_of_gradients(f, factors):
    given = problem(4, 3, 5, torch.float64, reflections=1)
    q = wy_factors(given["v"]) if factors else cwy_matrix(given["v"])
    states, _ = rollout(given["x"], given["h0"], q, given["bias"], f)
    leaves, z = [*given.values()], torch.randn(2, *states.shape, dtype=torch.float64)
    together = torch.autograd.grad(states, leaves, z, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(states, leaves, one, retain_graph=True) for one in z]
    for a, *b in zip(together, *alone, strict=True):
        torch.testing.assert_close(a, torch.stack(b))


Q = torch.eye(4)
X = torch.zeros(5, 3, 4)
ERRORS = [
    (lambda: rollout(X, X[0], Q, None, "gelu"), ValueError, "unknown nonlinearity 'gelu'.*modrelu"),
    (lambda: rollout(X, X[0], Q, output="first"), ValueError, "'all' or 'last'"),
    (lambda: rollout(X, X[0], Q, memory="none"), ValueError, "'store', 'checkpoint', 'reversible'"),
    (
        lambda: rollout(X, X[0], Q, None, "tanh", memory="reversible"),
        ValueError,
        "tanh.*checkpoint",
    ),
    (
        lambda: rollout(X, X[0], Q, None, "leaky_relu", memory="reversible"),
        ValueError,
        "rounding errors by 100",
    ),
    (lambda: rollout(X, X[0], torch.eye(5)), ValueError, r"\(4, 4\).*\(5, 5\)"),
    (lambda: rollout(X, torch.zeros(2, 4), Q), ValueError, r"expected x \(T, 2, 4\)"),
    (lambda: rollout(X[0], X[0], Q), ValueError, r"x must be \(T, B, N\)"),
    (lambda: rollout(X.long(), X[0], Q), TypeError, "int64"),
    (lambda: rollout(X, X[0], Q, signs=torch.ones(4)), ValueError, "signs belong to factors"),
    (
        lambda: rollout(X.cfloat(), X[0], Q.cfloat(), None, "relu"),
        ValueError,
        "no complex form.*'modrelu'",
    ),
    (lambda: rollout(X, X[0], Q, None, "relu", backend="cudnn"), ValueError, "cudnn.*x is on cpu"),
    (lambda: rollout(X, X[0], Q, backend="cuda9"), ValueError, 'no backend "cuda9"'),
    (lambda: rollout(X, X[0], Q, torch.zeros(1)), ValueError, r"bias must be \(4,\).*\(1,\)"),
    (lambda: rollout(X, X[0], Q, torch.zeros(4) * 1j), ValueError, "bias must be real"),
    (lambda: rollout(X, X[0], Q, weight=torch.zeros(1, 4)), ValueError, r"weight must be \(4, 4\)"),
    (lambda: rollout(X, X[0], Q, lengths=[5, 9, 1]), ValueError, "from 1 to T = 5"),
    (lambda: rollout(X, X[0], Q, lengths=torch.tensor([1.5, 2, 3])), ValueError, r"1\.5"),
    (lambda: rollout(X, X[0].to("meta"), Q), ValueError, "one device, got x on cpu, h0 on meta"),
    (
        lambda: rollout(X, X[0], Q, backend="reference", memory="checkpoint"),
        ValueError,
        "autograd stores every state",
    ),
    (
        lambda: rollout(X, X[0], (Q, Q)),
        TypeError,
        "a matrix, or what wy_factors returns, got tuple",
    ),
    (lambda: rollout(X, X[0], WY(Q, Q[:2, :2])), ValueError, r"t \(L, L\).*\(4, 4\) and \(2, 2\)"),
    (lambda: rollout(X, X[0], WY(Q, Q.to("meta"))), ValueError, "one device.*on meta"),
    (
        lambda: rollout(X, X[0], WY(Q, Q), signs=[1, 1, 1, 1]),
        TypeError,
        "signs must be a torch.Tensor, got list",
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS)
def test_errors(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_the_op_is_well_registered():
    given = problem(4, 3, 5)
    q = cwy_matrix(given["v"].detach()).requires_grad_()
    for f, memory, last, half in (
        ("abs", "store", False, None),
        ("abs", "reversible", True, None),
        ("relu", "checkpoint", True, None),
        ("relu", "store", False, torch.bfloat16),
        ("abs", "checkpoint", False, torch.float16),
    ):
        x = given["x"].detach().reshape(-1, 4).to(half or torch.float32).requires_grad_()
        tensors = (x, given["h0"], [q], given["bias"], None)
        options = {
            "nonlinearity": f,
            "sizes": [3] * 5,
            "memory": memory,
            "last": last,
            "loops": TORCH.name,
            "rounded": half,
        }
        torch.library.opcheck(torch.ops.cwy.rollout.default, tensors, options)


@pytest.mark.parametrize(
    ("memory", "lengths"),
    [
        ("reversible", (140, 130, 64, 64)),
        ("reversible", (128, 128, 64, 64)),
        ("checkpoint", (300, 290, 18, 18)),
        ("checkpoint", (289, 272, 17, 5)),
        ("store", (40, 40, 40, 40)),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_of_steps_meet_sequences_that_end(memory, lengths, device, monkeypatch):
    """The path of CUDA graphs; without a GPU its blocks are run as they are, unrecorded."""
    from cwy.ops.recurrence import graphs

    if device == "cpu":
        copied = lambda fn, key, given, into: tuple(
            m if o is None else o.copy_(m) for m, o in zip(fn(*given), into, strict=True)
        )
        monkeypatch.setattr(
            graphs, "worth", lambda x, sizes: len(sizes) >= 16 and sizes[0] == sizes[-1]
        )
        monkeypatch.setattr(graphs, "replay", copied)
    given = problem(6, 4, max(lengths), torch.float64, device)
    options = {"lengths": torch.tensor(lengths), "output": "last"}
    truth = run(given, "abs", backend="reference", **options)
    for ours, theirs in zip(
        run(given, "abs", memory=memory, backend="torch", **options), truth, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-8)


def test_complex_modrelu_is_accurate_where_z_is_small():
    x = torch.full((1, 1, 2), 1e-9 + 1e-9j).requires_grad_()
    h0, q, bias = (
        torch.zeros(1, 2, dtype=torch.complex64),
        torch.eye(2, dtype=torch.complex64),
        torch.full((2,), 0.01),
    )
    grads = []
    for backend in ("torch", "reference"):
        states, _ = rollout(x, h0, q, bias, backend=backend)
        grads += torch.autograd.grad(states.real.sum(), x)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=0)


def test_backward_twice():
    given = problem(6, 3, 5)
    states, _ = rollout(given["x"], given["h0"], cwy_matrix(given["v"]), given["bias"], "relu")
    loss = states.sum()
    loss.backward(retain_graph=True)
    once = given["x"].grad.clone()
    loss.backward()
    torch.testing.assert_close(given["x"].grad, 2 * once)


def _misaligned(x, half):
    """The same numbers in half precision, in memory that begins in the middle of a word."""
    memory = torch.empty(x.numel() + 1, dtype=half, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", ["store", "checkpoint", "reversible"])
@pytest.mark.parametrize("f", ["modrelu", "abs", "tanh"])
@pytest.mark.parametrize(
    ("n", "reflections", "batch", "steps"),
    [(7, 7, 3, 5), (33, 33, 2, 20), (300, 300, 3, 9), (300, 21, 3, 9)],
)
@pytest.mark.parametrize("edges", ["x", "all", "last", "weight"])
def test_half_precision_is_read_and_written_as_it_is(
    edges, n, reflections, batch, steps, f, inside, half, device
):
    """The arithmetic is float32's, and each result is rounded once."""
    if inside == "reversible" and f != "abs":
        pytest.skip("it can't be reversed")
    if device == "cpu" and n > 100 and (f != "abs" or half != torch.float16):
        pytest.skip("on a CPU every size takes the same way")
    made = problem(n, batch, steps, device=device, reflections=reflections)
    q = wy_factors(made["v"].detach()) if reflections < n else (cwy_matrix(made["v"].detach()),)
    options = {"memory": inside, "output": "last" if edges == "last" else "all"}

    def results(widen):
        x = _misaligned(made["x"].detach(), half)
        h0 = made["h0"].detach()
        parts = [*q]
        if edges in ("all", "last"):
            h0 = h0.to(half)
            parts = [part.to(half) for part in parts]
        leaves = [x, h0, made["bias"].detach(), *parts]
        if edges == "weight":
            leaves.append(torch.ones(n, n, device=device).tril() / n)
        if widen:
            leaves = [leaf.float() for leaf in leaves]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        weight = leaves[-1] if edges == "weight" else None
        parts = leaves[3 : 3 + len(q)]
        transition = WY(*parts) if len(parts) > 1 else parts[0]
        states, last = rollout(*leaves[:2], transition, leaves[2], f, weight=weight, **options)
        outputs = [last] if states is None else [states, last]
        wave = [torch.sin(torch.arange(y.numel(), device=device)).view(y.shape) for y in outputs]
        gradients = torch.autograd.grad(
            outputs, leaves, [w.to(half).to(y.dtype) for w, y in zip(wave, outputs, strict=True)]
        )
        return [*outputs, *gradients]

    narrow = results(False)
    wide = results(True)
    for ours, theirs in zip(narrow, wide, strict=True):
        # Sums of float32 numbers may be in another order where memory begins elsewhere.
        info = torch.finfo(ours.dtype)
        atol = 50 * torch.finfo(torch.float32).eps * theirs.abs().max().item()
        atol += info.tiny * info.eps
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=info.eps, atol=atol)
