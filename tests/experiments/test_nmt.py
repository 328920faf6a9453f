"""Translation, the whole way from a file to a translation: training, stopping, going on,
reporting.
"""

import hashlib
import json
import math
import shutil
import signal
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from cwy.experiments.data import DataError, fetch, inspect
from cwy.experiments.data.sets import TATOEBA
from cwy.experiments.engine import task
from cwy.experiments.engine.config import ConfigError
from cwy.experiments.engine.display import Display
from cwy.experiments.engine.distributed import Group
from cwy.experiments.engine.folder import Folder
from cwy.experiments.engine.loop import Loop
from cwy.experiments.engine.monitor import Diverged
from cwy.experiments.engine.runner import RunError
from cwy.experiments.nmt.corpus import frequency_loss, load, read
from cwy.experiments.nmt.model import data_of
from cwy.experiments.nmt.recipes import paper
from cwy.experiments.nmt.report import DESCRIPTIONS, epoch_seconds
from cwy.experiments.nmt.text import PAD, START, Vocabulary
from cwy.experiments.nmt.translate import translate
from cwy.experiments.report import find_runs, write
from cwy.experiments.report.panels import arrange
from cwy.experiments.sweeps import Place, Planned
from cwy.experiments.worker import STOPPED, train_one
from tests.helpers.cli import COMMAND, cwy, run, start
from tests.helpers.language import TINY
from tests.helpers.runs import numbers, resume, same, until, weights
from tests.helpers.sample_runs import CONFIG, write_run
from tests.helpers.server import Server

pytest.importorskip("platformdirs")

pytestmark = pytest.mark.slow
RECORDS = Path(__file__).parents[2] / "results" / "nmt"


def test_a_file_is_split_once_and_for_all(tmp_path):
    file = tmp_path / "pairs.tsv"
    rows = [f"I have {i}.\tTengo {i % 40}.\tsomebody, CC BY" for i in range(100)]
    file.write_text(
        "\ufeff" + "\r\n".join([*rows, "no tab", "only one side\t...", "", rows[0].upper(), "\t"]),
        encoding="utf-8",
    )

    def corpus_of(seed=3, **more):
        return load(replace(paper("cwy"), file=str(file), min_count=1, **more), seed)

    corpus = corpus_of()
    assert [
        corpus.facts[key] for key in ("pairs", "bad lines", "repeated pairs", "train", "test")
    ] == [102, 1, 1, 81, 20]
    assert ("tengo", "7", ".") in {source for source, _ in (*corpus.train, *corpus.held_out)}
    assert not set(corpus.train) & set(corpus.held_out)
    assert corpus_of().train == corpus.train
    assert corpus_of(seed=4).train != corpus.train
    seen = {source for source, _ in corpus.train}
    overlap = sum(source in seen for source, _ in corpus.held_out) / 20
    assert corpus.facts["held-out sentences seen in training"] == [overlap, 0]
    assert set(corpus.vocabularies.target.words[4:]) == {
        word for _, target in corpus.train for word in target
    }
    # What a rate is chosen on is a part of the training pairs.
    chosen = corpus_of(validation=0.25)
    assert set(chosen.train) | set(chosen.held_out) == set(corpus.train)
    assert (len(chosen.held_out), chosen.facts["validation"], chosen.facts["test"]) == (20, 20, 20)
    assert chosen.test == corpus.test == corpus.held_out
    assert corpus_of(columns="1-2").train == [(target, source) for source, target in corpus.train]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no pair"),
        (b"a\n\tb\n...\t\n", "holds no pair of sentences with a tab between: its 3 lines"),
        ("Yes.\tSí.\n".encode("latin-1"), "is not UTF-8: byte 0xed at 6"),
        ("Yes.\tYes.\n".encode("utf-16-le"), "zero bytes"),
    ],
)
def test_a_file_that_is_none_is_refused(content, message):
    with pytest.raises(DataError, match=message):
        read(content, "pairs.tsv", "2-1")


