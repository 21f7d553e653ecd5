"""Outputs are written aside and renamed, so that what stands under its own name is always whole."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Where things made on first use are kept: `$HYBRIDRL_CACHE`, else `$XDG_CACHE_HOME/hybridrl` or its default."""
    own = os.environ.get("HYBRIDRL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "hybridrl"


@contextmanager
def folder_aside(out: Path, *, first_wins: bool = False) -> Iterator[Path]:
    """Yields an empty folder beside `out` that becomes `out` when the block ends well, and is removed when it does not.

    Raises FileExistsError at the end where `out` exists by then and is not empty; with `first_wins` the other one stays
    instead (for several processes that make the same thing).
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield aside
        aside.chmod(0o777 & ~_umask())
        try:
            aside.rename(out)
        except OSError:
            if not (first_wins and out.is_dir()):
                raise
            shutil.rmtree(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


@contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """Yields a name beside `path` to write to; it is synced and renamed to `path` at the end, removed on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
