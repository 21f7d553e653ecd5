"""Warnings that are no news are silenced to the letter, and no others."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hybridrl.parallel.compat.quiet import SILENCED, silence


def shown(text: str, category: type[Warning], module: str) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        silence()
        warnings.warn_explicit(text, category, "file.py", 1, module=module)
    return bool(caught)


@pytest.mark.parametrize(("text", "category", "module"), SILENCED)
def test_each_filter_hides_its_text_from_its_module_alone(text: str, category: type[Warning], module: str) -> None:
    inside = module.replace("\\", "") + "somewhere"
    assert not shown(text + " and so on", category, inside)
    assert shown(text + " and so on", category, "user.code")
    assert shown("Something else: " + text, category, inside)
    assert shown(text + " and so on", DeprecationWarning, inside)


def test_the_entry_is_imported_without_a_word(tmp_path: Path) -> None:
    def run(code: str) -> tuple[int, str, str]:
        environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path)}
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        return ended.returncode, ended.stdout, ended.stderr

    run("import matplotlib.font_manager")  # looks through the machine's fonts the first time, and may say so
    assert run("import hybridrl.train") == (0, "", "")