def test_an_archive_is_known_by_what_is_in_it(tmp_path):
    content = b"a\tb\n" * 1000
    file = replace(TATOEBA.files[0], size=len(content), sha256=hashlib.sha256(content).hexdigest())
    packed = []
    for packing in zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED:
        with zipfile.ZipFile(tmp_path / "packed", "w", packing) as archive:
            archive.writestr(file.inside, content)
        packed.append((tmp_path / "packed").read_bytes())
        with Server(**{file.name: packed[-1]}) as server:
            some = replace(TATOEBA, home=server.home, files=(file,))
            assert (fetch(some, tmp_path / str(packing)) / file.name).read_bytes() == packed[-1]
    assert packed[0] != packed[1]
    with (
        Server(cut=70, **{file.name: packed[1]}) as server,
        pytest.raises(DataError, match="It was deleted: try again"),
    ):
        fetch(replace(TATOEBA, home=server.home, files=(file,)), tmp_path / "cut")
    assert not list((tmp_path / "cut").rglob("*.partial"))
    path, (head, _, tail) = tmp_path / "damaged", packed[1].partition(b"spa.txt")
    for damaged in (
        packed[1][:-30],
        head + b"spa.txt" + b"\0" * 9 + tail[9:],
        packed[0].replace(b"a\tb", b"b\ta"),
        b"",
    ):
        path.write_bytes(damaged)
        assert inspect(path, file)


def test_the_guess_by_frequency_is_a_distribution_over_words():
    vocabulary = Vocabulary(["a", "b"])
    train = [("a", "a"), ("a", "c")]
    # Every word counts as if it occurred once more: pad, start, end, unknown, a, b.
    counts = torch.tensor([1.0, 1, 3, 2, 4, 1])
    log_p = (counts / counts.sum()).log()
    expected = -float(log_p[vocabulary.numbers(("b", "a"))].mean())
    assert frequency_loss(vocabulary, train, [("b", "a")]) == pytest.approx(expected, abs=1e-3)


def test_a_file_whose_words_are_all_rare_is_refused(pairs):
    with pytest.raises(DataError, match="no word occurs min_count=9999 times"):
        load(replace(paper("cwy"), file=str(pairs), min_count=9999), 0)


@pytest.mark.skipif(
    not (TATOEBA.folder() / TATOEBA.files[0].name).exists(), reason="Tatoeba is not in CWY_DATA"
)
def test_tatoeba_is_read_whole():
    corpus = load(paper("cwy"), 0)
    assert [corpus.facts[key] for key in ("pairs", "bad lines", "train", "test")] == [
        118_964,
        0,
        95_069,
        23_767,
    ]
    assert corpus.longest_target == 50
    assert [7 < mean < 8 for mean in corpus.facts["mean words"]] == [True, True]
    assert [most > 40 for most in corpus.facts["most words"]] == [True, True]


def arguments(pairs, out, *more, **changes):
    every = {
        "file": pairs,
        "pairs": "none",
        "hidden_size": 64,
        "embedding_size": 24,
        "batch_size": 16,
        "epochs": 30,
        "embedding_scale": 0.2,
        "warmup": 100,
    }
    every |= {
        "save_every": 51,
        "log_every": 5,
        "reflections": 40,
        "lr": 1e-2,
        "orthogonal_lr": 5e-3,
    } | changes
    return [
        "train",
        "nmt/small",
        "--out",
        str(out),
        *more,
        *(f"--set={key}={value}" for key, value in every.items()),
    ]


@pytest.fixture(scope="module")
def trained(pairs, tmp_path_factory):
    out = tmp_path_factory.mktemp("nmt") / "run"
    done = cwy(*arguments(pairs, out))
    assert done.returncode == 0, done.stderr
    assert "bad lines 0" in " ".join(done.stdout.split())
    return out


def said(capsys, folder, *texts, beams=1, attention=None, held_out=None):
    """What ``cwy translate`` prints, and what it says beside that."""
    notes = []
    translate(folder, texts, beams, attention, held_out, "cpu", notes.append)
    return capsys.readouterr().out.splitlines(), notes


