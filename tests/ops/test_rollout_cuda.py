"""The kernels that hold the transition on chip: every variant against the definition in float64,
and compiled without a GPU.
"""

import itertools
import re

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from cwy.bench.suites.rnn import off_kinks
from cwy.ops import WY, _nvrtc, cwy_matrix, rollout, wy_factors
from cwy.ops.recurrence import cuda, tiling
from cwy.ops.recurrence.factors import factors_are_cheaper
from cwy.ops.recurrence.modrelu import SOURCE
from cwy.ops.recurrence.nonlinearities import NONLINEARITIES, modrelu, named
from cwy.ops.recurrence.product import _macros
from cwy.testing import assert_as_close
from tests.helpers.recurrence import double, problem, run

gpu = pytest.mark.gpu
SIZES = (1, 7, 33, 190, 223, 225, 256, 511, 1000, 1024)
LAYOUTS = list(itertools.product((1, 3, 130), (1, 2, 257)))
CASES = [
    (n, f, *LAYOUTS[(3 * i + 4 * j) % len(LAYOUTS)])
    for (i, n), (j, f) in itertools.product(enumerate(SIZES), enumerate(NONLINEARITIES))
]


def held(x, f, **options):
    return run(x, f, backend="cuda", **options)


@pytest.fixture
def poisoned():
    """Fresh memory is filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def away(given, f):
    """The same with inputs that keep z off the kinks of f, where float32 may round to the other
    side.
    """
    with torch.no_grad():
        off_kinks(f, given["x"], given["h0"], [cwy_matrix(given["v"].double())], given["bias"])
    return given


def agree(given, f, ours, **options):
    truth = run(double(given), f, backend="reference", **options)
    plain = run(given, f, backend="reference", **options)
    for a, p, t in zip(ours, plain, truth, strict=True):
        assert_as_close(a, p, t)


@gpu
@pytest.mark.parametrize(("n", "f", "batch", "steps"), CASES)
def test_a_formed_transition(n, f, batch, steps, poisoned):
    given = away(problem(n, batch, steps, device="cuda"), f)
    agree(given, f, held(given, f, strided=True))


FACTORED = [
    (257, 1),
    (300, 63),
    (511, 40),
    (512, 64),
    (512, 128),
    (1000, 129),
    (1024, 128),
    (1024, 256),
    (1025, 64),
    (2048, 128),
]


@gpu
@pytest.mark.parametrize(
    ("n", "reflections", "f", "batch", "steps"),
    [
        (*size, f, *LAYOUTS[(4 * i + 5 * j) % len(LAYOUTS)])
        for (i, size), (j, f) in itertools.product(enumerate(FACTORED), enumerate(NONLINEARITIES))
    ],
)
def test_a_factored_transition(n, reflections, f, batch, steps, poisoned):
    given = away(problem(n, batch, steps, device="cuda", reflections=reflections), f)
    agree(given, f, held(given, f, factors=True, strided=True))


@gpu
@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("n", [33, 300])  # formed, and by factors
def test_signs(n, learnt, poisoned):
    made = problem(n, 5, 70, device="cuda", reflections=20)
    made["signs"] = 1 - 2.0 * (torch.arange(n, device="cuda") % 3 == 0)

    def results(backend, dtype):
        x, h0, v, signs = leaves = [
            made[name].detach().to(dtype).requires_grad_() for name in ("x", "h0", "v", "signs")
        ]
        signs.requires_grad_(learnt)
        states, _ = rollout(x, h0, wy_factors(v), None, "tanh", signs=signs, backend=backend)
        z = torch.sin(torch.arange(states.numel(), device="cuda", dtype=dtype)).reshape(
            states.shape
        )
        return [states, *torch.autograd.grad(states, leaves[: 3 + learnt], z)]

    hows = ("cuda", torch.float32), ("reference", torch.float32), ("reference", torch.float64)
    for a, p, t in zip(*(results(*how) for how in hows), strict=True):
        assert_as_close(a, p, t)


@gpu
@pytest.mark.parametrize("n", [33, 300])
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize(
    ("f", "memory"),
    [("abs", "store"), ("abs", "reversible"), ("modrelu", "checkpoint"), ("relu", "store")],
)
@pytest.mark.parametrize("output", ["all", "last"])
@pytest.mark.parametrize("lengths", [None, [1 + 29 * i % 70 for i in range(130)]])
def test_modes_and_lengths(n, factors, f, memory, output, lengths, poisoned):
    given = away(problem(n, 130, 70, device="cuda", reflections=20), f)
    options = {"output": output} | ({} if lengths is None else {"lengths": torch.tensor(lengths)})
    ours = held(given, f, factors=factors, memory=memory, **options)
    truth = run(double(given), f, backend="reference", **options)
    # What plain steps lose when they recover states is lost here, too: how much is luck, so in
    # eight orders of the units.
    orders = [torch.randperm(n, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    plain = [
        run(given, f, backend="torch", factors=factors, memory=memory, order=order, **options)
        for order in orders
    ]
    for a, t, *p in zip(ours, truth, *plain, strict=True):
        assert_as_close(a, max(p, key=lambda x, t=t: (x.double() - t).abs().max()), t)


@gpu
def test_more_sequences_than_fit_at_once():
    for n, batch in ((48, 300), (190, 1000), (300, 400)):
        given = away(problem(n, batch, 5, device="cuda"), "modrelu")
        agree(given, "modrelu", held(given, "modrelu"))


@gpu
@pytest.mark.parametrize("n", [190, 512])
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_side_stream_and_a_graph(n, factors, packed):
    given = problem(n, 16, 40, device="cuda", reflections=20)
    q = WY(*wy_factors(given["v"].detach())) if factors else cwy_matrix(given["v"].detach())
    leaves = [part.requires_grad_() for part in (q if factors else (q,))]
    x, h0 = given["x"], given["h0"]
    sizes = torch.tensor([16] * 30 + [7] * 10)
    rows = torch.cat([torch.arange(size) + 16 * t for t, size in enumerate(sizes.tolist())]).cuda()

    def step():
        given_x = PackedSequence(x.flatten(0, 1)[rows], sizes) if packed else x
        states, last = rollout(given_x, h0, q, given["bias"], backend="cuda")
        states = states.data if packed else states
        # A graph of autograd that lives on would tie the recording to this stream.
        return states.detach(), *torch.autograd.grad(
            states.sum() + last.sum(), (x, h0, *leaves, given["bias"])
        )

    wanted = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        aside = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for count in range(70):  # other packings must not push out what the graph reads
        cuda._packing((2, *[1] * count, 1), x.device)
    with torch.no_grad():
        x += 1
    graph.replay()
    # On another stream the library's product of the gradient may add up in another order.
    for a, b in [*zip(aside, wanted, strict=True), *zip(recorded, step(), strict=True)]:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@gpu
def test_nothing_is_stored_that_is_not_needed():
    n, batch, steps = 190, 16, 4096
    x, h0 = torch.randn(steps, batch, n, device="cuda"), torch.zeros(batch, n, device="cuda")
    q = cwy_matrix(torch.randn(n, n, device="cuda"))
    rollout(x, h0, q, output="last", backend="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rollout(x, h0, q, output="last", backend="cuda")
    assert torch.cuda.max_memory_allocated() - before < x.numel()


@gpu
def test_a_hundred_thousand_steps_are_reversed_in_a_gigabyte():
    n, batch, steps = 190, 16, 100_000
    x = torch.randn(steps, batch, n, device="cuda").mul_(steps**-0.5).requires_grad_()
    q = cwy_matrix(torch.randn(n, n, device="cuda")).requires_grad_()
    h0 = torch.randn(batch, n, device="cuda")

    def step():
        x.grad = q.grad = None
        rollout(x, h0, q, nonlinearity="abs", output="last", memory="reversible", backend="cuda")[
            1
        ].sum().backward()

    step()
    x.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() + x.numel() * 4  # with x's gradient
    step()
    assert torch.cuda.max_memory_allocated() - before < 1e9
    assert x.grad.isfinite().all()


@gpu
@pytest.mark.parametrize("transition", [cwy_matrix, wy_factors])
def test_nan_spreads_as_in_torch(transition):
    x = torch.randn(5, 2, 300, device="cuda")
    x[1, 0, 7] = torch.nan
    states, _ = rollout(
        x,
        torch.zeros(2, 300, device="cuda"),
        transition(torch.randn(300, 20, device="cuda")),
        backend="cuda",
    )
    assert states[2:, 0].isnan().all()
    assert not states[:, 1].isnan().any()


@gpu
@pytest.mark.parametrize("n", [33, 300])
def test_nan_is_recovered_too(n):
    x = torch.randn(5, 2, n, device="cuda", requires_grad=True)
    q = cwy_matrix(torch.randn(n, n, device="cuda")).requires_grad_()
    _, last = rollout(
        x,
        torch.full((2, n), torch.nan, device="cuda"),
        q,
        None,
        "abs",
        memory="reversible",
        backend="cuda",
    )
    _, dq = torch.autograd.grad(last.sum(), (x, q))
    assert dq.isnan().all()


@gpu
@pytest.mark.parametrize("factors", [False, True])
def test_sequences_of_any_size_side_by_side(factors):
    given = problem(300, 5, 20, device="cuda", reflections=20)
    with torch.no_grad():
        for t in (given["x"], given["h0"]):
            t *= torch.tensor([1e-30, 1e-6, 1.0, 1e6, 1e30], device="cuda")[:, None]
        given["bias"].zero_()
    ours = held(given, "leaky_relu", factors=factors)[0]
    plain, truth = (run(t, "leaky_relu", backend="reference")[0] for t in (given, double(given)))
    for b in range(5):
        assert_as_close(ours[:, b], plain[:, b], truth[:, b])


@gpu
@pytest.mark.parametrize(("n", "reflections"), [(96, None), (300, 16), (1100, 16)])
def test_the_layer_is_served_and_compiles(n, reflections):
    from cwy import nn

    layer = nn.OrthogonalRNN(8, n, nonlinearity="abs", reflections=reflections).cuda()
    x = torch.randn(30, 4, 8, device="cuda")
    whole = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(whole(x)[0], layer(x)[0])


def variants():
    """Tilings of every kind, as every mode divides them: (mode, tiling, n)."""
    for mode in range(3):
        for n in (1, 96, 128, 190, 224, 256):
            yield mode, tiling.block(n, 128, 132), n
        for n, batch in ((257, 130), (600, 130), (1024, 9), (1024, 130)):
            yield mode, tiling.cluster(n, batch, mode, 0), n
        for n, reflections in ((300, 20), (1024, 128), (1024, 256), (2048, 128), (2048, 256)):
            yield mode, tiling.factored(n, reflections, 130, 0), n


@gpu
@pytest.mark.parametrize("bias", [None, 0.0, -0.3, 0.2])
def test_complex_modrelu(bias, poisoned):
    z = torch.randn(5, 7, dtype=torch.complex64, device="cuda")
    z[0, :4] = torch.tensor([0, 1e-30 + 1e-30j, 1e-42, 3e38], device="cuda")
    b = (
        None
        if bias is None
        else torch.stack([bias + torch.arange(7, device="cuda") / 100] * 2, -1)[:, 0]
    )
    f, dh = named("modrelu", z), torch.randn_like(z)
    with torch.no_grad():
        h, d = f.define(z, b), dh.clone()
        f.back_(d, h, z, b)
    exact = z.to(torch.complex128).requires_grad_()
    truth = modrelu(exact, None if b is None else b.double())
    # At zero, and where h overflows or vanishes in float32, derivatives are what they are.
    usual = (z.abs() > 1e-36) & (z.abs() < 1e38)
    (grad,) = torch.autograd.grad(truth, exact, dh.to(torch.complex128))
    torch.testing.assert_close(
        h[usual].to(truth.dtype), truth[usual].detach(), atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(d[usual].to(grad.dtype), grad[usual], atol=1e-6, rtol=1e-5)
    assert h[0, 0] == d[0, 0] == 0


def test_a_glossary_has_every_macro_and_template_parameter(monkeypatch):
    monkeypatch.setattr(tiling, "clusters", lambda blocks, device: 120 // blocks)
    macros = set(tiling.Variant(tiling.FORWARD, "abs").macros) | set(_macros(190, 190))
    for _, chosen, _ in variants():
        macros |= set(chosen.macros)
    glossary = set()
    parameters = set()
    for path in tiling.KERNELS.iterdir():
        text = path.read_text(encoding="utf-8")
        lines = set()
        for words in re.findall(r"^ *//   (\w+(?:, \w+)*)  +\S", text, re.MULTILINE):
            lines |= set(words.split(", "))
        for declared in re.findall(r"^ *template <(.*)>$", text, re.MULTILINE):
            names = {one.split()[-1] for one in declared.split(", ")}
            assert names <= lines, path.name
            parameters |= names
        glossary |= lines
    assert {"HALF", "Kept", "Source"} <= parameters
    assert macros <= glossary


@pytest.mark.slow
@pytest.mark.skipif(_nvrtc.why_not() is not None, reason="the compiler is not installed")
def test_every_variant_compiles_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("CWY_CACHE", str(tmp_path))
    monkeypatch.setattr(tiling, "clusters", lambda blocks, device: 120 // blocks)
    compiled = []

    def kernel(path, name, macros, shared, large_clusters, structures):
        compiled.append((path, tuple(sorted(macros.items())), shared, structures))

    monkeypatch.setattr(_nvrtc, "kernel", kernel)
    types = list(tiling.TYPES)
    for index, (mode, chosen, n) in enumerate(variants()):
        variant = tiling.Variant(
            mode=mode,
            nonlinearity=list(tiling.NONLINEARITIES)[index % 6],
            packed=bool(index // 2 % 2),
            reads_two=mode > 0,
            writes_extra=mode == 0,
            one=types[index % 3],
            two=types[index // 3 % 3],
            rounded=types[index // 2 % 3],
        )
        chosen.kernel(variant)
        path, macros, shared, structures = compiled[-1]
        assert shared <= tiling.BLOCK_SHARED_BYTES
        served = ("sm_80", "sm_90a", "sm_120a")
        if n > tiling.BLOCK_UNITS:
            served = ("sm_90a", "sm_100a")
        # In turn: each source is compiled in each mode for each architecture, not each of its
        # tilings.
        assert len(_nvrtc.cubin(path, macros, served[index % len(served)], structures)) > 1000
    for m, n in ((7, 7), (100, 80), (190, 190), (1024, 1024)):
        _nvrtc.cubin(tiling.KERNELS / "product.cu", tuple(sorted(_macros(m, n).items())), "sm_90a")
    _nvrtc.cubin(SOURCE, (), "sm_80")
    path, macros, _, structures = compiled[0]
    kept = list(tmp_path.rglob("*.cubin"))
    stamps = [file.stat().st_mtime_ns for file in kept]
    _nvrtc.cubin(path, macros, "sm_80", structures)
    assert [file.stat().st_mtime_ns for file in kept] == stamps
    with pytest.raises(RuntimeError, match=r"NVRTC could not compile block\.cu"):
        _nvrtc.cubin(path, (*macros, ("ROWS", 0)), "sm_90a", structures)


def test_why_it_does_not_serve(monkeypatch):
    from cwy.ops.recurrence.spec import Request

    monkeypatch.setattr(_nvrtc.compiler, "INSTALLED", False)
    reason = cuda.why_not(Request(2000, 4, 5, torch.float64, "cuda", "modrelu"))
    for words in (r"pip install 'cwy\[cuda\]'", "float64", "above the 1024"):
        assert re.search(words, reason)
    with pytest.raises(ValueError, match=r"cuda.*x is on cpu"):
        rollout(
            torch.zeros(2, 3, 4), torch.zeros(3, 4), wy_factors(torch.randn(4, 2)), backend="cuda"
        )


def test_a_compiler_may_ask_which_form_is_cheaper(monkeypatch):
    """Also where the kernels can't hold Q, so that every backend is asked."""
    monkeypatch.setattr(cuda, "_capability", lambda index: (9, 0))

    def doubled(x):
        if factors_are_cheaper(1100, 16, 100, "cuda", torch.float32, 0):
            return 2 * x
        return x

    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
