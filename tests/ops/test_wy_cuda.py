"""The kernels of the op: every variant against float64, on hard vectors and odd sizes, and compiled
without a GPU.
"""

import itertools
import re
from pathlib import Path

import pytest
import torch

from cwy.bench.suites import show_size, tuning
from cwy.ops import _nvrtc, cwy_matrix, cwy_multiply, tcwy_matrix, wy_factors
from cwy.ops.wy import blocked, cooperative, cuda, fused, split_fp16, tiers
from cwy.testing import assert_as_close
from tests.helpers.families import FAMILIES, departure, vectors

gpu = pytest.mark.gpu
ROOM = Path(tiers.__file__).parent
ROOT = Path(__file__).parents[2]
EPS = torch.finfo(torch.float32).eps
SMALL = [
    (1, 1),
    (7, 3),
    (7, 7),
    (7, 12),
    (33, 33),
    (64, 64),
    (64, 65),
    (65, 64),
    (100, 512),
    (190, 190),
    (256, 100),
    (256, 256),
    (257, 257),
    (511, 400),
    (511, 511),
    (512, 512),
]
LARGE = [
    (513, 1),
    (1000, 33),
    (1024, 128),
    (2041, 127),
    (2049, 127),
    (3001, 50),
    (1000, 256),
    (2047, 250),
    (2048, 256),
    (600, 257),
    (600, 700),
    (1024, 1024),
    (1500, 1100),
    (2048, 2048),
    (2056, 2056),
    (4104, 1032),
    (1032, 4104),
    (4096, 128),
    (4104, 40),
]


def signed(form, v, rows, **options):
    """With every third column of the other sign."""
    signs = 1 - 2.0 * (torch.arange(v.shape[-2 if rows else -1], device=v.device) % 3 == 0)
    return form(v, signs=signs.to(v.dtype).expand(*v.shape[:-2], -1), **options)


CALLS = {
    "matrix": (cwy_matrix, {}),
    "matrix, signed": (lambda v, **options: signed(cwy_matrix, v, True, **options), {}),
    "truncated": (tcwy_matrix, {}),
    "truncated, signed": (lambda v, **options: signed(tcwy_matrix, v, False, **options), {}),
    "factors": (lambda v, **options: torch.cat(wy_factors(v, **options), -2), {}),
    "factor u": (lambda v, **options: wy_factors(v, **options).u, {}),
    "factor t": (lambda v, **options: wy_factors(v, **options).t, {}),
    "multiply": (lambda v, x, **options: cwy_multiply(v, x, **options), {"rows": True}),
    "multiply adjoint": (
        lambda v, x, **options: cwy_multiply(v, x, True, **options),
        {"rows": True},
    ),
}


