"""Fixtures shared by all tests, and an environment that is the same wherever they run."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.distributed.pool import WorkerPool
from tests.models.tiny import FOLDER_VARIABLE

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS")
TERMINALS = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")
for name in (*LAUNCHERS, *TERMINALS, "TORCHELASTIC_ERROR_FILE", "HYDRA_FULL_ERROR", "PYTHONWARNINGS"):
    os.environ.pop(name, None)
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples each time, however long one takes on a machine that is busy.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Models and data that are made on first use are this session's own, not what an earlier version has left. Child
    processes, which start later, find them in the same places."""
    os.environ["HYBRIDRL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ[FOLDER_VARIABLE] = str(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Up to four gloo ranks that live as long as the session."""
    workers = WorkerPool(4)
    yield workers
    workers.close()
