"""The translator against its definition, a sentence at a time without padding; decoding against
every sentence there is.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cwy
from cwy.experiments.engine import task
from cwy.experiments.engine.config import ConfigError
from cwy.experiments.nmt import fused, pointwise
from cwy.experiments.nmt.cells import SATURATED, GatedCell
from cwy.experiments.nmt.decode import decode
from cwy.experiments.nmt.model import Translator
from cwy.experiments.nmt.recipes import paper
from cwy.experiments.nmt.repeated_product import RepeatedProduct
from cwy.experiments.nmt.text import END, PAD, SPECIAL, START, UNKNOWN
from cwy.ops import _nvrtc
from tests.helpers import simulated_gpu
from tests.helpers.runs import same

METHODS = [
    ("cwy", 3),
    ("cwy", None),
    ("exprnn", None),
    ("rgd", None),
    ("rnn", None),
    ("gru", None),
    ("lstm", None),
]


SETTINGS = [
    ("cwy", {"gate": True}),
    ("cwy", {"gate": True, "nonlinearity": "modrelu"}),
    ("cwy", {"gate": True, "input_bias": False}),
    ("cwy", {"gate": True, "gate_encoder": False, "nonlinearity": "relu"}),
    ("cwy", {"gate": True, "thin_gate": True, "nonlinearity": "tanh"}),
    ("cwy", {"gate": True, "thin_gate": True, "nonlinearity": "modrelu"}),
    ("rnn", {"gate": True, "nonlinearity": "relu"}),
    ("rnn", {"gate": True, "thin_gate": True, "nonlinearity": "tanh"}),
    ("cwy", {"input_bias": False}),
    ("rnn", {"input_bias": False}),
    ("gru", {"input_bias": False}),
    ("lstm", {"input_bias": False, "input_scale": 3.0}),
]


def translator(method="cwy", reflections=None, n=8, words=6, dtype=torch.float64, **more):
    config = replace(paper(method, reflections), hidden_size=n, embedding_size=5, **more)
    names = [*SPECIAL, *map(chr, range(97, 97 + words))]
    model = Translator(method, config, {"source": names, "target": names}, dtype)
    for name, p in model.named_parameters():
        if name.endswith("gate_factors"):
            # They start at zero, where the gate does not depend on the state.
            nn.init.normal_(p)
    return model


def sentences(lengths, width, words=10):
    """Random words with their ends, padded."""
    rows = [[*torch.randint(4, words, (length,)).tolist(), END] for length in lengths]
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def before(target):
    return nn.functional.pad(target[:, :-1], (1, 0), value=START)


def advanced(cell, x, state):
    """One step of a cell of torch or of cwy.nn, or of one of these and its gate."""
    if not isinstance(cell, GatedCell):
        return cell(x, state)
    if cell.gate_state is None:
        matrix = cell.gate_factors.unsqueeze(1) * cell.core.weight_hh
        read = x[:, -cell.gate.in_features :]
    else:
        matrix = cell.gate_state.weight
        read = x
    gate = torch.sigmoid(cell.gate(read) + state @ matrix.mT)
    return (1 - gate) * state + gate * cell.core(x, state)


def encoded(core, x):
    """The states of all words ``x (T, inputs)``, and the last state."""
    if isinstance(core, GatedCell):
        states = [x.new_zeros(1, core.core.hidden_size)]
        for word in x:
            states.append(advanced(core, word.unsqueeze(0), states[-1]))
        return torch.cat(states[1:]), states[-1]
    if isinstance(core, nn.LSTM):
        x = torch.cat([x, x.new_zeros(len(x), core.input_size - x.shape[-1])], -1)
    states, last = core(x.unsqueeze(1))
    return states.squeeze(1), tuple(part[0] for part in last) if isinstance(last, tuple) else last[
        0
    ]


def defined(model, source, given):
    """The paper's equations for one sentence without padding, with the cells of torch and of
    cwy.nn.
    """
    states, state = encoded(model.encoder.core, model.source(source))
    logits, maps = [], []
    for word in given:
        h = state[0] if isinstance(state, tuple) else state
        weights = (torch.tanh(model.keys(states) + model.query(h)) @ model.score).softmax(0)
        x = torch.cat([weights @ states, model.target(word)]).unsqueeze(0)
        state = advanced(model.decoder, x, state)
        logits.append(model.readout(state[0] if isinstance(state, tuple) else state))
        maps.append(weights)
    return torch.cat(logits), torch.stack(maps)


@pytest.mark.parametrize(
    ("method", "reflections", "more"),
    [(*one, {}) for one in METHODS] + [(method, None, more) for method, more in SETTINGS],
)
def test_a_padded_batch_is_the_definition_sentence_by_sentence(method, reflections, more):
    model = translator(method, reflections, **more)
    source, target = sentences([4, 1, 6], 9), sentences([3, 5, 2], 8)
    logits, maps = model(source, before(target)), model.attention(source, before(target))
    real, cost, expected = source != PAD, 0, 0
    assert torch.allclose(maps.sum(-1), torch.ones(3, 8, dtype=torch.float64))
    assert not maps.masked_select(~real.unsqueeze(1)).any()
    for b in range(3):
        s, t = int(real[b].sum()), int((target[b] != PAD).sum())
        alone, weights = defined(model, source[b, :s], before(target)[b, :t])
        assert torch.allclose(logits[:t, b], alone, atol=1e-12)
        assert torch.allclose(maps[b, :t, :s], weights, atol=1e-12)
        direction = torch.randn_like(alone)
        cost, expected = (
            cost + (logits[:t, b] * direction).sum(),
            expected + (alone * direction).sum(),
        )
    ours, theirs = (
        torch.autograd.grad(total, list(model.parameters())) for total in (cost, expected)
    )
    for name, a, b in zip(dict(model.named_parameters()), ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-10), name


THIN = {"gate": True, "thin_gate": True, "nonlinearity": "tanh"}


@settings(max_examples=15)
@given(
    st.sampled_from([(*one, {}) for one in METHODS] + [("cwy", None, THIN)]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_what_is_beyond_an_end_changes_nothing(method, lengths, more, further, seed):
    torch.manual_seed(seed)
    name, reflections, options = method
    model = translator(name, reflections, **options)
    padding = torch.full((len(lengths), 9), PAD)
    nmt = task.load("nmt").loss
    source, target = sentences([s for s, _ in lengths], 8), sentences([t for _, t in lengths], 8)
    weight = torch.rand(len(lengths), dtype=torch.float64)

    def measured(*batch):
        model.zero_grad()
        loss, _ = nmt(None, model, batch)
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    loss, grads = measured(source, target, weight)
    # Whatever stands for padding, it has no influence, and nothing is learnt about it.
    with torch.no_grad():
        for embedding in model.source, model.target:
            embedding.weight[PAD] = 50 * torch.randn(5, dtype=torch.float64)
    again, grads_again = measured(source, target, weight)
    assert torch.equal(loss, again)
    assert same(grads, grads_again)
    assert not grads["source.weight"][PAD].any()
    assert not grads["target.weight"][PAD].any()
    # Nor has how much of it there is, nor a row that only fills the batch.
    filled = [
        torch.cat([part, padding[:, :count]], 1)
        for part, count in ((source, more), (target, further))
    ]
    row = torch.full((1, 8 + more), PAD)
    row[0, 0] = END
    filled[0], filled[1] = (
        torch.cat([filled[0], row]),
        torch.cat([filled[1], torch.full((1, 8 + further), PAD)]),
    )
    scaled = torch.cat([weight, weight[:1]]) * (len(weight) + 1) / len(weight)
    longer, grads_longer = measured(*filled, scaled)
    assert torch.allclose(loss, longer, atol=1e-12)
    assert all(torch.allclose(grads[name], grads_longer[name], atol=1e-10) for name in grads)


def test_a_backward_counts_what_it_met_itself():
    m, rows = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, 4, requires_grad=True)
    times = RepeatedProduct(m)
    first, *others = [times(part).square().sum() for part in rows]
    torch.autograd.grad(first, rows, retain_graph=True)
    ours, theirs = (
        torch.autograd.grad(total, m)[0] for total in (sum(others), (rows[1:] @ m).square().sum())
    )
    torch.testing.assert_close(ours, theirs)


def test_a_repeated_product_has_second_derivatives():
    m = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    h = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def rolled(m, h):
        times = RepeatedProduct(m)
        for _ in range(3):
            h = torch.tanh(times(h))
        return h

    assert torch.autograd.gradcheck(rolled, (m, h))
    assert torch.autograd.gradgradcheck(rolled, (m, h))


def test_a_product_prepared_without_gradients_has_them_later():
    m, x = torch.randn(4, 3, requires_grad=True), torch.randn(2, 4)
    with torch.no_grad():
        times = RepeatedProduct(m)
    (found,) = torch.autograd.grad(times(x).square().sum(), m)
    (expected,) = torch.autograd.grad((x @ m).square().sum(), m)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("method", "more"), [("cwy", {}), ("cwy", THIN), ("lstm", {})])
@torch.no_grad()
def test_decoding_finds_the_likeliest(method, more):
    model, limit = translator(method, words=3, **more), 3
    model.readout.weight *= 6
    source = sentences([5, 2, 4], 7, words=7)

    def costs(row, words):
        """The log-probabilities of a sentence's words and end; those of words that are never said
        are left out.
        """
        logits = model(source[row : row + 1], torch.tensor([[START, *words]]))[:, 0]
        logits[:, [PAD, START, UNKNOWN]] = -torch.inf
        return logits.log_softmax(-1).gather(1, torch.tensor([[*words, END]]).mT).squeeze(1)

    greedy = decode(model, source, limit)
    for row, said in enumerate(greedy):
        words = []
        while len(words) < limit:
            words.append(
                max([END, 4, 5, 6], key=lambda word: costs(row, [*words, word])[len(words)])
            )
            if words[-1] == END:
                words.pop()
                break
        assert said == words
        assert decode(model, source[row : row + 1], limit) == [said], "alone as in a batch"
    every = [
        list(words)
        for count in range(limit + 1)
        for words in itertools.product([4, 5, 6], repeat=count)
    ]
    for row, said in enumerate(decode(model, source, limit, beams=40)):
        assert said == max(every, key=lambda words: costs(row, words).mean())


@pytest.fixture(
    params=[
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(not simulated_gpu.COMPILER, reason="g++ is not installed"),
        ),
    ]
)
def device(request, monkeypatch):
    """A GPU, or a CPU that simulates one."""
    if request.param == "cpu":
        monkeypatch.setattr(fused, "_on_gpu", lambda x: True)
        monkeypatch.setattr(fused._nvrtc, "kernel", simulated_gpu.kernel)
    return request.param


@pytest.mark.parametrize(
    ("method", "reflections", "more"),
    [(*one, {}) for one in METHODS] + [(method, None, more) for method, more in SETTINGS],
)
def test_with_fused_steps_it_is_the_same(method, reflections, more, device):
    # Double precision takes the definition.
    model = translator(method, reflections, n=64, **more)
    source, target = sentences([4, 1, 6], 9), sentences([3, 5, 2], 8)
    expected = torch.cat([g.flatten() for g in _gradients(model, source, target)])
    model = model.float().to(device)
    slopes = _gradients(model, source.to(device), target.to(device))
    found = torch.cat([g.flatten().cpu() for g in slopes])
    # cuDNN approximates tanh.
    allowed = 1e-3 if method in ("rnn", "gru", "lstm") else 1e-4
    assert (found - expected).norm() < allowed * expected.norm()


FORMS = [
    ("Plain", "relu"),
    ("Plain", "leaky_relu"),
    ("Plain", "abs"),
    ("Plain", "modrelu"),
    ("Gated", "tanh"),
    ("Thin", "tanh"),
    ("Thin", "modrelu"),
    ("Gru", "tanh"),
    ("Lstm", "tanh"),
]


@pytest.mark.skipif(not _nvrtc.compiler.INSTALLED, reason="NVRTC is not installed")
@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", pointwise.CELLS)
def test_the_kernels_of_a_step_compile(cell, dtype, attends):
    form = fused.Form(cell, "tanh", attends, dtype)
    defines = tuple(sorted(form.macros.items()))
    assert b"backward" in _nvrtc.cubin(fused.KERNELS, defines, "sm_90", (fused.StepTensors,))


def test_a_cpu_takes_the_definition():
    x = torch.zeros(2, 3, 4)
    assert not fused.serves(x, x[0])


def test_double_precision_and_long_sentences_take_the_definition(device):
    x = torch.zeros(2, 3, 4, device=device)
    assert fused.serves(x, x[0])
    assert not fused.serves(x.double(), x[0].double())
    assert not fused.serves(x, x[0].double())
    assert not fused.serves(x[:0], x[0])
    assert not fused.serves(x, x[0], positions=10_000)


def rolled(given, cell, nonlinearity, lengths):
    """All steps by the definitions, and the attention. Products are in the matrix's dtype."""
    after = getattr(pointwise, cell)(nonlinearity, given.get("threshold"), given.get("vector"))
    state = tuple(given[name] for name in ("h", "c") if name in given)
    n = given["h"].shape[-1]
    matrix = given["matrix"]
    states, maps = [], []
    for x in given["x"]:
        product = (state[0].to(matrix.dtype) @ matrix.mT).to(x.dtype)
        context = None
        if "entries" in given:
            entries = given["entries"].to(x.dtype)
            beyond = torch.arange(len(entries), device=x.device).unsqueeze(1) >= lengths
            scores = torch.tanh(entries[..., :n] + product[:, :n]) @ given["score"]
            weights = scores.masked_fill(beyond, -torch.inf).softmax(0)
            maps.append(weights.mT)
            context = (weights.unsqueeze(-1) * entries[..., n:]).sum(0)
            product = product[:, n:]
        state = after.advance(x, context, product, state)
        states.append(state[0])
    return torch.stack(states), torch.stack(maps) if maps else None


