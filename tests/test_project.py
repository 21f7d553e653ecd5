"""The project's metadata, its wheel, its Makefile and its continuous integration."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def requirements(project: dict[str, Any]) -> dict[str, Requirement]:
    return {r.name: r for r in map(Requirement, project["dependencies"])}


def test_the_pythons_are_those_that_every_dependency_has(project: dict[str, Any]) -> None:
    pythons = SpecifierSet(project["requires-python"])
    assert [f"3.{minor}" for minor in range(9, 15) if f"3.{minor}.1" in pythons] == ["3.11", "3.12"]


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("megatron-core", ["0.16.1"], ["0.15.3", "0.17.0"]),
        ("transformers", ["5.19.0", "5.24.0"], ["4.57.0", "6.0.0"]),
        ("torch", ["2.11.0", "2.13.0", "2.13.0+cpu", "2.14.1"], ["2.6.0", "3.0.0"]),
        ("hydra-core", ["1.3.2", "1.3.8"], ["1.4.0"]),
    ],
)
def test_ranges_hold_what_is_supported(
    project: dict[str, Any], name: str, inside: list[str], outside: list[str]
) -> None:
    specifier = requirements(project)[name].specifier
    assert all(version in specifier for version in inside)
    assert not any(version in specifier for version in outside)


def test_every_dependency_has_a_lower_and_an_upper_pin(project: dict[str, Any]) -> None:
    for requirement in requirements(project).values():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators, requirement
        assert "<" in operators, requirement


def test_the_extras(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    assert {"sglang", "gpu", "ray", "test"} <= set(extras)
    assert extras["sglang"] == ["sglang==0.5.23"]


def test_what_is_installed_is_in_range(project: dict[str, Any]) -> None:
    from importlib.metadata import version

    for requirement in requirements(project).values():
        assert requirement.specifier.contains(version(requirement.name), prereleases=True), requirement


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as pip does."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=200, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_configuration_and_recipes_travel_in_the_wheel(site: Path) -> None:
    for name in ("conf", "recipes"):
        shipped = {p.relative_to(site / "hybridrl" / name) for p in (site / "hybridrl" / name).rglob("*.yaml")}
        assert shipped == {p.relative_to(ROOT / name) for p in (ROOT / name).rglob("*.yaml")}
        assert shipped
    assert (site / "hydra_plugins" / "hybridrl_searchpath" / "__init__.py").is_file()
    assert not (site / "tests").exists()
    (metadata,) = site.glob("*.dist-info")
    assert "Apache License" in (metadata / "licenses" / "LICENSE").read_text()


def test_the_wheel_composes_a_recipe_from_any_folder(site: Path, tmp_path: Path) -> None:
    program = (
        "import hybridrl.config.folders as f; from hybridrl.config.load import hydra_main; "
        f"assert str(f.RECIPES).startswith({str(site)!r}), f.RECIPES; hydra_main(print)()"
    )
    command = [sys.executable, "-c", program, "recipe=grpo_tiny_moe", "--cfg", "job", "optimizer.lr=0.25"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert "path: builtin:tiny_moe" in run.stdout
    assert "lr: 0.25" in run.stdout
    assert not list(tmp_path.iterdir())


def test_continuous_integration_keeps_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "make").write_text('#!/bin/sh\necho "make $@ in $PWD"\nexit 7\n')
    (tmp_path / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / ".ci" / "run")]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (7, f"make test in {ROOT}\n")


def test_make_alone_lists_the_targets() -> None:
    run = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    for target in ("help", "install", "quickstart", "test", "test-full", "lint", "types", "format", "clean"):
        assert f"  make {target} " in run.stdout
