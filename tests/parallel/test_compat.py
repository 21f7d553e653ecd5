"""The patches: each is still needed, and together they are made once."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from hybridrl.parallel import compat
from tests.parallel.ablation import JOBS

ROOT = Path(__file__).parents[2]
ONE_RANK = [name for name, (_, world, _, _) in JOBS.items() if world == 1]
SEVERAL_RANKS = [name for name in JOBS if name not in ONE_RANK]

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these patches are not made")


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


def check_ablations(names: Sequence[str]) -> None:
    done = run_python("-m", "tests.parallel.ablation", *names)
    assert done.returncode == 0, done.stderr
    for name, (with_all, without) in json.loads(done.stdout.splitlines()[-1]).items():
        assert with_all is None, f"{name}: {with_all}"
        assert without is not None, f"megatron-core {version('megatron-core')} no longer needs the patch {name}"
        assert JOBS[name][3] in without, f"{name}: {without}"


@on_cpu
def test_each_patch_for_one_rank_is_still_needed() -> None:
    check_ablations(ONE_RANK)


@on_cpu
@pytest.mark.full
def test_each_patch_for_several_ranks_is_still_needed() -> None:
    check_ablations(SEVERAL_RANKS)


def test_every_patch_has_a_job_that_needs_it_and_says_why() -> None:
    assert {patch for patch, _, _, _ in JOBS.values()} == set(compat.PATCHES)
    for name, patch in compat.PATCHES.items():
        assert (patch.name, bool(patch.where), bool(patch.reason)) == (name, True, True)


def test_where_there_is_cuda_only_the_bugs_are_patched() -> None:
    general = {name for name, patch in compat.PATCHES.items() if patch.general}
    assert general == {"latent_attention_without_te", "router_without_te", "torch_adam_checkpoints"}
    code = (
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "from hybridrl.parallel import compat\n"
        "import os; assert 'TORCHDYNAMO_DISABLE' not in os.environ\n"
        "before = torch.cuda.current_device, torch.Tensor.cuda\n"
        "compat.install()\n"
        "assert before == (torch.cuda.current_device, torch.Tensor.cuda)\n"
        "print(*sorted(compat.installed()))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == sorted(general), done.stderr


def test_installing_twice_patches_once() -> None:
    compat.install()
    functions = torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda
    installed = compat.installed()
    compat.install()
    assert (torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda) == functions
    assert compat.installed() == installed


def test_an_untested_version_of_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda name: "0.19.2")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.19\.2 is installed.*0\.16\.x"):
        compat.install()


@on_cpu
def test_importing_megatron_first_is_refused_where_it_would_be_compiled() -> None:
    code = (
        "import sys, types; sys.modules['megatron.core.jit'] = types.ModuleType('jit'); import hybridrl.parallel.compat"
    )
    done = run_python("-c", code, TORCHDYNAMO_DISABLE="0")
    assert done.returncode != 0
    assert "import hybridrl.parallel.compat first" in done.stderr