def fused_steps(given, cell, nonlinearity, lengths):
    """The same by the kernels."""
    after = getattr(pointwise, cell)(nonlinearity, given.get("threshold"), given.get("vector"))
    state = tuple(given[name] for name in ("h", "c") if name in given)
    source = None
    if "entries" in given:
        source = fused.Source(given["entries"], given["score"], lengths)
    assert fused.serves(given["x"], given["matrix"], 45)
    return fused.roll(given["x"], given["matrix"], after, state, source)


def drawn(kind, nonlinearity, sizes, attends, device):
    """Random inputs of all steps, by name."""
    n, positions, batch, steps = sizes
    shapes = {
        "x": (steps, batch, kind.inputs * n),
        "matrix": ((kind.products + attends) * n, n),
        "h": (batch, n),
    }
    if kind is pointwise.Lstm:
        shapes["c"] = (batch, n)
    if kind in (pointwise.Thin, pointwise.Gru):
        shapes["vector"] = (n,)
    if nonlinearity == "modrelu":
        shapes["threshold"] = (n,)
    if attends:
        shapes["entries"] = (positions, batch, (1 + kind.contexts) * n)
        shapes["score"] = (n,)
    made = {
        name: torch.randn(shape, dtype=torch.float64, device=device)
        for name, shape in shapes.items()
    }
    # Their size is that of trained networks.
    made["matrix"] *= n**-0.5
    return made | {name: 0.3 * made[name] for name in ("score", "threshold") if name in made}


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize(
    ("sizes", "half"),
    [
        ((33, 7, 5, 4), torch.float32),
        ((33, 7, 5, 4), torch.bfloat16),
        ((33, 7, 5, 4), torch.float16),
        ((64, 2, 1, 1), torch.float32),
        ((20, 45, 5, 2), torch.float32),
        ((1100, 45, 5, 4), torch.float32),
    ],
)
@pytest.mark.parametrize(("cell", "nonlinearity"), FORMS)
def test_fused_steps_are_their_definition(cell, nonlinearity, sizes, half, attends, device):
    torch.manual_seed(0)
    n, positions, batch, steps = sizes
    kind = getattr(pointwise, cell)
    exact = drawn(kind, nonlinearity, sizes, attends, device)
    for name in ("matrix", "entries"):
        if name in exact:
            exact[name] = exact[name].to(half).double()
    lengths = torch.tensor([positions, 1, 3, 5, 2], device=device, dtype=torch.int32)[:batch]
    direction = torch.randn(steps, batch, n, dtype=torch.float64, device=device)

    def measured(call, dtype, product_dtype):
        given = {}
        for name, tensor in exact.items():
            chosen = product_dtype if name in ("matrix", "entries") else dtype
            given[name] = tensor.to(chosen).requires_grad_()
        states, maps = call(given, cell, nonlinearity, lengths)
        gradients = torch.autograd.grad((states * direction).sum(), list(given.values()))
        found = dict(zip([f"to {name}" for name in given], gradients, strict=True))
        if attends:
            found["weights"] = maps
        return {"states": states} | found

    truth = measured(rolled, torch.float64, torch.float64)
    plain = measured(rolled, torch.float32, half)
    ours = measured(fused_steps, torch.float32, half)
    for name, expected in truth.items():
        error = (ours[name].double() - expected).norm()
        allowed = 2 * (plain[name].double() - expected).norm() + 5e-6 * (1 + expected.norm())
        assert error <= allowed, name


