"""Roles set up the project's logger for their process; a test that runs one must not do so for the others."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("treeward")
    logger.propagate = True
    handlers, level = list(logger.handlers), logger.level
    yield
    for handler in logger.handlers:
        if handler not in handlers:
            handler.close()
    logger.handlers, logger.propagate = handlers, True
    logger.setLevel(level)