@pytest.fixture
def poisoned():
    """Fresh memory is filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def results(call, v, backend, dtype=torch.float32):
    """The value, and the gradients of a sum of it with fixed weights."""
    function, needs = CALLS[call]
    leaves = [v.detach().to(dtype).requires_grad_()]
    if needs:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(*v.shape[:-2], 5, v.shape[-2], generator=g)
        leaves.append(x.to(v.device, dtype).requires_grad_())
    y = function(*leaves, backend=backend)
    weight = (
        torch.cos(torch.arange(y.numel(), device=v.device, dtype=torch.float64))
        .reshape(y.shape)
        .to(dtype)
    )
    return [y.detach(), *torch.autograd.grad(y, leaves, weight)]


def orthogonal(q, bound):
    """Whether the spectral norm of QᵀQ − I is within the bound; Frobenius' is above it, and
    quick.
    """
    q = q.double()
    gap = q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return gap.norm() <= bound or departure(q) <= bound


def agree(call, v):
    ours, plain, truth = (
        results(call, v, *how) for how in (("cuda",), ("analytic",), ("analytic", torch.float64))
    )
    for name, a, p, t in zip(
        ("value", "gradient of v", "gradient of x"), ours, plain, truth, strict=False
    ):
        assert a.shape == t.shape
        # Of few terms plain rounding is a matter of luck: what sums of so many numbers take at
        # random is allowed as well.
        if (a.double() - t).abs().max() <= EPS * (
            16 + 2 * max(v.shape[-2:]) ** 0.5
        ) * t.abs().max():
            continue
        try:
            assert_as_close(a, p, t, factor=4)
        except AssertionError as error:
            raise AssertionError(f"{call} of {tuple(v.shape)}, {name}: {error}") from None
    return ours[0]


@gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "size"), SMALL + LARGE)
def test_hard_vectors_and_odd_sizes(family, n, size, poisoned):
    v = vectors(family, n, size, torch.float32, device="cuda")
    assert orthogonal(agree("matrix", v), 20 * EPS * max(n, size))
    if size <= n:
        assert orthogonal(agree("truncated", v), 20 * EPS * n)
        agree("truncated, signed", v)
    for call in ("matrix, signed", "factors", "factor t", "multiply", "multiply adjoint"):
        agree(call, v)


@gpu
@pytest.mark.parametrize(("n", "size"), [(25601, 20), (30000, 32), (30000, 50)])
def test_tall_and_truncated(n, size, poisoned):
    assert orthogonal(agree("truncated", torch.randn(n, size, device="cuda")), 20 * EPS * n)


@gpu
@pytest.mark.parametrize("batch", [(1,), (3,), (64,), (2, 3)])
@pytest.mark.parametrize(("n", "size"), [(33, 33), (128, 128), (128, 40), (700, 60), (600, 530)])
def test_batches_and_strides(batch, n, size, poisoned):
    v = torch.randn(*batch, size, n, device="cuda").mT
    for call in CALLS:
        agree(call, v)
        assert results(call, v[:0], "auto")[0].shape[0] == 0


@gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "size"), [(128, 128), (65, 64), (70, 40)])
def test_batches_of_hard_vectors(family, n, size, poisoned):
    v = torch.stack([vectors(family, n, size, torch.float32, seed) for seed in range(64)]).cuda()
    for call in ("matrix", "matrix, signed", "truncated", "truncated, signed"):
        assert orthogonal(agree(call, v), 20 * EPS * n)
    agree("factors", v)


@gpu
@pytest.mark.parametrize(("n", "size"), [(8, 8), (40, 20), (100, 70)])
def test_more_matrices_than_blocks(n, size, poisoned):
    v = torch.randn(1000, n, size, device="cuda")
    for call in ("matrix", "matrix, signed", "truncated", "truncated, signed"):
        torch.testing.assert_close(
            CALLS[call][0](v), agree(call, v), atol=0, rtol=0
        )  # with and without gradients alike
    agree("factors", v)


@gpu
@pytest.mark.parametrize(
    ("n", "size"), [(190, 190), (1000, 60), (1024, 1024), (900, 600), (2048, 2048), (4096, 128)]
)
def test_flags_and_compilers_change_nothing(n, size):
    v = torch.randn(n, size, device="cuda")
    for call in ("matrix", "truncated", "multiply"):
        wanted = results(call, v, "cuda")
        torch.set_float32_matmul_precision("high")
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                flagged = results(call, v, "cuda")
        finally:
            torch.set_float32_matmul_precision("highest")
        for a, b in zip(flagged, wanted, strict=True):
            assert torch.equal(a, b)
    compiled = torch.compile(cwy_matrix, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(v), cwy_matrix(v), atol=1e-5, rtol=0)


@gpu
@pytest.mark.parametrize(
    ("n", "size"),
    [(64, 20), (64, 64), (300, 300), (2000, 50), (1100, 1100), (2048, 2048), (4096, 128)],
)
def test_streams_and_graphs(n, size):
    v = torch.randn(n, size, device="cuda", requires_grad=True)

    def step():
        q, omega = cwy_matrix(v, backend="cuda"), tcwy_matrix(v, backend="cuda")
        factors = torch.cat(wy_factors(v, backend="cuda"))
        weight = torch.linspace(-1, 1, size, device="cuda")
        (grad,) = torch.autograd.grad(
            sum((x[:, :size] * weight).sum() for x in (q, omega, factors)), v
        )
        return q.detach(), omega.detach(), grad

    wanted = step()
    streams = [torch.cuda.Stream() for _ in range(4)]
    together = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                together.append(step())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    replays = []
    for _ in range(20):
        with torch.no_grad():
            v.normal_()
        graph.replay()
        replays.append(([r.clone() for r in recorded], step()))
    for ours, truth in [*((t, wanted) for t in together), *replays]:
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 * b.abs().max().item(), rtol=1e-4)


@gpu
@pytest.mark.parametrize(
    ("n", "size"), [(12, 5), (12, 12), (600, 20), (2100, 20), (530, 530), (2048, 2048)]
)
def test_second_derivatives(n, size):
    for call in ("matrix", "matrix, signed", "truncated", "truncated, signed", "factors"):
        found = []
        for backend, dtype in (("cuda", torch.float32), ("composite", torch.float64)):
            v = vectors("gaussian", n, size, dtype, device="cuda").requires_grad_()
            y = CALLS[call][0](v, backend=backend)
            (first,) = torch.autograd.grad(y.sin().sum(), v, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), v)[0])
        assert (found[0] - found[1]).norm() <= 1e-4 * found[1].norm()


@gpu
@pytest.mark.parametrize(("n", "m"), [(30000, 50), (4096, 64)])
def test_a_thin_matrix_takes_little_memory(n, m):
    v = torch.randn(n, m, device="cuda", requires_grad=True)
    z = torch.randn_like(v)
    tcwy_matrix(v).backward(z)
    v.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tcwy_matrix(v).backward(z)
    matrix = 4 * n * m
    assert (
        torch.cuda.max_memory_allocated() - before - 2 * matrix <= 2 * matrix
    )  # beyond the result and v's gradient


@gpu
@pytest.mark.parametrize(
    ("call", "size"), [("matrix", 70), ("matrix", 128), ("truncated", 70), ("factors", 70)]
)
@pytest.mark.parametrize("power", [-110, -30, 60])
def test_a_batch_takes_gradients_of_any_size(call, size, power):
    v = torch.randn(64, 128, size, device="cuda", requires_grad=True)
    q = CALLS[call][0](v, backend="cuda")
    z = torch.randn_like(q)
    (wanted,) = torch.autograd.grad(q, v, z, retain_graph=True)
    (scaled,) = torch.autograd.grad(q, v, z * 2.0**power)
    assert (scaled.double() / 2.0**power - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@gpu
@pytest.mark.parametrize(("n", "size"), [(1024, 1024), (2056, 2056), (4104, 1032)])
def test_large_ones_take_gradients_of_any_size_and_from_anywhere(n, size):
    v = torch.randn(n, size, device="cuda", requires_grad=True)
    q, z = cwy_matrix(v, backend="cuda"), torch.randn(n, n, device="cuda")
    slope = lambda z: torch.autograd.grad(q, v, z, retain_graph=True)[0]
    wanted = slope(z)
    for power in (-100, 100):
        assert (
            slope(z * 2.0**power).double() / 2.0**power - wanted
        ).abs().max() <= 1e-6 * wanted.abs().max()
    apart = torch.empty(n * n + 1, device="cuda")[1:].view(n, n).copy_(z)  # no multiple of 16 bytes
    assert torch.equal(slope(apart), wanted)
    spike = torch.zeros_like(z)
    spike[3, 5] = 1
    plain, truth = v.detach().clone().requires_grad_(), v.detach().double().requires_grad_()
    plain, truth = (
        torch.autograd.grad(cwy_matrix(x, backend="analytic")[3, 5], x)[0] for x in (plain, truth)
    )
    error = (slope(spike).double() - truth).abs().max()
    assert error <= max(
        4 * (plain.double() - truth).abs().max(), EPS * (16 + 2 * n**0.5) * truth.abs().max()
    )
    spike[3, 5] = torch.nan
    assert slope(spike).isnan().any()


# In one launch, blocked, split into fp16 numbers, and in batches of each.
TIERS = [
    (7, 5),
    (64, 64),
    (512, 512),
    (1000, 33),
    (600, 257),
    (1024, 1024),
    (4096, 128),
    (2048, 2048),
    (4104, 1032),
]
BATCHES = [(3, 64, 64), (64, 128, 128), (64, 70, 40), (3, 600, 530)]


@gpu
@pytest.mark.parametrize("shape", TIERS + BATCHES)
@pytest.mark.parametrize("size", [2.0**-130, 2.0**-144])
def test_gradients_of_denormal_vectors_are_finite(shape, size, poisoned):
    g = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=g)
    base[..., 1::3] *= size / base[..., 1::3].abs().amax(-2, keepdim=True)
    for call in ("matrix", "matrix, signed", "truncated", "factors", "factor t", "multiply"):
        if call == "truncated" and shape[-1] > shape[-2]:
            continue
        ours, plain = (results(call, base.cuda(), backend) for backend in ("cuda", "analytic"))
        for a, p in zip(ours, plain, strict=True):
            assert a.isfinite().all(), call
            # Columns of all lengths: each by itself.
            most = p.abs().amax(-2, keepdim=True)
            assert ((a - p) / torch.where(most > 0, most, 1)).abs().max() <= 1e-3, call
    v = base.cuda().requires_grad_()
    for form in (cwy_matrix, tcwy_matrix):
        q = form(v, backend="cuda")
        (none,) = torch.autograd.grad(q, v, torch.zeros_like(q))
        assert not none.any()


@gpu
def test_nan_spreads():
    for n, size in ((40, 40), (600, 20), (600, 600), (2048, 2048)):
        v = torch.randn(n, size, device="cuda")
        v[1, 2] = torch.nan
        assert cwy_matrix(v, backend="cuda").isnan().any()


def compiled(path, macros, arch, structures=()):
    return len(_nvrtc.cubin(path, tuple(sorted(macros.items())), arch, structures))


@pytest.mark.slow
@pytest.mark.skipif(_nvrtc.why_not() is not None, reason="the compiler is not installed")
def test_every_kernel_compiles_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CWY_CACHE", str(tmp_path))
    variants = [(blocked.INVERT_BLOCKS, cooperative.FEW_TILES)]
    for tiles in (cooperative.FEW_TILES, cooperative.MANY_TILES):
        variants += [(source, tiles) for source in (fused.FORWARD, *fused.BACKWARD.values())]
    for index, (source, tiles) in enumerate(variants):
        macros = cooperative.MACROS | tiles.macros | source.macros
        # Each for the H200, and the other architectures in turn.
        for arch in ("sm_90a", ("sm_80", "sm_100a", "sm_120a")[index % 3]):
            path = cooperative.KERNELS / source.file
            assert compiled(path, macros, arch, (source.structure,)) > 1000
    path = cooperative.KERNELS / "split_fp16.cu"
    for arch in ("sm_80", "sm_90a", "sm_100a", "sm_120a"):
        assert compiled(path, split_fp16.MACROS, arch) > 1000


SMALL_TIERS = [
    ((512, 512), (513, 513)),
    ((2048, 128), (2049, 127)),
    ((2048, 128), (2048, 129)),
    ((1024, 256), (1024, 257)),
    ((11, 600, 1), (12, 600, 1)),
    ((16, 512, 512), (16, 513, 512)),
]


@pytest.mark.parametrize(("inside", "outside"), SMALL_TIERS)
def test_where_one_launch_ends(inside, outside):
    small = lambda shape: tiers.choose(torch.empty(shape, device="meta")) is tiers.SMALL
    assert (small(inside), small(outside)) == (True, False)


@pytest.mark.parametrize(
    ("shape", "tier"),
    [
        ((513, 512), tiers.LARGE),
        ((600, 257), tiers.LARGE),
        ((2047, 256), tiers.THIN),
        ((4088, 256), tiers.THIN),
        ((4096, 256), tiers.THIN_LONG),
        ((4096, 257), tiers.LARGE),
        ((4100, 128), tiers.THIN),
        ((3, 4096, 128), tiers.THIN),
        ((2048, 2040), tiers.LARGE),
        ((2048, 2048), tiers.LARGEST),
        ((2048, 2056), tiers.LARGE),
        ((2056, 2056), tiers.LARGEST),
        ((2057, 2056), tiers.LARGE),
        ((2, 2048, 2048), tiers.LARGE),
        ((4096, 1024), tiers.LARGEST),
    ],
)
def test_which_way_serves_a_large_size(shape, tier, monkeypatch):
    monkeypatch.setattr(tiers, "has_fast_double", lambda device: True)
    v = torch.empty(shape, device="meta")
    assert tiers.choose(v) == tier
    monkeypatch.setattr(tiers, "has_fast_double", lambda device: False)
    assert tiers.Way.SPLIT_FP16 not in tiers.choose(v)
    assert tiers.is_slow(v) == (v.numel() * v.shape[-1] > 2**26)


def test_the_readme_has_the_table_of_tiers():
    """Every constant, what it decides, and a record that exists or what it follows from."""
    table = [
        [cell.strip(" `") for cell in line.strip("|\n").split("|")]
        for line in (ROOM / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    constants = {constant["constant"]: constant for constant in tiers.rows()}
    shown = [row for row in table if row[0] in constants]
    assert shown == [[str(value) for value in row.values()] for row in constants.values()]
    timed = {study.constant for study in tuning.STUDIES}
    for row in constants.values():
        assert getattr(tiers, row["constant"]) == row["value"]
        assert row["way"] in (*(way.value for way in tiers.Way), "all")
        assert bool(row["record"]) != bool(row["limit"])
        assert not row["record"] or (ROOT / row["record"]).is_file()
        assert (row["constant"] in timed) == row["record"].endswith("tuning.txt")


def test_studies_time_the_own_value():
    for study in tuning.STUDIES:
        assert getattr(tiers, study.constant) in study.values
        # Plain calls are timed without reloading what derives from a constant.
        assert not study.plain or study.constant in tiers.choose.__code__.co_names


def test_the_record_of_tuning_times_every_value():
    lines = (ROOT / "results/bench/h200/tuning.txt").read_text(encoding="utf-8").splitlines()
    lines = lines[lines.index("") + 1 :]
    found = {(words[0], words[2], words[3].strip("*")) for words in map(str.split, lines)}
    for study in tuning.STUDIES:
        for size, value in itertools.product(study.sizes, study.values):
            assert (study.constant, show_size(size), str(value)) in found


def test_another_constant_reaches_the_kernels_and_goes_back():
    for name, macros in (
        ("RESIDENT", lambda: cooperative.MACROS["RESIDENT"]),
        ("COLUMNS", lambda: cooperative.FEW_TILES.columns),
        ("COLUMN_WIDTH", lambda: blocked.COLUMN_MACROS["COLUMN_WIDTH"]),
        ("SPLIT_TILE_ROWS", lambda: split_fp16.MACROS["TILE_ROWS"]),
    ):
        own = getattr(tiers, name)
        with tuning.changed(name, 2 * own):
            assert macros() == 2 * own
        assert macros() == own


def test_errors_of_a_study():
    v = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    call = tuning.REFERENCES["cwy_matrix"]
    truth = tuning.results(call, v.double(), True)
    assert tuning.errors(truth, truth) == "0.0e+00 / 0.0e+00"
    q, (gradient,) = truth
    off = [q + 0.25 * q.abs().max(), (0.5 * gradient,)]
    assert tuning.errors(off, truth) == "2.5e-01 / 5.0e-01"


@gpu
def test_a_study_times_graphs_and_plain_calls():
    size = (300, 280)
    study = tuning.Study(
        "ONE_LAUNCH_SIDE", (256, 512), "cwy_matrix", (size,), True, plain=True, errors=True
    )
    lines = list(tuning.measure(study, size, torch.device("cuda", 0)))
    assert [line.split()[3] for line in lines] == ["256", "*512"]
    for line in lines:
        *times, error, slope, _, _ = map(float, re.findall(r"\d\.\d+(?:e-\d+)?", line))
        assert len(times) == 4
        assert all(0 < one < 1000 for one in times)
        assert max(error, slope) < 1e-4


@pytest.mark.skipif(_nvrtc.why_not() is not None, reason="the compiler is not installed")
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", ["TILE", "SLAB", "THREADS", "WATCHED_BLOCKS"])
def test_a_layout_that_threads_do_not_cover_does_not_compile(name, many, tmp_path, monkeypatch):
    monkeypatch.setenv("CWY_CACHE", str(tmp_path))
    tiles = (cooperative.FEW_TILES, cooperative.MANY_TILES)[many]
    macros = cooperative.MACROS | tiles.macros
    macros[name] *= 4
    with pytest.raises(RuntimeError, match="static assertion failed"):
        compiled(cooperative.KERNELS / "forward.cu", macros, "sm_90a", (fused.Forward,))


def test_a_glossary_has_every_macro_and_template_parameter():
    glossary = set()
    parameters = set()
    for path in cooperative.KERNELS.iterdir():
        text = path.read_text(encoding="utf-8")
        for words in re.findall(r"^//   (\w+(?:, \w+)*)  +\S", text, re.MULTILINE):
            glossary |= set(words.split(", "))
        for declared in re.findall(r"^template <(.*)>$", text, re.MULTILINE):
            parameters |= {one.split("=")[0].split()[-1] for one in declared.split(", ")}
    macros = {*cooperative.MACROS, *cooperative.FEW_TILES.macros, *split_fp16.MACROS}
    for source in (blocked.INVERT_BLOCKS, fused.FORWARD, *fused.BACKWARD.values()):
        macros |= set(source.macros)
    assert {"LEFT_ALONG", "Put", "T"} <= parameters
    assert macros | parameters == glossary


def test_why_it_does_not_serve(monkeypatch):
    monkeypatch.setattr(_nvrtc.compiler, "INSTALLED", False)
    reason = cuda.why_not(torch.zeros(0, 3, dtype=torch.float64))
    for words in ("v is on cpu", "pip install 'cwy[cuda]'", "float64", "v is empty"):
        assert words in reason
