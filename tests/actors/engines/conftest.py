from pathlib import Path

import pytest

from tests.actors.engines.tiny_models import write_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Same architecture, other weights."""
    return write_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session", params=["llama", "qwen2", "gpt2"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), request.param)