def test_fused_steps_take_any_layout_and_go_back_twice(device):
    torch.manual_seed(0)
    exact = drawn(pointwise.Gru, "tanh", (33, 7, 5, 4), attends=True, device=device)
    lengths = torch.tensor([7, 1, 3, 5, 2], device=device, dtype=torch.int32)
    given = {name: t.float() for name, t in exact.items()}
    strided = {
        name: torch.stack([t, t], -1).flatten(-2)[..., ::2].requires_grad_()
        for name, t in given.items()
    }
    states, _ = fused_steps(strided, "Gru", "tanh", lengths)
    expected, _ = fused_steps(given, "Gru", "tanh", lengths)
    assert torch.equal(states, expected)
    loss = states.square().sum()
    inputs = list(strided.values())
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    again = torch.autograd.grad(loss, inputs)
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b)


def test_fused_steps_refuse_second_derivatives(device):
    given = {
        name: t.float()
        for name, t in drawn(pointwise.Lstm, "tanh", (8, 0, 2, 3), False, device).items()
    }
    given["x"].requires_grad_()
    states, _ = fused_steps(given, "Lstm", "tanh", None)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(states.sum(), given["x"], create_graph=True)


def test_fused_steps_without_gradients_are_the_same(device):
    model = translator("lstm", n=64, dtype=torch.float32).to(device)
    source = sentences([4, 1, 6], 9).to(device)
    given = before(sentences([3, 5, 2], 8)).to(device)
    expected = model(source, given)
    with torch.no_grad():
        assert torch.equal(model(source, given), expected)