def test_it_learns_a_language(trained):
    record = json.loads((trained / "record.json").read_text())
    final = record["final"]["test"]
    assert final["bleu"] > 90
    assert final["loss"] < 0.1
    assert final["perplexity"] == pytest.approx(2.718281828 ** final["loss"])
    assert final["paper_loss"] < final["loss"]
    # The embeddings have a scale of 0.2, and Adam moves each entry by up to 0.01 in a step.
    assert 0.2 < final["embedding_change"] < 50
    assert final["paper_perplexity"] == pytest.approx(2 ** final["paper_loss"])
    assert (
        record["data"]["train"] + record["data"]["test"] + record["data"]["repeated pairs"] == 700
    )


@torch.no_grad()
def test_the_energy_along_one_direction_is_that_of_real_words(pairs):
    texts = (f"file={pairs}", "pairs=none", "hidden_size=8", "embedding_size=4", "bucket=99")
    texts += ("test_batch_size=999",)
    nmt = task.load("nmt")(
        task.settings("nmt/small", assignments=texts, precision="float64"), torch.device("cpu")
    )
    model = nmt.model()
    states = []
    words = nmt.corpus.vocabularies
    for pair in nmt.corpus.held_out:
        source = torch.tensor([words.source.numbers(pair.source)])
        target = words.target.numbers(pair.target)
        states.append(model.states(source, torch.tensor([[START, *target[:-1]]]))[:, 0])
    energies = torch.linalg.svdvals(torch.cat(states)).square()
    found = nmt.evaluate(model)["test"]["principal_share"]
    assert found == pytest.approx(float(energies[0] / energies.sum()), rel=1e-9)
    for dead in (0.0, torch.inf):
        for parameter in model.parameters():
            parameter.fill_(dead)
        assert nmt.evaluate(model)["test"]["principal_share"] == 0, "there is no direction"


def test_stopped_and_resumed_it_is_the_run_that_never_stopped(pairs, trained, tmp_path, capsys):
    stopped = tmp_path / "run"
    process = start(*arguments(pairs, stopped))
    until(process, stopped, 30)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=20)
    assert "and saved" in error
    assert len(said(capsys, stopped, "Mi perro.")[0]) == 1, "its last checkpoint translates"
    assert resume(stopped)[0] == 0
    assert same(weights(stopped), weights(trained))
    assert numbers(stopped) == numbers(trained)


def test_translations_come_with_what_must_be_known(trained, tmp_path, capsys):
    told, notes = said(
        capsys, trained, "mi gato ve tu casa.", "¡Mi GÁTO.", "", f"{'gato ' * 40}", beams=3
    )
    assert told[:3] == ["my cat sees your house .", told[1], ""], "a line for a line"
    assert notes[0] == "'¡Mi GÁTO.': not known: ¡."
    assert "there is no word in it" in notes[1]
    assert "40 words, the longest sentence in training had 6" in notes[2]
    rows, _ = said(capsys, trained, held_out=3)
    assert [row.split("\t")[0] for row in rows] == ["0", "1", "2"]
    assert sum(row.split("\t")[2] == row.split("\t")[3] for row in rows) > 1
    picture = tmp_path / "attention.png"
    done = run(
        "sh", "-c", rf"printf 'Mi gato ve tu casa.\n\nS\355.\n' | {COMMAND} translate {trained}"
    )
    assert (done.returncode, done.stdout) == (1, f"{told[0]}\n\n"), done.stderr
    assert "line 3 of the input is not UTF-8: byte 0xed at 1. Convert it first." in " ".join(
        done.stderr.split()
    )
    _, notes = said(capsys, trained, "Mi perro.", attention=picture)
    assert not any("font" in note for note in notes)
    assert imread(picture).std() > 0.05
    _, notes = said(capsys, trained, "Mi \N{CJK UNIFIED IDEOGRAPH-6211}.", attention=picture)
    assert any("font" in note for note in notes), "a character of no font here is a box"
    long = "a" * 100_000
    _, notes = said(capsys, trained, long)
    assert len("".join(notes)) < 300, "an unknown word is cut"


