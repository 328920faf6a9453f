"""The known data sets, with their files, sizes and hashes."""

from __future__ import annotations

from pathlib import Path

from ..._hints import did_you_mean, sentences
from .fetch import DataError, DataSet, File

MNIST = DataSet(
    "mnist",
    "handwritten digits, 60,000 + 10,000 images of 28 x 28 (LeCun, Cortes, Burges)",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        File(
            "train-images-idx3-ubyte.gz",
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        File(
            "train-labels-idx1-ubyte.gz",
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        File(
            "t10k-images-idx3-ubyte.gz",
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        File(
            "t10k-labels-idx1-ubyte.gz",
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
)

KTH = DataSet(
    "kth",
    "six human actions by 25 people, 599 videos of 160 x 120 (Schuldt, Laptev, Caputo 2004)",
    "https://www.csc.kth.se/cvap/actions/",
    (
        File(
            "00sequences.txt",
            38081,
            "6331f4e4d0d820f306a46c40f82afc39f2486cc8723fe15f4742c14c261ccba7",
        ),
        File("walking.zip", None, "a3e81537271a0ab4576591774baa38c2d97b7e3a", archive=True),
        File("jogging.zip", None, "21943bdbcef9dad106db0d74661e49eaeaa15a25", archive=True),
        File("running.zip", None, "da83bb313edfd4455fffdda6263696fa10d43c6f", archive=True),
        File("boxing.zip", None, "adb36ed9c29c846d44d2ba15f348bd115c951bbd", archive=True),
        File("handwaving.zip", None, "0792f7cd69f7f895a205c08ac212ddaa7177e370", archive=True),
        File("handclapping.zip", None, "d3b81261aa822ef63d0d1523f945bfaff27814d2", archive=True),
    ),
)


def _listed(name: str) -> tuple[File, ...]:
    """Return the files of a list in this folder: name, size, SHA-256."""
    files = []
    for line in Path(__file__).with_name(name).read_text(encoding="ascii").splitlines():
        path, size, sha256 = line.split("\t")
        files.append(File(path, int(size), sha256))
    return tuple(files)


WEIZMANN = DataSet(
    "weizmann",
    "ten human actions by nine people, 90 videos of 180 x 144 "
    "(Gorelick, Blank, Shechtman, Irani, Basri 2005)",
    "https://raw.githubusercontent.com/hueihan/Action_Recognition/"
    "f8e99997cc6b7c0f45f6d45cf239f753bd36f7a3/data/WIS/video/",
    _listed("weizmann.tsv"),
)

TATOEBA = DataSet(
    "tatoeba",
    "118,964 English sentences and their Spanish translations "
    "(tatoeba.org, manythings.org/anki; CC BY 2.0)",
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

DATASETS = {dataset.name: dataset for dataset in (MNIST, KTH, WEIZMANN, TATOEBA)}


def find(name: str) -> DataSet:
    """Return the data set of that name. An unknown one raises with the nearest."""
    if name in DATASETS:
        return DATASETS[name]
    raise DataError(
        sentences(
            f"data set {name!r} is not known.",
            did_you_mean(name, DATASETS, count=1, cutoff=0.6),
            f"Known: {', '.join(DATASETS)}.",
        )
    )
