"""What stands under its own name is whole: errors leave nothing behind, and nothing whole is overwritten by halves."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hybridrl.files import cache_folder, file_aside, folder_aside, held


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "model"
    with folder_aside(out) as aside:
        (aside / "weights").write_text("all")
        assert not out.exists()
    assert (out / "weights").read_text() == "all"
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    assert out.stat().st_mode & 0o777 == 0o777 & ~_umask()


def fail_to_write(path: Path) -> None:
    path.write_text("half")
    raise ZeroDivisionError


def test_an_error_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), folder_aside(tmp_path / "model") as aside:
        fail_to_write(aside / "weights")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with folder_aside(out) as aside:
        (aside / "weights").write_text("first")
    with pytest.raises(OSError, match="not empty"), folder_aside(out) as aside:
        (aside / "weights").write_text("second")
    with folder_aside(out, first_wins=True) as aside:
        (aside / "weights").write_text("third")
    assert (out / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), file_aside(path) as aside:
        fail_to_write(aside)
    assert path.read_text() == "old"
    with file_aside(path) as aside:
        aside.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_cache_can_be_put_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("HYBRIDRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hybridrl"


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def test_a_folder_is_held_by_one_process_and_waited_for(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from hybridrl.files import held\n"
        "with held(Path(sys.argv[1]), 5.0):\n    print('held', flush=True); sys.stdin.read()"
    )
    folder = tmp_path / "runs" / "a"
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match=r"runs/a is in use by another process"), held(folder, 0.0):
            pass
        with held(tmp_path / "runs" / "b", 0.0):
            pass
        threading.Timer(0.5, other.stdin.close).start()
        with held(folder, 60.0), pytest.raises(BlockingIOError), held(folder, 0.0):
            pass
    with held(folder, 0.0):
        pass