def test_what_can_not_translate_says_why(whole, trained, tmp_path):
    def refused(folder, match, *texts, **options):
        with pytest.raises(ValueError, match=match):
            said(None, folder, *texts, **options)

    refused(whole, "is a run of copying, which translates nothing", "hola")
    refused(tmp_path, "is not a run folder: .* To list the runs in it: cwy runs", "hola")
    refused(trained, "--beams must be at most 17", "mi gato", beams=18)
    refused(trained, "must end in .png", "hola", attention=Path("map.doc"))
    refused(trained, "give one, in quotes", "a", "b", attention=Path("map.png"))
    refused(trained, "has no words", " ", attention=Path("map.png"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "map.png").mkdir()
    refused(
        trained,
        "cannot write --attention .*map.png: Is a directory",
        "mi gato",
        attention=other / "map.png",
    )
    config, content = (
        json.loads((trained / "config.json").read_text()),
        (trained / "weights.safetensors").read_bytes(),
    )
    (other / "weights.safetensors").write_bytes(content)
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 40}))
    refused(other, "other: another version .*, or its config.json was changed", "hola")
    (other / "config.json").write_text(json.dumps(config | {"method": "lstm"}))
    refused(
        other,
        "other are not those of its settings: .*reflections is a setting of orthog",
        "hola",
    )
    (other / "weights.safetensors").write_bytes(content[:-9])
    refused(other, "weights.safetensors is damaged", "hola")
    (other / "weights.safetensors").write_bytes((whole / "weights.safetensors").read_bytes())
    refused(other, "are not those of its settings: they hold no words", "hola")


def test_the_best_epoch_translates_and_not_the_last(trained, tmp_path, capsys):
    shutil.copy(trained / "config.json", tmp_path)
    shutil.copy(trained / "weights.safetensors", tmp_path / "best.safetensors")
    (tmp_path / "weights.safetensors").write_bytes(b"a later epoch")
    assert said(capsys, tmp_path, "mi gato ve tu casa.")[0] == ["my cat sees your house ."]
    shutil.copy(tmp_path / "best.safetensors", tmp_path / "weights.safetensors")
    (tmp_path / "best.safetensors").unlink()
    (tmp_path / "record.json").write_text('{"best": {"value": 1.0}}')
    translated, notes = said(capsys, tmp_path, "mi gato ve tu casa.")
    assert translated == ["my cat sees your house ."]
    assert any("best.safetensors" in note for note in notes), "the best one is gone"


def test_a_run_goes_on_with_its_own_data_alone(pairs, tmp_path, monkeypatch, capsys):
    content, out = pairs.read_text(), tmp_path / "run"
    (tmp_path / "pairs.tsv").write_text(content)
    monkeypatch.chdir(tmp_path)
    process = start(*arguments("pairs.tsv", out))
    until(process, out, 15)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    monkeypatch.chdir(out)
    assert len(said(capsys, out, held_out=2)[0]) == 2, "from another folder"
    first, rest = content.split(".", 1)
    for changed in content.replace("red", "green"), f"{' '.join(reversed(first.split()))}.{rest}":
        (tmp_path / "pairs.tsv").write_text(changed)
        with pytest.raises(ConfigError, match="data have changed since the run"):
            said(None, out, held_out=1)
        with pytest.raises(RunError):
            resume(out)


def test_a_run_whose_file_has_more_words_now_is_not_gone_on_with(pairs, tmp_path):
    file = tmp_path / "pairs.tsv"
    shutil.copy(pairs, file)
    run = Planned("run", "nmt/paper", "cwy", 0, (f"file={file}", *TINY, "epochs=1000"))
    assert train_one(run, Place(tmp_path, stop=time.time() + 0.3)) == STOPPED
    with file.open("a") as lines:
        lines.write("a green tree.\tun verde arbol.\n" * 2)
    with pytest.raises(RunError, match="belong to other data"):
        resume(tmp_path / "run")


