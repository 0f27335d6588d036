"""Seals of journals: hashes in a file of their own, by which later changes of a store are found."""

from __future__ import annotations

import hmac
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import IO, Final

import anyio.to_thread
import attrs

from agentfsm._lib.shared_files import PRIVATE, append_line, open_log
from agentfsm.core.codec import CHAIN_HASH, chain_journal
from agentfsm.core.errors import CorruptError, MisuseError, RunNotFoundError
from agentfsm.core.header import FORMAT
from agentfsm.core.json_text import dump_compact
from agentfsm.core.value import Value
from agentfsm.ports.followers import FollowedStore
from agentfsm.ports.store import Store

# Environment variable with the key of the seals.
KEY_VARIABLE: Final = "AGENTFSM_SEAL_KEY"
# The least characters of a key: 128 bits in hexadecimal.
MIN_KEY_CHARS: Final = 32
# Name of the follower that seals runs.
FOLLOWER: Final = "seal"
_KEY_ID_CHARS: Final = 16


@attrs.frozen(kw_only=True)
class Seal(Value):
    """The hash of a version of a run, as it was when it was sealed."""

    run: str
    """Id of the run."""

    version: int
    """Version of the run: the number of its events that the hash covers."""

    hash: str
    """Hash of that version, HMAC-SHA-256 in hexadecimal."""

    at: float
    """Time of the seal, seconds since 1970 by the store's clock."""

    format: int = FORMAT
    """Format of records that the hash is of."""


class Fault(StrEnum):
    """Difference between a run in the store and its seals."""

    CHANGED = "changed"
    """An event of the sealed part, or the header, is another one."""

    SHORTENED = "shortened"
    """The run has fewer events than were sealed."""

    MISSING = "missing"
    """The run is not in the store. It may have been deleted or pruned."""

    UNREADABLE = "unreadable"
    """Its journal cannot be read."""


@attrs.frozen(kw_only=True)
class SealCheck(Value):
    """Outcome of the comparison of a run with its seals."""

    run_id: str
    """Id of the run."""

    fault: Fault | None = None
    """The difference; None if there is none."""

    sealed: int
    """Newest version that is sealed."""

    intact: int = 0
    """Newest sealed version that the run still has; the change is after it. 0 if there is none."""

    changed_by: int = 0
    """First sealed version that differs, so that the change is at or before it; 0 without a fault."""

    sealed_at: float = 0.0
    """Time of the first seal that differs, seconds since 1970; 0 without a fault."""

    unsealed: int = 0
    """Number of events that came after the newest seal."""


@attrs.frozen(kw_only=True)
class SealHead(Value):
    """The end of a file of seals. Kept elsewhere, it shows later that nothing was cut off."""

    seals: int
    """Number of seals in the file."""

    head: str
    """Hash of the last line, which covers all lines before; empty if there is none."""


