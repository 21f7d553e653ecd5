"""Parts of the subprocess hosting that need no SGLang: the environment, shared parameters, a server that ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridrl.rollout.sglang.process.guard import clean_environment
from hybridrl.rollout.sglang.process.shared import attach, share


def test_a_clean_environment_has_nothing_of_the_launcher() -> None:
    launcher = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "h", "TORCHELASTIC_RUN_ID": "1"}
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1", "HF_HOME": "/h"}
    assert clean_environment({**launcher, **kept}) == kept


def test_shared_parameters_are_one_memory(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(3, 5))
    module.bias = torch.nn.Parameter(torch.randn(7).bfloat16())
    share(dict(module.named_parameters()), tmp_path)
    mapped = attach(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    assert {n: (t.shape, t.dtype) for n, t in mapped.items()} == {
        n: (p.shape, p.dtype) for n, p in module.named_parameters()
    }
    with torch.no_grad():
        mapped["weight"].copy_(torch.arange(15.0).view(3, 5))
        module.bias.fill_(2.0)
    assert module.weight.flatten().tolist() == list(range(15))
    assert mapped["bias"].tolist() == [2.0] * 7


def test_a_child_of_another_parent_refuses_to_run() -> None:
    code = f"from hybridrl.rollout.sglang.process.guard import die_with; die_with({os.getpid() + 1})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert "ProcessLookupError" in result.stderr


def test_a_parent_that_is_still_there_is_accepted() -> None:
    code = f"from hybridrl.rollout.sglang.process.guard import die_with; die_with({os.getpid()})"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


def test_a_server_that_ends_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridrl.rollout.sglang.process import client

    monkeypatch.setattr(client.sys, "executable", "/bin/false")
    with pytest.raises(client.ServerError, match=r"ended with exit code 1 before it answered start"):
        client.ServerProcess({}, None, None)


SERVER = """
import multiprocessing, sys, threading, time
from hybridrl.rollout.sglang.process.server import end_with_children
context, over = multiprocessing.get_context("fork"), threading.Event()
child = context.Process(target=time.sleep, args=(300,), name="scheduler")
child.start()
end_with_children(over)
if sys.argv[1] == "closes":
    over.set()
child.kill()
time.sleep(3 if over.is_set() else 600)  # as a command that waits for the child
sys.exit(7)
"""


@pytest.mark.parametrize(("case", "code"), [("dies", 1), ("closes", 7)])
def test_a_server_that_waits_for_a_dead_process_ends(case: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SERVER, case], capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert ("SGLang's process scheduler ended with exit code -9" in ended.stderr) == (case == "dies")
