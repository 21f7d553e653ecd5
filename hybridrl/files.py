"""Outputs are written aside and renamed, so that what stands under its own name is always whole."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
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


def standing(path: Path) -> Path:
    """What exists of a path: itself, or the nearest of those above it."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def takes_files(folder: Path) -> bool:
    """Whether this is a folder in which files can be made."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


PATIENCE_S = 60.0


@contextmanager
def held(folder: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Nobody else holds the folder while the block runs: a lock on `.<name>.lock` beside it (in it, where its parent
    cannot be written to), which ends with the process.

    Another one that is about to end is waited for. Raises BlockingIOError where it has not ended after `patience_s`. A
    file system without locks is taken at its word: there is none then.
    """
    path = folder.absolute().with_name(f".{folder.name}.lock")
    if folder.is_dir() and not os.access(path.parent, os.W_OK):
        path = folder / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience_s
    with path.open("a") as file:
        while not _locked(file.fileno()):
            if time.monotonic() > deadline:
                raise BlockingIOError(
                    f"{folder} is in use by another process, which has not ended in {patience_s:g} s (lock: {path})"
                )
            time.sleep(0.2)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    return True


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
