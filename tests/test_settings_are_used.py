"""A setting that nothing reads is a promise that is not kept (open-instruct #1823)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import run
from common.config import Config
from common.config_allocator import BUDGET_SCHEMAS, RULE_SCHEMAS
from common.settings import settings

ROOT = Path(run.__file__).resolve().parent
ROOMS = ("actors", "allocator", "common", "envs", "learner", "run.py")
REFUSED = ("engine.top_p",)
"""Has one value that is not refused, so that a person who sets it is told why."""
SCHEMAS = ("config.py", "config_allocator.py", "config_learner.py", "config_backend.py")


def attributes_read() -> set[str]:
    """Names of all attributes that the sources take the value of; of the schema's own files, those in functions
    other than `__post_init__`, which look at every setting and use none."""
    found: set[str] = set()
    for room in ROOMS:
        for path in [ROOT / room] if room.endswith(".py") else (ROOT / room).rglob("*.py"):
            tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
            if path.name in SCHEMAS:
                for node in ast.walk(tree):
                    if isinstance(node, ast.ClassDef):
                        node.body = [
                            part for part in node.body if getattr(part, "name", "") != "__post_init__"
                        ]
            found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found


@pytest.fixture(scope="module")
def read() -> set[str]:
    return attributes_read()


def test_every_setting_is_read_by_something(read: set[str]) -> None:
    keys = [key for key, _, _ in settings(Config())]
    for schemas in (RULE_SCHEMAS, BUDGET_SCHEMAS):
        keys += [key for schema in schemas.values() for key, _, _ in settings(schema())]
    assert [key for key in keys if key.rpartition(".")[2] not in read and key not in REFUSED] == []


def test_one_that_nothing_reads_would_be_noticed(read: set[str]) -> None:
    assert "resume" in read and "resume_from_checkpoint" not in read
