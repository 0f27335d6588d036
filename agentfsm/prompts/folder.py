"""Prompts in a folder: a file for each version, and a log of activations.

A prompt is `NAME/VERSION.md` or `NAME/VERSION.txt`. It begins with its front matter, which is TOML between two lines
of `+++`; a file .txt may be the text alone. Files with other names, such as README.md, are not prompts.

Source: document F, 6.2.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from agentfsm._lib.shared_files import append_line, open_log
from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import NAME, shorten_repr
from agentfsm.core.value import Value
from agentfsm.prompts.evaluation import PromptReport
from agentfsm.prompts.template import PromptTemplate, VariableKind, is_version, list_placeholders, version_key

ACTIVATIONS: Final = "activations.jsonl"
RESULTS: Final = "results.jsonl"
_PLAIN: Final = ".txt"
_SUFFIXES: Final = {".md", _PLAIN}
_FENCE: Final = "+++"
_KEYS: Final = frozenset(
    field.name for field in attrs.fields(PromptTemplate) if field.init and not field.name.startswith("_")
) - {"text"}


@attrs.frozen(kw_only=True)
class Activation(Value):
    """A line of the log of activations."""

    name: str
    """Name of the prompt."""

    version: str
    """Version that is active from then on."""

    digest: str
    """Digest of that version. A file that no longer has it was changed after its activation, which is an error."""

    by: str
    """Person or program that activated it."""

    why: str
    """Reason."""

    at: str
    """Time, in ISO 8601 and UTC."""

    action: Literal["activate", "roll_back"] = "activate"
    """Whether the version was chosen, or returned to."""


def read_prompt(path: Path) -> PromptTemplate:
    """Read a prompt from its file. A file .txt without front matter is the text alone, whose variables are untrusted.

    Raises:
        MisuseError: if the file is not a valid prompt, or its front matter names another prompt or version.
    """
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    ends = [number for number, line in enumerate(lines) if line.rstrip() == _FENCE]
    name, version = path.parent.name, path.stem.removeprefix("v")
    if path.suffix == _PLAIN and lines[0].rstrip() != _FENCE:
        text = "\n".join(lines).strip()
        variables = dict.fromkeys(list_placeholders(text), VariableKind.UNTRUSTED)
        return PromptTemplate(name=name, version=version, text=text, variables=variables)
    if len(ends) < 2 or ends[0] != 0:
        raise MisuseError(f"it has no front matter: begin the file with TOML between two lines of {_FENCE}")
    try:
        fields = tomllib.loads("\n".join(lines[1 : ends[1]]))
    except tomllib.TOMLDecodeError as error:
        raise MisuseError(f"the front matter is not TOML: {error}") from None
    if unknown := sorted(fields.keys() - _KEYS):
        raise MisuseError(f"unknown keys {', '.join(unknown)} in the front matter; valid: {', '.join(sorted(_KEYS))}")
    if fields.setdefault("name", name) != name:
        raise MisuseError(f"name = {fields['name']!r}, but the folder is {name!r}: give both the same name")
    if version_key(str(fields.setdefault("version", version))) != version_key(version):
        raise MisuseError(f"version = {fields['version']!r}, but the file is {path.name!r}: give both the same version")
    return PromptTemplate(text="\n".join(lines[ends[1] + 1 :]).strip(), **fields)


class Prompts:
    """The prompts of a folder.

    `prompts["billing"]` is the active version of a prompt, or the newest if none was activated. An `Agent` that gets it
    as `instructions` looks the active version up at the start of each run. `prompts["billing", "1.4.0"]` is one fixed
    version.

    Versions do not change: to change a prompt, write a new file. `activate` and `roll_back` add a line to
    `activations.jsonl`, and `record` one to `results.jsonl`, both beside the prompts; keep all of it under version
    control.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the prompts.

        Args:
            folder: The folder.

        Raises:
            MisuseError: if the folder does not exist. A prompt with an invalid file raises it when it is used.
        """
        if not isinstance(folder, str | Path):
            raise MisuseError(f"Prompts({shorten_repr(folder)}): give the folder of the prompts, a str or a Path")
        self._folder = Path(folder)
        self._prompts: Mapping[str, Mapping[Any, PromptTemplate]] = {}
        self._faults: Mapping[str, tuple[str, ...]] = {}
        self._log: tuple[Activation, ...] = ()
        self._log_stamp: tuple[int, int] | None = None
        self.reload()

    def __repr__(self) -> str:
        return f"Prompts({str(self._folder)!r})"

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._folder

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the prompts, sorted, also of those that have an invalid file."""
        return tuple(sorted(self._prompts.keys() | self._faults.keys()))

    @property
    def faults(self) -> Mapping[str, tuple[str, ...]]:
        """Faults of the invalid files, each with the path of its file, by the name of the prompt."""
        return self._faults

    def reload(self) -> None:
        """Read the folder again."""
        if not self._folder.is_dir():
            raise MisuseError(f"there is no folder {str(self._folder)!r}: give the folder of the prompts")
        found: dict[str, dict[Any, PromptTemplate]] = defaultdict(dict)
        faults: dict[str, tuple[str, ...]] = {}
        for path in sorted(self._folder.glob("*/*")):
            if path.suffix not in _SUFFIXES or not is_version(path.stem):
                continue
            try:
                prompt = read_prompt(path)
                if (same := found[prompt.name].get(prompt.version_key)) is not None:
                    raise MisuseError(f"version {same.version} has another file: delete one of them")  # noqa: TRY301
                found[prompt.name][prompt.version_key] = prompt
            except (MisuseError, TypeError, ValueError, OSError) as error:
                name = path.parent.name
                faults[name] = (*faults.get(name, ()), f"{path}: {error}")
        self._faults = faults
        self._prompts = {name: dict(sorted(versions.items())) for name, versions in found.items()}
        self._read_log()

    def versions(self, name: str) -> tuple[PromptTemplate, ...]:
        """Return all versions of a prompt, the oldest first.

        Raises:
            MisuseError: if there is no prompt of that name, or one of its files is invalid; the message lists
                the faults of all its files.
        """
        if name in self._faults:
            raise MisuseError("\n".join(self._faults[name]))
        if name not in self._prompts:
            known = ", ".join(self.names) or "none"
            raise MisuseError(f"no prompt {name!r} in {self._folder}; there are: {known}")
        return tuple(self._prompts[name].values())

    def __getitem__(self, key: str | tuple[str, str]) -> PromptTemplate:
        """Return a prompt: `prompts["billing"]` or `prompts["billing", "1.4.0"]`.

        Raises:
            MisuseError: if there is not such a prompt.
        """
        if isinstance(key, tuple):
            return self._find(*key)
        return attrs.evolve(self._find_current(key), find_current=lambda: self._find_current(key))

    def _find(self, name: str, version: str) -> PromptTemplate:
        known = self.versions(name)
        found = self._prompts[name].get(version_key(version))
        if found is None:
            raise MisuseError(f"prompt {name!r} has no version {version}: it has {', '.join(p.version for p in known)}")
        return found

    def _find_current(self, name: str) -> PromptTemplate:
        activation = self.active(name)
        if activation is None:
            versions = self.versions(name)
            releases = [each for each in versions if each.version_key[1]]
            return (releases or versions)[-1]
        if version_key(activation.version) not in self._prompts.get(name, {}):
            self.reload()  # it was added after this object was made
        return self._check_unchanged(self._find(name, activation.version), activation)

    def _check_unchanged(self, prompt: PromptTemplate, activation: Activation) -> PromptTemplate:
        if prompt.digest != activation.digest:
            raise MisuseError(
                f"prompt {prompt.name} {prompt.version} has changed since {activation.by} activated it (digest "
                f"{activation.digest}, now {prompt.digest}): restore its file, and write the change as a new version"
            )
        return prompt

    # Activation.

    def history(self, name: str | None = None) -> tuple[Activation, ...]:
        """Return the log of activations, the oldest first, of one prompt or of all."""
        self._read_log()
        return tuple(each for each in self._log if name in {None, each.name})

    def active(self, name: str) -> Activation | None:
        """Return the activation of the active version; None if no version was activated."""
        stack = self._active_stack(name)
        return stack[-1] if stack else None

    def _active_stack(self, name: str) -> list[Activation]:
        """Return the activations that roll-backs can return to, and at the end the active one."""
        stack: list[Activation] = []
        for each in self.history(name):
            if each.action == "roll_back":
                # Two simultaneous roll-backs name the same version, and so are one.
                while len(stack) > 1 and version_key(stack[-1].version) != version_key(each.version):
                    stack.pop()
            else:
                stack.append(each)
        return stack

    def activate(self, name: str, version: str, *, by: str, why: str) -> Activation:
        """Make a version the active one. If it is active already, nothing is written.

        Args:
            name: Name of the prompt.
            version: The version.
            by: Person or program that activates it.
            why: Reason.

        Raises:
            MisuseError: if there is not such a version, or its file has changed since an earlier activation.
        """
        prompt = self._find(name, version)
        made = _make_activation(prompt, by, why, "activate")
        with open_log(self._folder / ACTIVATIONS) as log:
            for each in self.history(name):
                if version_key(each.version) == prompt.version_key:
                    self._check_unchanged(prompt, each)
            active = self.active(name)
            if active is not None and version_key(active.version) == prompt.version_key:
                return active
            append_line(log, json.dumps(attrs.asdict(made), ensure_ascii=False))
        return made

    def roll_back(self, name: str, *, by: str, why: str) -> Activation:
        """Activate the version again that was active before. Runs in flight keep theirs.

        Args:
            name: Name of the prompt.
            by: Person or program that rolls back.
            why: Reason.

        Raises:
            MisuseError: if no other version was active before, or another one was activated at the same moment. If
                it was a roll-back to the same version, both are one.
        """
        self.versions(name)
        stack = self._active_stack(name)
        if len(stack) < 2:
            raise MisuseError(f"prompt {name!r} has no version that was active before: activate one by its number")
        before = stack[-2]
        prompt = self._check_unchanged(self._find(name, before.version), before)
        made = _make_activation(prompt, by, why, "roll_back")
        with open_log(self._folder / ACTIVATIONS) as log:
            now = self._active_stack(name)
            if now == stack[:-1]:
                return self.history(name)[-1]
            if now != stack:
                raise MisuseError(
                    f"prompt {name!r} was not rolled back: {now[-1].by} has activated version {now[-1].version} "
                    "meanwhile, so look at it again"
                )
            append_line(log, json.dumps(attrs.asdict(made), ensure_ascii=False))
        return made

    def _read_log(self) -> None:
        """Read the log if it has changed: it may be another process that activates."""
        path = self._folder / ACTIVATIONS
        try:
            status = path.stat()
        except FileNotFoundError:
            self._log, self._log_stamp = (), None
            return
        stamp = status.st_mtime_ns, status.st_size
        if stamp != self._log_stamp:
            self._log = tuple(_read_lines(path, lambda line: Activation(**line)))
            self._log_stamp = stamp

    # Results of tests.

    def record(self, report: PromptReport) -> None:
        """Add the results of a version's tests to the log of results."""
        with open_log(self._folder / RESULTS) as log:
            append_line(log, json.dumps(report.to_dict(), ensure_ascii=False))

    def results(self, prompt: PromptTemplate) -> tuple[PromptReport, ...]:
        """Return the recorded results of a version, the oldest first. Results of another text do not count."""
        path = self._folder / RESULTS
        reports = _read_lines(path, PromptReport.from_dict) if path.exists() else ()
        return tuple(each for each in reports if (each.name, each.digest) == (prompt.name, prompt.digest))


def _make_activation(prompt: PromptTemplate, by: str, why: str, action: Literal["activate", "roll_back"]) -> Activation:
    NAME.check(action, "by", by)
    NAME.check(action, "why", why)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return Activation(
        name=prompt.name, version=prompt.version, digest=prompt.digest, by=by, why=why, at=at, action=action
    )


def _read_lines(path: Path, parse: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
    """Yield the records of a log.

    Raises:
        MisuseError: if a line is not such a record. A line that a crash cut short was never acknowledged, and is
            skipped: it is not JSON.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        try:
            yield parse(record)
        except (TypeError, KeyError, AttributeError) as error:
            raise MisuseError(f"{path}, line {number}: {error}: restore the line from version control") from None
