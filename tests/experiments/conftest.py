import pytest

from tests.helpers.runs import train


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder)[0] == 0
    return folder
