"""The data sets that are known. Later ones are added here, with their files, sizes and hashes."""

from __future__ import annotations

from difflib import get_close_matches

from .fetch import DataError, DataSet, File

MNIST = DataSet(
    "mnist",
    "handwritten digits, 60,000 + 10,000 images of 28 x 28 (LeCun, Cortes, Burges)",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        File("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        File("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        File("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        File("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
)

TATOEBA = DataSet(
    "tatoeba",
    "118,964 English sentences and their Spanish translations (tatoeba.org, manythings.org/anki; CC BY 2.0)",
    "https://storage.googleapis.com/download.tensorflow.org/data/",
    (
        File(
            "spa-eng.zip",
            8042772,
            "6ec60e212f812ee3430f7568ea6f33b6fb080e32193c5952e8da0ee8ba45574c",
            inside="spa-eng/spa.txt",
        ),
    ),
)

DATASETS = {dataset.name: dataset for dataset in (MNIST, TATOEBA)}


def find(name: str) -> DataSet:
    """The data set of that name; an unknown one raises with the nearest."""
    if name not in DATASETS:
        close = get_close_matches(name, DATASETS, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise DataError(f"data set {name!r} is not known. {hint}Known: {', '.join(DATASETS)}.")
    return DATASETS[name]
