"""Fixtures shared by all tests."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.distributed.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Up to four gloo ranks that live as long as the session."""
    workers = WorkerPool(4)
    yield workers
    workers.close()