def test_weights_that_do_not_know_their_file_are_gone_on_with(pairs):
    texts = (f"file={pairs}", "pairs=none", "hidden_size=8", "embedding_size=4")
    model = task.load("nmt")(
        task.settings("nmt/small", assignments=texts), torch.device("cpu")
    ).model()
    state = model.state_dict()
    assert data_of(state["_extra_state"]) == model.data
    del model.data["sha256"]
    old = model.state_dict()
    model.data["sha256"] = "of the file"
    model.load_state_dict(old)
    with pytest.raises(ConfigError, match="belong to other data"):
        model.load_state_dict(state)


def test_a_file_below_an_unknown_home_is_a_path_like_others():
    found = task.settings("nmt/small", assignments=("file=~nobody-here/pairs.tsv",)).config.file
    assert found == str(Path.cwd() / "~nobody-here" / "pairs.tsv")


def test_a_recipe_may_be_named_after_a_method():
    names = ("cwy-128", "lstm", "paper-lstm", "paper-cwy-128")
    assert [task.settings(f"nmt/{name}").method for name in names] == ["cwy", "lstm", "lstm", "cwy"]
    assert [task.settings(f"nmt/{name}").name for name in names] == [f"{n}-seed0" for n in names]
    assert task.settings("nmt/lstm", "gru").config == task.settings("nmt/gru").config


def test_recipes_of_the_paper_keep_its_settings_and_others_are_tuned():
    paper = task.settings("nmt/paper-cwy-128").config
    assert (paper.lr, paper.orthogonal_lr, paper.nonlinearity) == (1e-2, 1e-2, "abs")
    assert (paper.embedding_scale, paper.validation, paper.reflections) == (1.0, None, 128)
    tuned = task.settings("nmt/cwy-128").config
    assert (tuned.nonlinearity, tuned.reflections, tuned.validation) == ("relu", 128, 0.1)
    assert tuned.embedding_scale < 1
    assert (paper.dropout, tuned.dropout) == (None, 0.3)
    for method in ("rnn", "gru", "lstm"):
        assert task.settings(f"nmt/{method}").config.lr < 1e-2
    gated = task.settings("nmt/cwy-256-gate")
    assert (gated.method, gated.config.reflections, gated.config.gate) == ("cwy", 256, True)
    with pytest.raises(ConfigError, match="or gate=true for an orthogonal"):
        task.settings("nmt/cwy-128", assignments=("thin_gate=true",))


@pytest.mark.skipif(not RECORDS.exists(), reason="needs the records of the repository")
@pytest.mark.parametrize(
    ("recipe", "run"),
    [
        ("lstm", "decay-lstm-dropout0.3"),
        ("gru", "decay-gru-dropout0.5"),
        ("rnn", "tuned-rnn-tanh-dropout"),
        ("cwy-64", "decay-cwy-64-relu-dropout0.3"),
        ("cwy-128", "decay-cwy-128-relu-dropout0.3"),
        ("cwy-256", "decay-cwy-256-relu-dropout0.3"),
        ("cwy-512", "decay-cwy-512-relu-dropout0.3"),
        ("cwy-256-gate", "decay-cwy-256-tanh-gate-thin-dropout0.3"),
        ("cwy-512-gate", "decay-cwy-512-tanh-gate-thin-dropout0.3"),
    ],
)
def test_a_recipe_has_the_settings_that_were_measured(recipe, run):
    there = Folder(RECORDS / f"{run}-seed0").settings()
    assert there.precision == "bfloat16", "as the docs say"
    measured = there.config
    config = task.settings(f"nmt/{recipe}").config
    assert config == replace(measured, log_every=config.log_every, save_every=config.save_every)