def _gradients(model, source, target):
    weight = torch.ones(len(source), device=source.device)
    return torch.autograd.grad(
        task.load("nmt").loss(None, model, (source, target, weight))[0], list(model.parameters())
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("cwy", {}),
        ("cwy", {"gate": True}),
        ("cwy", THIN),
        ("rnn", {}),
        ("gru", {}),
        ("lstm", {}),
    ],
)
def test_under_autocast_products_are_rounded_and_states_are_not(method, more, device):
    torch.manual_seed(0)
    model = translator(method, n=32, dtype=torch.float32, **more).to(device)
    source = sentences([3, 5, 2], 6).to(device)
    target = sentences([4, 2, 5], 6).to(device)

    def slopes(autocast):
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(source, before(target))
            states = model.states(source, before(target))
        logits.float().log_softmax(-1).square().sum().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        return logits.float(), states, grads

    logits, _, grads = slopes(autocast=False)
    half, states, rounded = slopes(autocast=True)
    assert states.dtype == torch.float32
    assert not torch.equal(states, states.bfloat16().float())
    assert 0 < (half - logits).abs().max() < 0.02 * logits.abs().max()
    assert (rounded - grads).norm() < 0.03 * grads.norm()


@pytest.mark.parametrize("more", [{}, {"gate": True, "thin_gate": True}])
def test_a_free_transition_starts_at_a_matrix_that_is_named(more):
    model = translator("rnn", nonlinearity="tanh", init="haar", **more)
    named = {name: p for name, p in model.named_parameters() if "weight_hh" in name}
    assert len(named) == 2, "one in the encoder and one in the decoder"
    for weight in named.values():
        assert cwy.orthogonality_error(weight) < 1e-12
    with pytest.raises(ConfigError, match="unknown init of rnn 'random'"):
        translator("rnn", nonlinearity="tanh", init="random")
    with pytest.raises(ConfigError, match="lstm starts as torch starts it"):
        translator("lstm", nonlinearity="tanh", init="haar")