def read_seal_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key of seals from AGENTFSM_SEAL_KEY; empty if it is not set.

    Raises:
        MisuseError: if it is too short to be a key.
    """
    text = environment.get(KEY_VARIABLE, "")
    if text and len(text) < MIN_KEY_CHARS:
        raise MisuseError(
            f"{KEY_VARIABLE} has {len(text)} characters, which can be guessed: use {MIN_KEY_CHARS} or more, for "
            'example of `python -c "import secrets; print(secrets.token_hex(32))"`'
        )
    return text.encode()


@attrs.define(eq=False)
class SealFile:
    """A file of seals, one JSON object in each line. Each line has the hash of itself and the line before.

    Runs are sealed after they were released, paused or ended, by a follower of the store, so executing them costs
    nothing more. Without a key, a person who can write the store and the file can make both agree again.
    """

    path: Path = attrs.field(converter=Path)
    """Path of the file. It is created by the first seal, readable by its owner only."""

    key: bytes = attrs.field(factory=read_seal_key, repr=False, kw_only=True)
    """Key of the hashes; empty for none. Default: that of AGENTFSM_SEAL_KEY."""

    async def seal(self, store: Store, *, wait: bool = False) -> AsyncIterator[Seal]:
        """Seal the runs that changed since they were sealed last, and yield each seal when it is on the disk.

        Args:
            store: The store with the runs.
            wait: Whether to wait for further changes, until the iteration is cancelled.

        Raises:
            CorruptError: if the file ends with something else than a seal.
            MisuseError: if the file was written with another key.
        """
        async with store.follow(FOLLOWER, wait=wait) as follower:
            async for delivery in follower:
                made = await self._seal_run(store, delivery.run_id)
                if made is not None:
                    yield made
                await delivery.done()

    async def _seal_run(self, store: Store, run_id: str) -> Seal | None:
        try:
            stored = await store.read(run_id)
        except RunNotFoundError:  # deleted since
            return None
        *_, last = chain_journal(stored.header, stored.events, self.key)
        made = Seal(run=run_id, version=len(stored.events), hash=last, at=await store.now())
        await anyio.to_thread.run_sync(partial(self._append, made))
        return made

    def _append(self, made: Seal) -> None:
        with open_log(self.path, mode=PRIVATE) as file:
            content = {**attrs.asdict(made), "key": self._key_id}
            append_line(file, dump_compact({**content, "link": self._link(content, self._read_last(file))}))

    def _read_last(self, file: IO[bytes]) -> str:
        """Return the hash of the last line. A line that a crash has cut off is removed: its run is sealed again."""
        last, end = "", 0
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(end)
                break
            end += len(line)
            last = line.decode("utf-8", "replace")
        if not last:
            return ""
        _, link = self._parse_line(last, "the last line")
        return link

    def _link(self, content: Mapping[str, object], previous: str) -> str:
        return hmac.digest(self.key, (previous + dump_compact(content)).encode(), CHAIN_HASH).hex()

    @property
    def _key_id(self) -> str:
        return hmac.digest(self.key, b"agentfsm seals", CHAIN_HASH).hex()[:_KEY_ID_CHARS] if self.key else ""

    def _parse_line(self, line: str, place: str, previous: str | None = None) -> tuple[Seal, str]:
        """Return a seal and the hash of its line.

        Raises:
            CorruptError: if it is not a seal, or does not follow the line whose hash is `previous`.
            MisuseError: if it was written with another key.
        """
        try:
            content = json.loads(line)
            link, key_id = content.pop("link"), content.pop("key")
            made = Seal(**content)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise CorruptError(f"{place} of {self.path} is not a seal: the file was changed") from error
        if key_id != self._key_id:
            wanted = f"set {KEY_VARIABLE} to the key that it was written with" if key_id else f"unset {KEY_VARIABLE}"
            raise MisuseError(f"{self.path} was written {'with another' if key_id else 'without a'} key: {wanted}")
        if previous is not None and not hmac.compare_digest(
            str(link), self._link({**content, "key": key_id}, previous)
        ):
            raise CorruptError(f"{place} of {self.path} was changed, or lines before it are gone")
        return made, str(link)

    def read(self) -> Iterator[tuple[Seal, str]]:
        """Yield the seals in order, each with the hash of its line, and check that each line follows the one before.

        Raises:
            CorruptError: if a line was changed, inserted or removed, except at the end.
            MisuseError: if there is no such file, or it was written with another key.
        """
        try:
            file = self.path.open(encoding="utf-8", errors="replace")
        except OSError as error:
            raise MisuseError(
                f"{self.path} cannot be read ({error.strerror}): `agentfsm audit --seal` writes it"
            ) from error
        link = ""
        with file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):  # cut off by a crash, and written again by the next seal
                    return
                made, link = self._parse_line(line, f"line {number}", link)
                yield made, link

    def head(self) -> SealHead:
        """Return the end of the file, after all lines were checked.

        Raises:
            CorruptError: if a line was changed, inserted or removed.
            MisuseError: if there is no such file, or it was written with another key.
        """
        count, head = 0, ""
        for count, (_, head) in enumerate(self.read(), start=1):  # noqa: B007  the last of them
            pass
        return SealHead(seals=count, head=head)

    async def verify(
        self, store: FollowedStore, run_id: str | None = None, *, head: str = ""
    ) -> AsyncIterator[SealCheck]:
        """Compare runs with all of their seals, in the order of their first seals.

        Args:
            store: The store with the runs.
            run_id: The run to compare; None for all that were sealed.
            head: A head of the file from earlier; the file must still contain it.

        Raises:
            CorruptError: if the file of seals was changed, or does not contain the head.
            MisuseError: if there is no such file, it was written with another key or for another format of records,
                or the run was never sealed.
        """
        seals: dict[str, list[Seal]] = defaultdict(list)
        is_found = not head
        for made, link in self.read():
            is_found = is_found or link == head
            if made.format != FORMAT:
                raise MisuseError(
                    f"{self.path} has seals of format {made.format}, and this agentfsm hashes format {FORMAT}: verify "
                    "it with the version that wrote it, and begin a new file"
                )
            if run_id in {None, made.run}:
                seals[made.run].append(made)
        if not is_found:
            raise CorruptError(f"{self.path} does not contain the head {head}: seals were cut off, or written anew")
        if run_id is not None and not seals:
            raise MisuseError(f"run {run_id!r} has no seal in {self.path}: `agentfsm audit --seal` makes new ones")
        for sealed_id, made_before in seals.items():
            yield await self._check_run(store, sealed_id, made_before)

    async def _check_run(self, store: FollowedStore, run_id: str, seals: list[Seal]) -> SealCheck:
        newest = max(seal.version for seal in seals)
        try:
            stored = await store.read(run_id)
        except RunNotFoundError:
            return SealCheck(run_id=run_id, sealed=newest, fault=Fault.MISSING)
        except CorruptError:
            return SealCheck(run_id=run_id, sealed=newest, fault=Fault.UNREADABLE)
        hashes = list(chain_journal(stored.header, stored.events, self.key))
        intact = 0
        for seal in sorted(seals, key=lambda each: each.version):
            if seal.version < len(hashes) and hmac.compare_digest(hashes[seal.version], seal.hash):
                intact = seal.version
                continue
            fault = Fault.CHANGED if seal.version < len(hashes) else Fault.SHORTENED
            return SealCheck(
                run_id=run_id,
                sealed=newest,
                fault=fault,
                intact=intact,
                changed_by=seal.version,
                sealed_at=seal.at,
            )
        return SealCheck(run_id=run_id, sealed=newest, intact=newest, unsealed=len(stored.events) - newest)
