import pytest

from tests.helpers.language import write_pairs
from tests.helpers.runs import train


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder)[0] == 0
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A file of sentences whose translation is word by word."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    write_pairs(file)
    return file
