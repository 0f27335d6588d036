"""Labels of files that runs have written: a record in the store by path, with the hash of the content."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.errors import ConflictError, MisuseError
from agentfsm.core.labels import EFFECT_LABELS, Label, as_labels, join_labels
from agentfsm.tools.executing_call import current_call

if TYPE_CHECKING:
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoreRecord

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
    record = None if call.store is None else await _read(call.store, path)
    if record is not None:
        call.on_labels(as_labels(_read_versions(record).get(_hash(content), ())))


async def keep_file_labels(path: str, content: bytes) -> None:
    """Record the labels of the executing call for a file that it is about to write. Without labels nothing is written.

    Args:
        path: Absolute path of the file.
        content: The content that the file is about to have.

    Raises:
        StoreError: if the store fails, so that the file must not be written.
    """
    call = current_call()
    labels = () if call is None else join_labels(call.labels.keys() - _NOT_KEPT)
    if call is None or call.store is None or not labels:
        return
    while True:
        record = await _read(call.store, path)
        versions = {} if record is None else _read_versions(record)
        known = versions.pop(_hash(content), ())
        versions[_hash(content)] = [str(label) for label in join_labels(as_labels(known), labels)]
        newest = dict([*versions.items()][-_MAX_VERSIONS:])
        revision = 0 if record is None else record.revision
        try:
            await call.store.write_record(
                FILE_LABELS_KIND, _hash(path.encode()), {"path": path, "versions": newest}, revision=revision
            )
        except ConflictError:  # another run has written the file at the same time
            continue
        except MisuseError:  # a store without records
            return
        return


async def _read(store: Store, path: str) -> StoreRecord | None:
    try:
        return await store.read_record(FILE_LABELS_KIND, _hash(path.encode()))
    except MisuseError:  # a store without records
        return None


def _read_versions(record: StoreRecord) -> dict[str, Any]:
    return dict(record.value["versions"]) if isinstance(record.value, dict) else {}  # type: ignore[arg-type]


def _hash(content: bytes) -> str:
    return sha256(content).hexdigest()
