"""Labels of files that runs have written: a record in the store by path, with the hash of the content."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.errors import ConflictError, MisuseError
from agentfsm.core.labels import EFFECT_LABELS, Label, as_labels, join_labels
from agentfsm.tools.executing_call import current_call

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentfsm.ports.store import Store

FILE_LABELS_KIND: Final = "file-labels"
# Contents of a path whose labels are kept: the present one, and those before it, since a crash may leave an older one.
_MAX_VERSIONS: Final = 8
# Labels that a file does not keep: those of effects, and the one that every file has.
_NOT_KEPT: Final = EFFECT_LABELS | {Label.USER_DATA}


async def restore_file_labels(path: str, content: bytes) -> None:
    """Add the labels of a file to those of the executing call: `user_data`, and those of the run that has written it.

    Args:
        path: Absolute path of the file.
        content: The content that was read. If no run has written it to this path, its labels are not known.
    """
    call = current_call()
    if call is None:
        return
    call.on_labels((Label.USER_DATA,))
    versions, _revision = ({}, 0) if call.store is None else await _read_versions(call.store, path)
    call.on_labels(as_labels(versions.get(_hash(content), ())))


async def restore_name_labels(paths: Iterable[str]) -> None:
    """Add the labels of the names of files and folders to those of the executing call: those of all they have held.

    Args:
        paths: Absolute paths.
    """
    call = current_call()
    if call is None:
        return
    call.on_labels((Label.USER_DATA,))
    try:
        has_labels = call.store is not None and await call.store.list_records(FILE_LABELS_KIND, limit=1)
    except MisuseError:  # a store without records
        return
    for path in paths if has_labels else ():
        assert call.store is not None  # it has records  # noqa: S101
        versions, _revision = await _read_versions(call.store, path)
        call.on_labels(join_labels(*map(as_labels, versions.values())))


async def keep_file_labels(path: str, content: bytes) -> None:
    """Record the labels of the executing call for a file that it is about to write. Without labels nothing is written.

    Args:
        path: Absolute path of the file, or of a folder.
        content: The content that the file is about to have; empty for a folder.

    Raises:
        StoreError: if the store fails, so that the file must not be written.
    """
    call = current_call()
    labels = () if call is None else join_labels(call.labels.keys() - _NOT_KEPT)
    if call is None or call.store is None or not labels:
        return
    while True:
        versions, revision = await _read_versions(call.store, path)
        known = versions.pop(_hash(content), ())
        versions[_hash(content)] = [str(label) for label in join_labels(as_labels(known), labels)]
        record: Any = {"path": path, "versions": dict([*versions.items()][-_MAX_VERSIONS:])}
        try:
            await call.store.write_record(FILE_LABELS_KIND, _hash(path), record, revision=revision)
        except ConflictError:  # another run has written the file at the same time
            continue
        except MisuseError:  # a store without records
            return
        return


async def _read_versions(store: Store, path: str) -> tuple[dict[str, Any], int]:
    """Return the labels of the contents of a path by their hashes, oldest first, and the revision of the record."""
    try:
        record = await store.read_record(FILE_LABELS_KIND, _hash(path))
    except MisuseError:  # a store without records
        record = None
    if record is None or not isinstance(record.value, dict):
        return {}, 0 if record is None else record.revision
    versions: Any = record.value["versions"]
    return dict(versions), record.revision


def _hash(content: bytes | str) -> str:
    """Return the hash of a content or of a path, whose bytes need not be text."""
    return sha256(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")).hexdigest()
