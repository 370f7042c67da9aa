"""Files, folders, globs and URLs of every kind are found and read; what cannot be used is refused with what to do."""

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchinfer.core.errors import AccessDenied, ConfigError, InputError
from batchinfer.split.files import DataFile, Wanted
from batchinfer.split.sources import Sources, count_sources
from batchinfer.split.text_lines import count_rows
from batchinfer.storage.opening import open_store


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def rows_of(counted: Sources) -> list[dict[str, Any]]:
    data = b"".join(block.lines for block in counted.blocks())
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def numbers(*sources: str | Path, **options: Any) -> list[int]:
    rows = rows_of(count_sources([str(source) for source in sources], **options))
    assert [row["_row"] for row in rows] == list(range(len(rows)))
    return [int(row["n"]) for row in rows]


def test_a_folder_gives_its_data_by_name_and_nothing_hidden(tmp_path, caplog):
    data = tmp_path / "data"
    places = {"data/b": 2, "data/a/c": 1, "data/.hidden/d": 9, "data/_tmp": 9, "data/.dot": 8}
    for name, n in {**places, "elsewhere": 3}.items():
        write_parquet(tmp_path / f"{name}.parquet", n=[n])
    (data / "link.parquet").symlink_to("../elsewhere.parquet")
    (data / ".hidden/nowhere.parquet").symlink_to("gone")
    for name in ("README.md", "infos.json", "notes.txt"):
        (data / name).write_text("{}")
    with caplog.at_level("INFO"):
        assert numbers(data) == [1, 2, 3]
    assert f"{data}: left out 7 other or hidden files, {data}/README.md first" in caplog.text
    (data / "nowhere.parquet").symlink_to("gone")
    for source in (data, data / "*.parquet"):
        with pytest.raises(InputError, match=r"nowhere\.parquet: no such file"):
            numbers(source)
    (data / "nowhere.parquet").unlink()
    os.mkfifo(data / "pipe.parquet")  # its reader would wait for ever
    assert numbers(data) == [1, 2, 3]
    (data / "b.parquet.gz").write_bytes(gzip.compress((data / "b.parquet").read_bytes()))
    with pytest.raises(InputError, match=r"b\.parquet\.gz: can only be read unpacked"):
        numbers(data)
    (data / "b.parquet.gz").unlink()
    (data / "b.csv").write_text("n\n1\n")
    with pytest.raises(InputError, match=r"files of several formats, csv \(.*, expected one"):
        numbers(data)


def refuse_to_list(monkeypatch: pytest.MonkeyPatch, *ends: str) -> None:
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith(ends):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)


@pytest.mark.parametrize("pattern", ["data", "data/**/*.jsonl", "d*/**/*.jsonl"])
def test_a_folder_below_that_is_not_read_is_named(tmp_path, caplog, pattern, monkeypatch):
    """fsspec leaves out, without a word, what it may not list, and links to folders."""
    for name in ("data/a", "data/b", "data/.trash", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "n.jsonl").write_text('{"n":1}')
    (tmp_path / "data/link").symlink_to("../elsewhere")
    source = f"{tmp_path}/{pattern}"
    assert numbers(source) == [1, 1]
    assert f"left out {tmp_path}/data/link, a link to a folder" in caplog.text
    refuse_to_list(monkeypatch, "/b", "/.trash")
    with pytest.raises(AccessDenied, match=f"Permission denied: '{tmp_path}/data/b'"):
        numbers(source)


def test_a_pattern_takes_what_a_shell_would_in_folders_of_any_name(tmp_path, monkeypatch):
    for n, name in enumerate(("data[1]/a", "data[1]/b.jsonl", "data1/a", "elsewhere")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "n.jsonl").write_text(f'{{"n":{n}}}')
    (tmp_path / "data[1]/link").symlink_to("../elsewhere")
    monkeypatch.chdir(tmp_path / "data[1]")
    assert numbers("*/n.jsonl") == [0, 1, 3]
    assert numbers("b*") == numbers(f"{tmp_path}/data?1?/*.jsonl") == [1]
    refuse_to_list(monkeypatch, "/a")
    with pytest.raises(AccessDenied, match=r"Permission denied: '.*/data\[1\]/a'"):
        numbers("*/n.jsonl")


def test_sources_of_several_formats_and_packings_follow_each_other(tmp_path):
    write_parquet(tmp_path / "a.parquet", n=[0, 1, 2])
    write_parquet(tmp_path / "none.parquet", n=[])
    pack = zstandard.ZstdCompressor().compress
    packed = {
        "b.jsonl.gz": gzip.compress(b'{"n":3}\n') + gzip.compress(b'{"n":4}'),
        "c.json.zst": pack(b'{"n":5}\n') + pack(b'{"n":6}'),
        "d.csv.gz": gzip.compress(b"n\n7\n"),
    }
    for name, data in packed.items():
        (tmp_path / name).write_bytes(data)
    sources = [str(tmp_path / name) for name in ("a.parquet", "none.parquet", *packed)]
    assert numbers(*sources) == list(range(8))
    limited = count_sources(sources, limit=4)
    assert limited.rows == 4
    assert [source.url for source in limited.as_job().sources] == [sources[0], sources[2]]


