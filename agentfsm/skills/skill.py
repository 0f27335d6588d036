"""A skill: a folder with a `SKILL.md`, read and checked by the Agent Skills specification.

Source: https://agentskills.io/specification
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import attrs

from agentfsm._lib.pins import ApprovedText, Pin
from agentfsm._lib.plugins import require_extra
from agentfsm.core.errors import MisuseError, ModelRetry
from agentfsm.core.text_safety import escape_hidden, find_hidden
from agentfsm.core.value import Value
from agentfsm.sandbox.path_jail import PathJail
from agentfsm.sandbox.process.skill_script import INTERPRETERS, PYTHON, digest_files, hash_files

with require_extra("agentfsm.skills", "skills", "yaml"):
    import yaml  # type: ignore[import-untyped]

SKILL_FILE: Final = "SKILL.md"
SCRIPTS: Final = "scripts/"
# Bytes of a file that is read as text: more than a context window holds.
MAX_FILE_BYTES: Final = 4 << 20
# Limits of the specification, in characters and lines.
_MAX_NAME: Final = 64
MAX_DESCRIPTION: Final = 1_024
_MAX_COMPATIBILITY: Final = 500
_MAX_LINES: Final = 500
_FIELDS: Final = frozenset({"name", "description", "license", "compatibility", "metadata", "allowed-tools"})
_FENCE: Final = "---"
# A path of the usual folders in the text of a skill.
_REFERENCE: Final = re.compile(r"(?<![\w./-])(?:scripts|references|assets)/[\w./-]*\w")


@attrs.frozen(kw_only=True)
class SkillFinding(Value):
    """A flaw of a skill."""

    severity: Literal["error", "warning"]
    """"error": the skill cannot be used; "warning": it could be better."""

    message: str
    """The flaw, and what is wanted."""


@attrs.frozen(kw_only=True)
class Skill(Value):
    """A skill without errors."""

    name: str
    """Name, which is also that of its folder."""

    description: str
    """What it does and when to use it, for the model."""

    license: str = ""
    """Name of its license, or of the file with it; empty if it does not say."""

    compatibility: str = ""
    """What it needs of its environment; empty if it does not say."""

    metadata: Mapping[str, str] = attrs.field(factory=dict)
    """Further properties."""

    allowed_tools: tuple[str, ...] = ()
    """Tools that its author wants to be allowed. It is for information: a skill cannot grant itself anything."""

    body: str
    """Instructions for the model: the text of `SKILL.md` without its front matter."""

    folder: Path
    """Absolute path of its folder."""

    files: Mapping[str, str]
    """SHA-256 of each file, by its path in the folder."""

    findings: tuple[SkillFinding, ...] = ()
    """Warnings."""

    @property
    def digest(self) -> str:
        """Hash of all files: 16 hexadecimal digits."""
        return digest_files(dict(self.files))

    @property
    def scripts(self) -> tuple[str, ...]:
        """Paths of the scripts that can be run, in Python, shell or JavaScript."""
        kinds = (PYTHON, *INTERPRETERS)
        return tuple(path for path in self.files if path.startswith(SCRIPTS) and path.endswith(kinds))

    def build_pin(self) -> Pin:
        """Return what a person approves: the text of `SKILL.md`, and the hashes of the other files."""
        texts = {path: ApprovedText.from_json({"sha256": digest}) for path, digest in self.files.items()}
        lines: Any = _read_text(self.folder).splitlines()
        texts[SKILL_FILE] = ApprovedText.from_json([*lines, f"sha256: {self.files[SKILL_FILE]}"])
        return Pin(items={f"file {path}": text for path, text in texts.items()})


def list_folders(place: Path | str) -> list[Path]:
    """Return the folders of skills: the folder itself if it has a `SKILL.md`, else those below it that do not hide.

    Raises:
        MisuseError: if there is no such folder, or no skill in it.
    """
    root = Path(place).expanduser().resolve()
    if not root.is_dir():
        raise MisuseError(f"there is no folder {str(place)!r} of skills")
    if (root / SKILL_FILE).is_file():
        return [root]
    found = [each for each in sorted(root.iterdir()) if each.is_dir() and not each.name.startswith(".")]
    if not found:
        raise MisuseError(f"the folder {str(place)!r} has no skills: a skill is a folder with a file {SKILL_FILE}")
    return found


def read_skill(folder: Path) -> Skill | tuple[SkillFinding, ...]:
    """Return the skill in a folder, or its findings if it cannot be used."""
    try:
        files = hash_files(folder)
        _check_names(files)
        front, body = _split(_read_text(folder))
    except (ModelRetry, OSError, ValueError) as error:
        return (SkillFinding(severity="error", message=str(error)),)
    errors = [*_find_errors(front, folder.name)]
    warnings = [*_find_warnings(front, body, files)]
    found = [SkillFinding(severity="error", message=text) for text in errors]
    found += [SkillFinding(severity="warning", message=text) for text in warnings]
    if errors:
        return tuple(found)
    return Skill(
        name=_normalize(front["name"]),
        description=" ".join(front["description"].split()),
        license=front.get("license", ""),
        compatibility=front.get("compatibility", ""),
        metadata=front.get("metadata", {}),
        allowed_tools=tuple(front.get("allowed-tools", "").split()),
        body=body,
        folder=folder,
        files=files,
        findings=tuple(found),
    )


def _read_text(folder: Path) -> str:
    try:
        text = PathJail(folder).read(SKILL_FILE, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{SKILL_FILE} is not text in UTF-8") from error
    if (found := find_hidden(text)) is not None:
        raise ValueError(f"{SKILL_FILE} holds the hidden character {found}")
    return text


def _check_names(paths: Iterable[str]) -> None:
    for path in paths:
        if "\n" in path or "\t" in path or find_hidden(path) is not None:
            raise ValueError(f"the name of {escape_hidden(repr(path)[1:-1])} has a hidden character")


def _split(text: str) -> tuple[dict[str, Any], str]:
    """Return the front matter, whose values are texts, lists and mappings of texts, and the text after it."""
    lines = text.splitlines()
    ends = [number for number, line in enumerate(lines) if line.rstrip() == _FENCE]
    if len(ends) < 2 or ends[0] != 0:
        raise ValueError(f"{SKILL_FILE} has to begin with front matter between two lines {_FENCE}")
    matter = "\n".join(lines[1 : ends[1]])
    try:
        front = yaml.load(matter, yaml.BaseLoader)  # noqa: S506  it makes nothing but texts
        values = [getattr(event, "value", "") for event in yaml.parse(matter, yaml.BaseLoader)]
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the front matter is not YAML ({reason}); quote texts with a colon") from error
    if not isinstance(front, dict):
        raise ValueError("the front matter has to be a mapping")  # noqa: TRY004  a flaw of the file
    if (found := next(filter(None, map(find_hidden, values)), None)) is not None:  # an escape in quotes makes one
        raise ValueError(f"a value of the front matter holds the hidden character {found}")
    return front, "\n".join(lines[ends[1] + 1 :]).strip()


def _normalize(name: str) -> str:
    return unicodedata.normalize("NFKC", name.strip())


def _find_errors(front: Mapping[str, Any], folder: str) -> Iterator[str]:
    for field in ("name", "description", "compatibility"):
        value = front.get(field)
        if value is None and field == "compatibility":
            continue
        if not isinstance(value, str) or not value.strip():
            yield f"{field} has to be a text, and not empty"
        elif field == "name" and len(value.strip()) > _MAX_NAME:
            yield f"{field} has {len(value.strip()):,} characters, the maximum is {_MAX_NAME:,}"
    for field in ("license", "allowed-tools"):
        if not isinstance(front.get(field, ""), str):
            yield f"{field} has to be a text" + (", with spaces between the tools" if field == "allowed-tools" else "")
    metadata = front.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        yield "metadata has to be a mapping of texts to texts"
    name = front.get("name")
    if not isinstance(name, str) or not name.strip():
        return
    name = _normalize(name)
    is_made_of_letters = all(char.isalnum() or char == "-" for char in name) and name == name.lower()
    if not is_made_of_letters or name.startswith("-") or name.endswith("-") or "--" in name:
        yield f"the name {name!r} has to be of lowercase letters, digits and single hyphens between them"
    if name != unicodedata.normalize("NFKC", folder):
        yield f"the name {name!r} has to be that of the folder, {folder!r}"


def _find_warnings(front: Mapping[str, Any], body: str, files: Mapping[str, str]) -> Iterator[str]:
    if unknown := sorted(front.keys() - _FIELDS):
        yield f"unknown fields: {', '.join(unknown)}; put properties of your own into metadata"
    for field, most in (("description", MAX_DESCRIPTION), ("compatibility", _MAX_COMPATIBILITY)):
        if len(value := str(front.get(field, "")).strip()) > most:
            cut = ", so its end is left out of the list" if field == "description" else ""
            yield f"{field} has {len(value):,} characters, the specification allows {most:,}{cut}"
    if not body:
        yield "it has no instructions"
    if (lines := body.count("\n") + 1) > _MAX_LINES:
        yield f"the instructions have {lines} lines, more than {_MAX_LINES}: move what is seldom needed to other files"
    for path in dict.fromkeys(_REFERENCE.findall(body)):
        if path not in files and not any(file.startswith(f"{path}/") for file in files):
            yield f"the instructions name {path}, which is not there"
    for path in files:
        if path.startswith(SCRIPTS) and PurePosixPath(path).suffix in {".ts", ".rb", ".pl", ".ps1", ".bat"}:
            yield f"{path} cannot be run: scripts are in {', '.join((PYTHON, *INTERPRETERS))}"
    if front.get("allowed-tools"):
        yield "allowed-tools grants nothing: the program decides what an agent may do"


def find_difference(skill: Skill, pins: Mapping[str, Pin]) -> str | None:
    """Return why a skill is not approved, or None."""
    pin = pins.get(pin_key(skill.name))
    if pin is None:
        return "it is not approved; agentfsm skills pin shows it and asks"
    return None if pin.items == skill.build_pin().items else "it has changed since it was approved"


def pin_key(name: str) -> str:
    """Return the key of a skill's pin."""
    return f"skill {name}"
