"""Another SGLang than the known ones is refused, with what to do. No SGLang is needed."""

from importlib import metadata

import pytest

from hybridrl.rollout.sglang import versions


def test_an_unknown_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.6.0")
    with pytest.raises(versions.UnsupportedSGLangError, match=r"SGLang 0\.6\.0 is installed.* 0\.5\.23"):
        versions.require_supported()


def test_a_missing_sglang_is_told_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(versions.UnsupportedSGLangError, match="make sglang-cpu"):
        versions.require_supported()


def test_a_known_release_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: versions.SUPPORTED[0])
    assert versions.require_supported() == versions.SUPPORTED[0]