def test_our_own_mistakes_are_not_told_as_those_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr("batchinfer.split.parquet_rows.plain_frame", lambda *_: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        numbers(write_parquet(tmp_path / "a.parquet", n=[1]))


def test_a_large_file_is_read_in_pieces(tmp_path):
    lines = "".join(f'{{"n":{n},"text":"{"x" * 1000}"}}\n' for n in range(10_000))
    (tmp_path / "a.jsonl").write_text(lines)
    csv = "n,text\n" + "".join(f"{n},{'x' * 1000}\n" for n in range(20_000))
    (tmp_path / "b.csv").write_text(csv)
    (tmp_path / "c.csv").write_text("n,text\n" + "".join(f"{n},{'x' * 10**6}\n" for n in range(9)))
    texts = ["short"] * 16 + ["x" * 10_000] * 3984  # which the file holds once
    table = pa.table({"n": range(4000), "text": texts})
    with pq.ParquetWriter(tmp_path / "d.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 400))
        writer.write_table(table.slice(400))
    many = pa.array([f"{n % 2000}" + "x" * 1000 for n in range(9000)]).dictionary_encode()
    pq.write_table(pa.table({"n": range(9000), "text": many}), tmp_path / "e.parquet")
    files = {"a.jsonl": 10_000, "b.csv": 20_000, "c.csv": 9, "d.parquet": 4000, "e.parquet": 9000}
    for name, count in files.items():
        assert numbers(tmp_path / name) == list(range(count))
        sizes = [len(each.lines) for each in count_sources([str(tmp_path / name)]).blocks()]
        assert max(sizes) < 6 << 20
        assert len(sizes) < 40


BAD: dict[str, tuple[bytes | None, str, str]] = {
    # a source: its content, what is said of it, and what to do
    "d/*.csv": (None, "holds no file", "check the path"),
    "a.jsonl": (b"", "holds no rows", "check the path"),
    "b.json": (b'{\n"n":\n1}', "holds no JSON object in 3 lines", "jq -c '.'"),
    "b.jsonl": ('{"n":1}'.encode("utf-16"), "in UTF-8", "convert"),
    "c.jsonl": (b'{"_row":1}', "column '_row' is there twice, where _row", "rename the column"),
    "a.csv": (b"n,_id\n1,2", "column '_id' is there twice", "--columns"),
    "b.csv": (b'n,m\n1,"2\n3,4\n', "perhaps a quote is open", "close it"),
    "g.csv": (b"n,m\r1,2\r", "or \\r ends lines", "end lines in"),
    "c.csv": (b"n,m\n1,2\n3\n", "line 3: 1 values, expected the header's 2", "--delimiter"),
    "d.csv": (b"n,n\n1,2\n", "column 'n' is there twice", "rename"),
    "e.csv": (b"n\n\xe9\n", "'utf-8' codec can't decode", "iconv -f WINDOWS-1252"),
    "e.jsonl": (b'[\n{"n":1},\n{"n":2}\n]\n', "is a JSON array", "jq -c '.[]'"),
    "e.jsonl.gz": (b"", "truncated (ends early)", "again"),
    "a.parquet": (b"PAR1 and no more", "a.parquet: wrong, corrupt or truncated", "again"),
    "a.jsonl.gz": (gzip.compress(b'{"n":1}\n' * 99)[:-9], "truncated", "again"),
    "x.parquet.zst": (zstandard.compress(b"PAR1"), "only be read unpacked", "zstd -d FILE"),
    "b.csv.zst": (zstandard.compress(b"n\n1\n" * 99)[:-3], "corrupt or truncated", "again"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_what_to_do(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content, what, hint = BAD[name]
    if content is not None:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    with pytest.raises((InputError, ConfigError)) as caught:
        rows_of(count_sources([name]))
    assert what in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint


def test_ids_of_a_column_that_is_there_twice_are_refused(tmp_path):
    pq.write_table(pa.table([pa.array([1])] * 3, ["a", "a", "b"]), tmp_path / "d.parquet")
    (tmp_path / "d.csv").write_text("a,a,b\n1,2,3\n")
    for path in (tmp_path / "d.parquet", tmp_path / "d.csv"):
        with pytest.raises(InputError, match="column 'a' is there twice"):
            rows_of(count_sources([str(path)], columns=["b"], id_column="a"))


def test_damage_within_a_parquet_is_named(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", n=[f"text {n}" for n in range(1000)])
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"x\.parquet: wrong, corrupt or truncated"):
        rows_of(count_sources([str(path)]))


def test_a_column_that_only_some_files_have_is_told_or_refused(tmp_path, caplog):
    write_parquet(tmp_path / "a.parquet", n=[1], label=["x"])
    write_parquet(tmp_path / "b.parquet", n=[2])
    assert [row.get("label") for row in rows_of(count_sources([str(tmp_path)]))] == ["x", None]
    assert "column 'label': in some files only" in caplog.text
    with pytest.raises(InputError, match=r"b\.parquet: has no column 'label'"):
        count_sources([str(tmp_path)], columns=["n", "label"])
    assert numbers(tmp_path, columns=["n"]) == [1, 2]


def test_a_column_that_only_a_late_line_has_is_found_and_one_that_none_has_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"n":1}\n' * 3000 + '{"late":2}')
    assert len(rows_of(count_sources([str(tmp_path)], columns=["late"]))) == 3001
    with pytest.raises(InputError, match="has no column 'm'"):
        count_sources([str(tmp_path)], columns=["m"])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("count", [5, 20])
def test_a_source_with_fewer_or_more_rows_than_before_is_named(tmp_path, kind, count):
    path = tmp_path / f"x.{kind}"

    def write(count: int) -> Sources:
        path.write_text('{"n":1}\n' * count)
        if kind == "parquet":
            write_parquet(path, n=list(range(count)))
        return count_sources([str(path)])

    counted = write(10)
    write(count)
    with pytest.raises(InputError, match=rf"x\.{kind}: changed while it was being split"):
        rows_of(counted) and counted.check_unchanged()
    if kind == "parquet":
        write_parquet(path, other=list(range(10)))
        with pytest.raises(InputError, match="changed while it was being split"):
            rows_of(counted)


def test_an_output_around_a_source_is_refused(tmp_path):
    write_parquet(tmp_path / "d" / "a.parquet", n=[1])
    counted = count_sources([str(tmp_path / "d/*.parquet")])
    counted.check_apart(str(tmp_path / "d/job"))
    with pytest.raises(InputError, match="is not apart from the source"):
        counted.check_apart(str(tmp_path))


@pytest.mark.s3
def test_s3_files_folders_and_globs_are_read(s3_url, tmp_path):
    bucket = s3_url()
    path = write_parquet(tmp_path / "a.parquet", n=[1, 2, 3], text=["x"] * 3)
    store = open_store(bucket)
    store.put_file("data/a.parquet", path)
    store.create("lines/b.jsonl.gz", gzip.compress(b'{"n":4}'))
    for argument in ("data/a.parquet", "data", "data/*.parquet", "**/a.parquet"):
        assert numbers(f"{bucket}/{argument}", columns=["n"]) == [1, 2, 3]
    assert numbers(f"{bucket}/lines") == [4]
    r2 = f"{bucket}/lines".replace("s3://", "r2://")
    assert count_sources([r2]).files[0].url == f"{r2}/b.jsonl.gz"
    counted = count_sources([f"{bucket}/data"])
    path.write_bytes(path.read_bytes()[::-1])
    store.put_file("data/a.parquet", path)
    with pytest.raises(InputError, match="changed while it was being split"):
        counted.check_unchanged()


def test_a_data_set_of_the_hub_is_read_at_one_commit(tmp_path, hub, monkeypatch):
    data = {"native/train-0": [1, 2], "native/train-1": [3], "old/0": [0]}
    for name, n in data.items():
        write_parquet(tmp_path / f"{name}.parquet", n=n)
    for repo, revision, folder in (
        ("org/native", "main", "native"),
        ("org/native", "v1", "old"),
        ("org/gated", "main", "native"),
    ):
        hub.add(repo, revision, tmp_path / folder)
    hub.gated.add("org/gated")
    commit, org = hub.branches["org/native"]["main"], "hf://datasets/org"
    [source] = count_sources([f"{org}/native"]).as_job().sources
    assert source.revision == commit
    assert source.files[0].url == f"{org}/native@{commit}/train-0.parquet"
    for name, expected in {
        "native": [1, 2, 3],
        "native@v1": [0],
        f"native@{commit}/train-1.parquet": [3],
        "native/train-*.parquet": [1, 2, 3],
        "gated": [1, 2, 3],
    }.items():
        assert numbers(f"{org}/{name}") == expected
    monkeypatch.delenv("HF_TOKEN")
    for name, error, what in (
        ("native@nothing", InputError, "no such revision"),
        ("gated", AccessDenied, "HF_TOKEN"),
    ):
        with pytest.raises(error) as refused:
            numbers(f"{org}/{name}")
        assert what in f"{refused.value.message} ({refused.value.hint})"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_a_file_of_which_a_store_gives_less_than_there_is_is_refused(name, tmp_path):
    """Its last rows were left out without a word."""
    path, kind = tmp_path / name, {"a.txt": "text"}.get(name, name[2:])
    path.write_text('{"n":1}\n' * 9)
    file = DataFile(url=str(path), argument="", format=kind, bytes=72, stamp="")
    assert count_rows(file, Wanted()).rows == (8 if kind == "csv" else 9)
    with pytest.raises(InputError, match=r"corrupt or truncated \(72 of 80 bytes came\)"):
        count_rows(msgspec.structs.replace(file, bytes=80), Wanted())