def test_a_start_is_scaled_where_it_is_set():
    def drawn(**more):
        torch.manual_seed(0)
        return translator("lstm", **more).state_dict()

    full = drawn()
    scaled = drawn(embedding_scale=0.05, input_scale=3.0, zero_readout=True)
    factors = {
        "source.weight": 0.05,
        "target.weight": 0.05,
        "encoder.core.weight_ih_l0": 3.0,
        "decoder.weight_ih": 3.0,
        "readout.weight": 0.0,
        "readout.bias": 0.0,
    }
    for key, value in full.items():
        expected = value * factors.get(key, 1)
        if key == "encoder.core.weight_ih_l0":
            # The first column after the embedding marks padding, and the others are not used.
            features = full["source.weight"].shape[-1]
            gates = torch.tensor([-SATURATED, SATURATED, 0, 0]).repeat_interleave(len(value) // 4)
            expected[:, features] = gates
            expected[:, features + 1 :] = 0
        torch.testing.assert_close(scaled[key], expected.to(value.dtype), rtol=1e-12, atol=0)


def test_dropout_is_for_training():
    model = translator(dropout=0.5)
    source, target = sentences([4, 1, 6], 9), sentences([3, 5, 2], 8)
    assert not torch.equal(model(source, before(target)), model(source, before(target)))
    model.eval()
    assert torch.equal(model(source, before(target)), model(source, before(target)))


def test_steps_have_gradients_after_steps_without_them():
    model = translator(n=8)
    state, reader = model.read(sentences([4, 1, 6], 9))
    x = reader.inputs(torch.tensor([4, 5, 6]))
    with torch.no_grad():
        reader.stepper().advance(x, state)
    ((h,), _) = reader.stepper().advance(x, state)
    (slope,) = torch.autograd.grad(h.sum(), model.query.weight)
    assert slope.any()
