"""Reading rows, and what is said when they cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.schema import DataConfig
from hybridrl.data import builtin
from hybridrl.data.errors import DataError
from hybridrl.data.rows import load_rows

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "answer": i + 1, "level": [i]} for i in range(5)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def fields(config: DataConfig) -> list[dict[str, Any]]:
    return [row.fields for row in load_rows(config)]


def test_jsonl_files_folders_and_globs(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "b.jsonl", ROWS[2:])
    first.write_text("\ufeff" + first.read_text() + "\n\n", encoding="utf-8")
    assert fields(DataConfig(path=str(first))) == ROWS[:2]
    assert fields(DataConfig(path=str(tmp_path))) == ROWS
    assert fields(DataConfig(path=str(tmp_path / "*.jsonl"))) == ROWS
    assert load_rows(DataConfig(path=str(first)))[1].where == f"{first}:2"


def test_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path / "key=value" / "0.parquet", ROWS)
    assert fields(DataConfig(source="parquet", path=str(tmp_path))) == ROWS


def test_saved_data_sets(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    splits = {"train": datasets.Dataset.from_list(ROWS[:3]), "test": datasets.Dataset.from_list(ROWS[3:])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "two"))
    assert fields(DataConfig(source="dataset", path=str(tmp_path / "one"))) == ROWS
    assert fields(DataConfig(source="dataset", path=str(tmp_path / "two"), split="test")) == ROWS[3:]
    with pytest.raises(DataError, match="train, test"):
        load_rows(DataConfig(source="dataset", path=str(tmp_path / "two")))
    with pytest.raises(DataError, match="without splits"):
        load_rows(DataConfig(source="dataset", path=str(tmp_path / "one"), split="train"))


def test_folders_of_a_hub_data_set_are_read_by_split(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:2])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[2:4])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[4:])
    source = {"source": "dataset", "path": str(tmp_path)}
    assert fields(DataConfig(**source, split="train")) == ROWS[:4]
    assert fields(DataConfig(**source, split="test")) == ROWS[4:]
    with pytest.raises(DataError, match=r"test, train; choose by data\.split"):
        load_rows(DataConfig(**source))
    with pytest.raises(DataError, match="train-00000"):
        load_rows(DataConfig(**source, split="validation"))


def test_reasoning_gym_rows_depend_on_the_seed_alone() -> None:
    config = DataConfig(source="reasoning_gym", task="leg_counting", size=3, seed=7, task_args={"max_animals": 4})
    first, again = fields(config), fields(config)
    assert first == again
    assert first != fields(DataConfig(source="reasoning_gym", task="leg_counting", size=3, seed=8))
    assert first[0]["reasoning_gym"]["entry"]["answer"] == first[0]["answer"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": None}, r"data\.task is not set"),
        ({"task": "leg_countin"}, "near: leg_counting"),
        ({"task_args": {"legs": 3}}, "does not know legs; it knows"),
        ({"task_args": {"min_animals": 0}}, "refused"),
        ({"task_args": {"seed": 3}}, r"data\.seed"),
        ({"size": 0}, r"data\.size=0"),
    ],
)
def test_mistakes_about_tasks(changes: dict[str, Any], message: str) -> None:
    config = DataConfig(**{"source": "reasoning_gym", "task": "leg_counting", **changes})
    with pytest.raises(DataError, match=message):
        load_rows(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": 1}\n{"prompt": \n', r"x\.jsonl:2: not a line of JSON"),
        (b"[1]\n", r"x\.jsonl:1: expected a JSON object, found list"),
        (b"\xff\xfe{}\n", r"x\.jsonl:1"),
        (b"\n\n", "no rows"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_rows(DataConfig(path=str(tmp_path / "x.jsonl")))


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "x.parquet", ROWS).read_bytes()
    (tmp_path / "x.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"x\.parquet"):
        load_rows(DataConfig(source="parquet", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": None}, r"data\.path is not set"),
        ({"path": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"path": "builtin:huge_sums"}, "tiny_sums"),
        ({"path": "x", "source": "csv"}, "jsonl, parquet, dataset or reasoning_gym"),
    ],
)
def test_mistakes_about_files(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(DataConfig(**changes))


def test_tiny_sums_are_made_once_and_whole(tmp_path: Path) -> None:
    rows = load_rows(DataConfig(path="builtin:tiny_sums"), cache=tmp_path)
    assert len(rows) == 100
    assert {"prompt": "3+5=", "answer": "8"} in [row.fields for row in rows]
    assert {"prompt": "9+9=", "answer": "18"} in [row.fields for row in rows]
    (made,) = tmp_path.iterdir()
    before = made.stat().st_mtime_ns
    assert builtin.resolve("builtin:tiny_sums", tmp_path) == str(made)
    assert made.stat().st_mtime_ns == before


def test_parquet_by_any_other_name(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "rows.pq", ROWS)
    assert fields(DataConfig(source="parquet", path=str(file))) == ROWS
    with pytest.raises(DataError, match=r"data.path=.*rows.pq: .*rows.pq:1: not a line of JSON"):
        load_rows(DataConfig(path=str(file)))