def test_batches_have_few_shapes_and_every_pair_once(pairs):
    texts = (f"file={pairs}", "pairs=none", "batch_size=32", "hidden_size=8", "embedding_size=4")
    nmt = task.load("nmt")(task.settings("nmt/small", assignments=texts), torch.device("cpu"))
    batches = [nmt.batch(step) for step in range(nmt.epoch)]
    assert {source.shape == target.shape for source, target, _ in batches} == {True}
    assert {len(source) for source, _, _ in batches} == {32}
    assert len({source.shape for source, _, _ in batches}) <= 3
    rows = [
        tuple(row)
        for source, target, _ in batches
        for row in torch.cat([source, target], 1).tolist()
    ]
    text = nmt.corpus.vocabularies.source.text, nmt.corpus.vocabularies.target.text
    said = [(text[0](row[: len(row) // 2]), text[1](row[len(row) // 2 :])) for row in rows]
    assert sorted(pair for pair in said if pair[1]) == sorted(
        (" ".join(a), " ".join(b)) for a, b in nmt.corpus.train
    )
    for _, target, weight in batches:
        assert float(weight.sum()) == pytest.approx(32 * 32 / int((target != PAD).sum()))
    whole = task.load("nmt")(
        replace(nmt.settings, config=replace(nmt.config, batch_size=9999)), torch.device("cpu")
    )
    assert (whole.epoch, len(whole.batch(0)[0])) == (1, len(nmt.corpus.train)), (
        "no more rows than pairs"
    )
    fresh = task.load("nmt")(nmt.settings, torch.device("cpu"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(nmt.batch(nmt.epoch + 1), fresh.batch(nmt.epoch + 1), strict=True)
    )


@torch.no_grad()
def test_the_loss_of_a_batch_is_that_of_its_shares(pairs, monkeypatch):
    texts = (f"file={pairs}", "pairs=none", "batch_size=32", "hidden_size=8", "embedding_size=4")
    nmt = task.load("nmt")(
        task.settings("nmt/small", assignments=texts, precision="float64"), torch.device("cpu")
    )
    batch, model, shares = nmt.batch(0), nmt.model(), []
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        mine, weight = Group("cpu").share(batch)
        shares.append(float(nmt.loss(model, mine)[0]) * weight)
    assert sum(shares) / 3 == pytest.approx(float(nmt.loss(model, batch)[0]), rel=1e-12)


def test_the_report_holds_times_against_the_lstm_and_the_paper(tmp_path):
    for method, pace, loss in ("cwy", 3.0, 1.5), ("lstm", 4.0, 1.4):
        config = {
            "task": "nmt",
            "method": method,
            "seed": 0,
            **CONFIG,
            "hidden_size": 1024,
            "embedding_size": 256,
        }
        config |= {
            "epochs": 10,
            "lr": 1e-2,
            "file": None,
            "validation": None,
            "reflections": 128 if method == "cwy" else None,
        }
        config |= {"batch_size": 64, "columns": "2-1", "pairs": None}
        config |= {"optimizer": "adam", "init": "random" if method == "cwy" else None}
        config |= {"nonlinearity": "abs" if method == "cwy" else "tanh"}
        rows = []
        for epoch in range(1, 11):
            common = {"step": epoch * 1490, "seconds": 5 + pace * epoch, "epoch": epoch}
            rows.append({**common, "split": "train", "loss": 2.0})
            rows.append(
                {**common, "split": "test", "loss": loss, "perplexity": 4.0, "paper_loss": 0.3}
            )
            rows[-1] |= {"paper_perplexity": 1.23, "bleu": 30.0}
        hour = {"cwy": 3, "lstm": 4}[method]
        started = f"2026-01-02T0{hour}:00:00+00:00"
        write_run(tmp_path / method, config, rows, parameters=20_000_000, started=started)
    runs = find_runs([tmp_path])
    assert sorted(map(epoch_seconds, runs)) == [3.5, 4.5]
    (panel,) = arrange(runs)
    assert panel.finding == "lstm 1.400 and cwy 1.500 nats per word"
    for other in (
        {"nonlinearity": "tanh"},
        {"columns": "1-2"},
        {"optimizer": "sgd"},
        {"init": "identity"},
        {"pairs": 9000},
        {"validation": 0.1},
        {"gate": True},
        {"dropout": 0.3},
        {"clip": 1.0},
        {"warmup": 100},
    ):
        assert panel.description.published({**panel.config, **other}) is None, (
            "what the paper did not run"
        )
    moved = {**panel.config, "method": "rgd-c-c", "nonlinearity": "abs", "lr": 1e-3}
    assert panel.description.published(moved).startswith("perplexity 4.03, loss 2.01")
    (tmp_path / "report").mkdir()
    page = write(runs, tmp_path / "report")[0].read_text()
    assert "perplexity 1.41, loss 0.50 ± .01, 198 min on a TPU, ≈ 23 M parameters" in page
    assert "<td>0.78</td>" in page
    at_once = [replace(run, record=run.record | {"started": started}) for run in runs]
    page = write(at_once, tmp_path / "report")[0].read_text()
    assert "<td>0.78</td>" not in page, "runs that shared a device"


def test_the_report_shows_the_best_epoch(tmp_path):
    config = {"task": "nmt", "method": "lstm", "seed": 0, **CONFIG}
    rows = [
        {"step": step, "seconds": step, "split": "validation", "loss": loss}
        | {"principal_share": share}
        for step, loss, share in ((1, 3.0, 0.25), (2, 1.0, 0.5), (3, 2.0, 0.75))
    ]
    tested = {"step": 3, "seconds": 3, "split": "test", "loss": 1.25}
    best = {"metric": "validation loss", "value": 1.0, "step": 2}
    write_run(tmp_path / "validated", config, rows, best=best)
    write_run(tmp_path / "tested", config, [*rows, tested], best=best)
    write_run(tmp_path / "early", config, rows[:2], best=best)
    for name in ("validated", "tested", "early"):
        # As a sweep restores a run.
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-restored")
        (tmp_path / f"{name}-restored" / "metrics.jsonl").unlink()
    found = {}
    for one in find_runs([tmp_path]):
        values = {column.heading: column.value(one) for column in DESCRIPTIONS["nmt"].columns}
        found[one.folder.name] = (values["loss per word"], values["energy in one direction"])
    assert found == {
        "validated": (1.0, 0.5),
        "tested": (1.25, 0.5),
        "early": (1.0, 0.5),
        # The energy in a record is that of the last epoch.
        "validated-restored": (1.0, None),
        "tested-restored": (1.25, None),
        "early-restored": (1.0, 0.5),
    }


def test_a_test_that_is_not_finite_leaves_no_record(pairs, tmp_path, monkeypatch):
    chosen = task.settings("nmt/paper", "cwy", 0, (f"file={pairs}", *TINY, "validation=0.1"))
    monkeypatch.setattr(task.load("nmt"), "_bleu", lambda self, model: math.nan)
    folder = Folder(tmp_path / "run")
    with pytest.raises(Diverged, match="the test metric bleu is nan"):
        Loop(chosen, folder, Group("cpu"), Display(None)).run()
    assert not folder.finished


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("cwy", ("gate=false", "thin_gate=false", "nonlinearity=relu")),
        ("cwy", ("gate=true", "thin_gate=true", "nonlinearity=tanh")),
        ("lstm", ("reflections=none", "nonlinearity=tanh")),
    ],
)
def test_on_the_gpu_graphs_of_many_shapes_are_the_run_without_them(method, more, pairs, tmp_path):
    # A loss that is far from zero is compared.
    short = {"epochs": 20, "reflections": 16, "embedding_scale": 0.05, "lr": 5e-3}
    given = arguments(pairs, tmp_path, **short)
    texts = [one.removeprefix("--set=") for one in given if one.startswith("--set=")]
    texts += more
    # What changes between steps must reach the graphs.
    texts += ["warmup=20", "clip=1"]
    losses = []
    for eager in ("false", "true"):
        every = (*texts, f"eager={eager}")
        chosen = task.settings("nmt/small", method, 0, every, device="cuda")
        record = Loop(chosen, Folder(tmp_path / eager), Group("cuda"), Display(None)).run()
        losses.append(record["final"]["test"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize("eager", [False, True])
def test_only_eager_steps_are_not_captured(eager, pairs):
    texts = (f"file={pairs}", *TINY, f"eager={str(eager).lower()}")
    chosen = task.settings("nmt/small", "cwy", 0, texts)
    assert task.load("nmt")(chosen, torch.device("cpu")).capturable is not eager
