"""The demo's tools, on folders as bad as they come."""

import os
import time
from pathlib import Path

import pytest

from agentfsm import ModelRetry, RunContext
from agentfsm.cli.demo import folder_walk
from agentfsm.cli.demo import survey_tools as tools
from agentfsm.tools.queue.result_text import render_text


@pytest.fixture
def ctx(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    return RunContext(
        deps=None,
        idempotency_key="run:t3.0",
        deadline=time.time() + 600,
        metadata={"folder": str(folder), "reports": str(tmp_path / "reports")},
    )


@pytest.fixture
def folder(ctx):
    return Path(ctx.metadata["folder"])


def fits(result):
    """Fail unless the model is shown the result whole."""
    assert len(render_text(result).encode()) < tools.MAX_RESULT_BYTES
    return result


def test_an_empty_folder(ctx):
    """Nothing is there, and that is said."""
    listing = fits(tools.list_folder(ctx))
    assert (listing["files"], listing["bytes"], listing["kinds"], listing["worth_reading"]) == (0, 0, [], [])
    assert listing["complete"]
    assert fits(tools.search_text(ctx, "TODO"))["matches"] == 0


def test_what_explains_the_folder_comes_first(ctx, folder):
    """Its own README before larger files, those before a README further down."""
    (folder / "src").mkdir()
    (folder / "src" / "README.md").write_text("inner", encoding="utf-8")
    (folder / "src" / "big.py").write_text("x = 1\n" * 100, encoding="utf-8")
    (folder / "pyproject.toml").write_text("[project]", encoding="utf-8")
    (folder / "readme.txt").write_text("r", encoding="utf-8")
    (folder / "empty.md").touch()
    (folder / "data.bin").write_bytes(b"\0" * 1000)
    listing = tools.list_folder(ctx)
    paths = [file["path"] for file in listing["worth_reading"]]
    assert paths == ["readme.txt", "pyproject.toml", "src/big.py", "src/README.md"]
    assert listing["largest"][0] == {"path": "data.bin", "bytes": 1000}
    assert (listing["files"], listing["folders"]) == (6, 1)


def test_machine_made_folders_are_skipped(ctx, folder):
    """Nobody asks what is in .git."""
    for name in (".git", ".venv", "node_modules", "__pycache__", ".agentfsm"):
        (folder / name).mkdir()
        (folder / name / "TODO.md").write_text("TODO", encoding="utf-8")
    assert tools.list_folder(ctx)["files"] == 0
    assert tools.search_text(ctx, "TODO")["matches"] == 0


def test_links_are_not_followed_out(ctx, folder, tmp_path):
    """A link to a secret outside is neither listed nor read nor searched, however it is made."""
    secret = tmp_path / "secret.md"
    secret.write_text("TODO: the secret", encoding="utf-8")
    (folder / "link.md").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    (folder / "around").symlink_to(folder / "around")
    (folder / "gone.md").symlink_to(tmp_path / "nothing")
    (folder / "real.md").write_text("TODO", encoding="utf-8")
    assert tools.list_folder(ctx)["files"] == 1
    assert tools.search_text(ctx, "TODO")["matches"] == 1
    for path in ("link.md", "up/secret.md", "../secret.md", str(secret), "/etc/passwd", "around", "a\0b"):
        with pytest.raises(ModelRetry):
            tools.read_file(ctx, path)
    for path in ("up", "..", "/", "link.md", "around", "nothing"):
        with pytest.raises(ModelRetry):
            tools.list_folder(ctx, path)


def test_a_link_inside_is_fine(ctx, folder):
    """It leads to a file of the folder."""
    (folder / "real.md").write_text("inside", encoding="utf-8")
    (folder / "link.md").symlink_to(folder / "real.md")
    assert tools.read_file(ctx, "link.md")["text"] == "inside"


def test_a_link_put_there_meanwhile_is_not_followed(ctx, folder, tmp_path, monkeypatch):
    """Between the look and the open, a folder is swapped for a link that leads out: the open refuses."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.md").write_text("secret", encoding="utf-8")
    (folder / "sub").mkdir()
    (folder / "sub" / "a.md").write_text("inside", encoding="utf-8")
    opened = folder_walk._open_file

    def swap(root, place):
        (folder / "sub").rename(folder / "old")
        (folder / "sub").symlink_to(tmp_path / "out")
        return opened(root, place)

    monkeypatch.setattr(folder_walk, "_open_file", swap)
    with pytest.raises(ModelRetry, match="cannot read"):
        tools.read_file(ctx, "sub/a.md")


def test_what_is_no_regular_file_does_not_block(ctx, folder):
    """A named pipe without a writer, the folder itself, a folder."""
    os.mkfifo(folder / "pipe.md")
    (folder / "sub").mkdir()
    assert tools.list_folder(ctx)["files"] == 0
    for path in ("pipe.md", "sub", ".", ""):
        with pytest.raises(ModelRetry):
            tools.read_file(ctx, path)


def test_binary_and_broken_text(ctx, folder):
    """Neither is an error."""
    (folder / "image.py").write_bytes(b"\x89PNG\0\0TODO")
    (folder / "latin.txt").write_bytes("Grüße TODO".encode("latin-1"))
    assert tools.read_file(ctx, "image.py")["binary"]
    assert tools.read_file(ctx, "latin.txt")["text"].endswith("e TODO")
    assert tools.search_text(ctx, "TODO")["top"] == [{"path": "latin.txt", "matches": 1}]


def test_a_huge_file_is_cut(ctx, folder):
    """What is read of it is bounded, whatever is asked for."""
    with (folder / "huge.txt").open("wb") as file:
        file.write(b"TODO\n")
        file.truncate(10 * 1024**3)  # sparse
    (folder / "long.txt").write_text("x" * 1_000_000, encoding="utf-8")
    assert tools.list_folder(ctx)["bytes"] > 10 * 1024**3
    assert len(tools.read_file(ctx, "long.txt", 10**9)["text"]) == tools.MAX_READ_CHARS
    assert len(tools.read_file(ctx, "long.txt", -5)["text"]) == 1
    assert tools.search_text(ctx, "xxx")["matches"] > 0


def test_odd_names_are_counted_and_not_shown(ctx, folder):
    """Line breaks, escapes, bytes that are no UTF-8; plain names of any script are fine."""
    for name in (b"line\nbreak.py", b"\x1b[31mred.py", b"\xff\xfe.py", "rtl\u202e.py".encode(), b"x" * 240 + b".py"):
        (folder / os.fsdecode(name)).write_text("TODO", encoding="utf-8")
    (folder / "日本語 (1).py").write_text("TODO", encoding="utf-8")
    (folder / "deep").mkdir()
    listing = fits(tools.list_folder(ctx))
    assert (listing["files"], listing["odd_names"]) == (6, 5)
    assert [file["path"] for file in listing["worth_reading"]] == ["日本語 (1).py"]
    assert tools.search_text(ctx, "TODO")["top"] == [{"path": "日本語 (1).py", "matches": 1}]


def test_a_folder_that_may_not_be_read(ctx, folder, monkeypatch):
    """It is left out, and the listing says that it is not complete."""
    (folder / "a.py").write_text("x", encoding="utf-8")
    (folder / "locked").mkdir()
    scan = os.scandir

    def refuse(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(folder_walk.os, "scandir", refuse)
    listing = tools.list_folder(ctx)
    assert (listing["files"], listing["complete"]) == (1, False)


def test_very_many_files(ctx, folder, monkeypatch):
    """Looking ends at a bound, and the result is still shown whole."""
    monkeypatch.setattr(folder_walk, "MAX_FILES", 300)
    monkeypatch.setattr(tools, "MAX_SEARCHED_FILES", 100)
    name = "n" * 150
    for number in range(500):
        (folder / f"{name}{number}.py").write_text("TODO", encoding="utf-8")
    listing = fits(tools.list_folder(ctx))
    assert not listing["complete"]
    assert listing["files"] < 301
    found = fits(tools.search_text(ctx, "TODO"))
    assert (found["searched"], found["complete"]) == (100, False)


def test_looking_ends_before_the_call_is_cut_off(folder, ctx):
    """Part of an answer is better than none."""
    (folder / "a.py").write_text("x", encoding="utf-8")
    late = RunContext(deps=None, deadline=time.time(), metadata=ctx.metadata)
    assert not tools.list_folder(late)["complete"]


def test_an_empty_pattern(ctx):
    """It would match everywhere."""
    with pytest.raises(ModelRetry):
        tools.search_text(ctx, "")


def test_a_glob_narrows_a_search(ctx, folder):
    """By path, with the usual wildcards."""
    (folder / "a.py").write_text("TODO", encoding="utf-8")
    (folder / "a.md").write_text("TODO", encoding="utf-8")
    assert tools.search_text(ctx, "TODO", "*.py")["files"] == 1


def reports(ctx):
    return sorted(Path(ctx.metadata["reports"]).iterdir())


def test_a_report_written_twice_is_one_file(ctx):
    """The key names it, so that running it again changes nothing; also when the first attempt was cut off half way."""
    folder = Path(ctx.metadata["reports"])
    folder.mkdir()
    (folder / "run-t3-0.part").write_text("half of", encoding="utf-8")
    first = tools.write_report(ctx, "A\ntitle", "\n## One\n")
    assert tools.write_report(ctx, "A\ntitle", "\n## One\n") == first
    (report,) = reports(ctx)
    assert report.name == "run-t3-0.md"
    assert report.read_text(encoding="utf-8") == "# A title\n\n## One\n"


def test_a_report_is_bounded(ctx):
    """And may hold any text."""
    with pytest.raises(ModelRetry, match="shorten it"):
        tools.write_report(ctx, "t", "x" * (tools.MAX_REPORT_CHARS + 1))
    tools.write_report(ctx, "t", "\ud800 \x1b")


@pytest.mark.parametrize("key", ["../../etc:t1.0", "a/b:t1.0", "a b:t1.0", "x" * 300, "", "..", "ü:t1.0", "a\0b"])
def test_a_key_is_made_safe(key):
    """Whatever the run's id, the name stays in its folder, and no two keys share one."""
    name = tools.safe_name(key)
    assert set(name) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
    assert 0 < len(name) <= 120


def test_no_two_keys_share_a_name():
    """Also where what is not safe in them is replaced alike."""
    keys = [
        "a:t1.0",
        "a-t1:t1.0",
        "a.b:t1.0",
        "a-b:t1.0",
        "a b:t1.0",
        "a:t1:0",
        "a:t1.0\n",
        "A:t1.0",
        "a:t1.0:deadbeef",
        "a:t1.0-deadbeef",
        "a:t1.0:deadbee",
        "x" * 150,
        "x" * 151,
    ]
    assert len({tools.safe_name(key) for key in keys}) == len(keys)
