"""What the doctor says of packages that are there, absent, or broken."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.doctor import Finding, Package, check_devices, check_machine, check_package


def test_a_package_is_told_by_its_version() -> None:
    found = check_package(Package("pyyaml", "yaml", "always", "install it"), gpu=False)
    assert found.good
    assert found.found[0].isdigit()
    assert not found.blocks


@pytest.mark.parametrize(
    ("need", "gpu", "blocks"), [("always", False, True), ("gpu", False, False), ("gpu", True, True)]
)
def test_an_absent_package_blocks_where_it_is_needed(need: str, gpu: bool, blocks: bool) -> None:
    found = check_package(Package("nowhere", "nowhere_at_all", need, "install it"), gpu)
    assert not found.good
    assert "nowhere_at_all" in found.found
    assert found.advice == "install it"
    assert found.blocks is blocks


def test_a_package_that_kills_the_interpreter_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_package(Package("deadly", "deadly", "always", "remove it"), gpu=False)
    assert not found.good
    assert found.blocks


@pytest.mark.parametrize(("free", "lacks"), [(2**30, []), (2**20, ["shared memory"])])
def test_this_machine_can_run_where_it_has_shared_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, lacks: list[str]
) -> None:
    monkeypatch.setattr("tools.doctor.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    assert [one.name for one in check_machine() if one.blocks] == lacks


def test_devices_are_asked_for() -> None:
    assert isinstance(check_devices(), Finding)
    assert sys.version_info >= (3, 11)
