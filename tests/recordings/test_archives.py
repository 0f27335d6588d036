"""Fetching and reading recordings: what is kept, what is refused, and each form of a cassette."""

import gzip
import hashlib
from base64 import b64encode

import pytest

from tests.support import recording_archives
from tests.support.cassettes import Wire, cut, recordings
from tests.support.recording_archives import ARCHIVES, Archive, fetched

KEPT = b"an archive"
ARCHIVE = Archive(name="some-recordings", version="1.0", sha256=hashlib.sha256(KEPT).hexdigest())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache on a machine without PyPI; its folder is what a user's own setting names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "links").mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    folder = tmp_path / "cache" / "agentfsm" / "recordings"
    folder.mkdir(parents=True)
    return folder


def test_what_is_kept_is_not_fetched_again(cache, monkeypatch):
    """An archive whose sum is right is used as it is."""
    (cache / ARCHIVE.file).write_bytes(KEPT)
    monkeypatch.setattr(recording_archives, "_fetch", None)
    assert fetched(ARCHIVE).read_bytes() == KEPT


@pytest.mark.parametrize(("in_ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_without_pypi_a_test_is_skipped_and_ci_fails(cache, monkeypatch, in_ci, outcome):
    """Where an archive is damaged and cannot be fetched, that is said; only CI has to have it."""
    (cache / ARCHIVE.file).write_bytes(KEPT[:-1])
    monkeypatch.setenv("CI", in_ci)
    with pytest.raises(outcome, match=r"(?s)some-recordings 1\.0, .* could not be fetched: .*No matching"):
        fetched(ARCHIVE)


def test_another_archive_than_the_pinned_one_is_refused(cache, tmp_path):
    """What has another sum is not looked into: neither by pip nor by us."""
    (tmp_path / "links" / ARCHIVE.file).write_bytes(b"another archive")
    with pytest.raises(AssertionError, match="DO NOT MATCH THE HASHES"):
        fetched(ARCHIVE)
    assert list(cache.iterdir()) == []


INTERACTIONS = b"""
interactions:
- request:
    body: '{"stream": true}'
    headers: {}
    method: POST
    uri: https://api.openai.com/v1/chat/completions
  response:
    body: {string: "data: [DONE]\\n\\n"}
    headers: {Content-Type: [text/event-stream], Retry-After: '7'}
    status: {code: 429, message: Too Many Requests}
"""
TWO_LISTS = b"""
requests:
- body: !!binary eyJpbnB1dCI6ICJ4IiwgInN0cmVhbSI6IGZhbHNlfQ==
  headers: {Accept: ['**REDACTED**']}
  method: POST
  uri: '**REDACTED**'
- {body: null, headers: {}, method: GET, uri: 'https://a.test/image.png'}
responses:
- body: {string: !!binary %b}
  headers: {Content-Encoding: [gzip], Server: ['**REDACTED**']}
  status: {code: 200, message: OK}
- {body: {string: ''}, headers: {}, status: {code: 404, message: Not Found}}
"""


def test_a_list_of_interactions_is_read():
    """The usual form: text bodies, and headers whose values stand in lists or alone."""
    (only,) = cut(INTERACTIONS, source="s", name="n")
    assert (only.wire, only.is_streamed, only.status, only.body) == (Wire.CHAT, True, 429, b"data: [DONE]\n\n")
    assert only.headers == {"content-type": "text/event-stream", "retry-after": "7"}
    assert (only.name, only.url) == ("n #0", "https://api.openai.com/v1/chat/completions")


def test_two_lists_are_read():
    """The form of langchain: binary bodies, which may be gzipped, and neither address nor headers."""
    packed = b64encode(gzip.compress(b'{"object": "response"}'))
    first, second = cut(TWO_LISTS % packed, source="langchain-openai", name="n")
    assert (first.wire, first.is_streamed, first.url, first.headers) == (Wire.RESPONSES, False, "", {})
    assert (first.body, first.content_type) == (b'{"object": "response"}', "application/json")
    assert (second.wire, second.name, second.request, second.body) == (Wire.OTHER, "n #1", {}, b"")


def test_every_archive_has_recordings():
    """Each source that is fetched is one that is used, and they hold about a thousand exchanges."""
    assert {each.source for each in recordings()} == {archive.name for archive in ARCHIVES}
    assert len(recordings()) >= 1_000
    assert len({each.name for each in recordings()}) == len(recordings())
