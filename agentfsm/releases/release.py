"""Releases of an agent: a manifest of everything that determines its behaviour, which never changes.

Source: document H, 6.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import ConflictError, MisuseError
from agentfsm.core.header import Fingerprint, short_hash
from agentfsm.core.limits import Limits
from agentfsm.core.settings import Settings
from agentfsm.core.validation import STRING
from agentfsm.core.value import Value
from agentfsm.prompts import PromptTemplate

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.core.messages import JSON
    from agentfsm.evals import Evaluation
    from agentfsm.ports.store import Store

# Kind of the records of releases.
RELEASES: Final = "release"
# Digits of the digests of a release and of an evaluation.
DIGEST_CHARS: Final = 12
DIMENSIONS: Final = ("code", "prompts", "model", "tools", "configuration")
"""The dimensions of a release, each of which can change what an agent does."""


@attrs.frozen(kw_only=True)
class ReleaseEvaluation(Value):
    """The evaluation that a release was approved with."""

    suite: str
    """Name of the suite."""

    at: str
    """Time of the evaluation, in ISO 8601 and UTC."""

    passed: float | None
    """Mean of the aspect "outcome", from 0 to 1; None if it was not scored."""

    digest: str
    """Hash of the results: 12 hexadecimal digits."""

    def __str__(self) -> str:
        score = "not scored" if self.passed is None else f"{self.passed:.1%} passed"
        return f"{self.suite}, {score}, {self.at}, {self.digest}"


@attrs.frozen(kw_only=True)
class Release(Value):
    """A release of an agent: five dimensions, a hash of them, and the evaluation that it was approved with."""

    agent: str
    """Name of the agent."""

    version: str
    """Version of the agent, which names the release. A run of the release has it in its header."""

    code: str = ""
    """Version of the source code, such as a commit; empty if not given."""

    prompts: Mapping[str, str]
    """Versions and digests of the prompts by name, and the hash of the instructions as a whole."""

    model: str
    """Name of the model. It should name a snapshot that the provider does not change: gpt-5.4-mini-2026-03-17."""

    tools: Mapping[str, str]
    """Hash by name of each tool. Servers of tools are named without a hash, since their tools may change at any time.
    """

    configuration: Mapping[str, str]
    """Limits, settings and policies, as text by name."""

    evaluation: ReleaseEvaluation | None = None
    """The evaluation that it was approved with; None if there is none. It does not count for the digest."""

    digest: str = attrs.field(init=False)
    """Hash of the dimensions: 12 hexadecimal digits."""

    def __attrs_post_init__(self) -> None:
        """Compute the digest."""
        content = [self.agent, self.version, *[getattr(self, name) for name in DIMENSIONS]]
        object.__setattr__(self, "digest", short_hash(json.dumps(content, sort_keys=True), DIGEST_CHARS))

    def __str__(self) -> str:
        """The manifest, a line for each part."""
        lines = [f"{self.agent} {self.version} ({self.digest})"]
        for name in DIMENSIONS:
            value = getattr(self, name)
            parts = [f"{key} {part}" for key, part in sorted(value.items())] if isinstance(value, Mapping) else [value]
            lines += [f"  {name + ':':15}{part or '-'}" for part in parts or [""]]
        return "\n".join([*lines, f"  {'evaluation:':15}{self.evaluation or '-'}"])

    @classmethod
    def of(cls, agent: Agent[Any], *, code: str = "", evaluation: Evaluation | None = None) -> Release:
        """Return the release that an agent is.

        Args:
            agent: The agent. It has a version, and its instructions do not depend on what is activated elsewhere.
            code: Version of the source code, such as a commit.
            evaluation: Evaluation of this version of the agent, from `evaluate`.

        Raises:
            MisuseError: if the agent has no version, its prompt may change, or the evaluation is of another version.
        """
        STRING.check("Release.of", "code", code)
        if not agent.version:
            raise MisuseError(
                f"agent {agent.name!r} has no version to name the release: write Agent(..., version='1.0.0')"
            )
        fingerprint = agent.driver.config.fingerprint
        return cls(
            agent=agent.name,
            version=agent.version,
            code=code,
            prompts=_describe_instructions(agent, fingerprint),
            model=fingerprint.model,
            tools=_list_tools(agent, fingerprint),
            configuration=_list_configuration(agent, fingerprint),
            evaluation=None if evaluation is None else _summarise(evaluation, agent),
        )

    def diff(self, after: Release) -> dict[str, tuple[str, ...]]:
        """Return the changes up to another release by dimension, a few words each; without equal dimensions."""
        changes = {name: _compare(getattr(self, name), getattr(after, name)) for name in DIMENSIONS}
        return {name: words for name, words in changes.items() if words}

    def to_dict(self) -> dict[str, JSON]:
        """Return the release as plain JSON."""
        plain: dict[str, JSON] = attrs.asdict(self)
        return plain

    @classmethod
    def from_dict(cls, data: Any) -> Release:
        """Return a release from the JSON that `to_dict` returned."""
        evaluation = data["evaluation"]
        fields = {name: value for name, value in data.items() if name != "digest"}
        return cls(**{**fields, "evaluation": None if evaluation is None else ReleaseEvaluation(**evaluation)})


def _describe_instructions(agent: Agent[Any], fingerprint: Fingerprint) -> dict[str, str]:
    own = agent.instructions
    if isinstance(own, PromptTemplate):
        if not own.is_fixed:
            raise MisuseError(
                f"the instructions of agent {agent.name!r} are the active version of prompt {own.name!r}, so "
                "activating another one would change the release: choose the version, "
                f"prompts[{own.name!r}, {own.version!r}]"
            )
        return {own.name: f"{own.version}#{own.digest}"}
    if callable(own):
        return {"instructions": f"function {getattr(own, '__module__', '')}.{getattr(own, '__qualname__', own)}"}
    return {"instructions": fingerprint.instructions}


def _list_tools(agent: Agent[Any], fingerprint: Fingerprint) -> dict[str, str]:
    listed = {tool.name for source in agent.tools.sources for tool in source.tools}
    servers = {getattr(source, "name", type(source).__name__): "server" for source in agent.tools.sources}
    own = {name: digest for name, digest in fingerprint.tools.items() if name not in listed}
    return own | servers


def _list_configuration(agent: Agent[Any], fingerprint: Fingerprint) -> dict[str, str]:
    found = {f"limits.{name}": repr(value) for name, value in _list_set_fields(agent.limits, Limits()).items()}
    if isinstance(agent.settings, Settings):
        found |= {
            f"settings.{name}": repr(value) for name, value in _list_set_fields(agent.settings, Settings()).items()
        }
    return {**found, "policies": fingerprint.config}


def _list_set_fields(value: Limits | Settings, default: Limits | Settings) -> dict[str, Any]:
    fields = [each.name for each in attrs.fields(type(value)) if each.init]
    return {name: getattr(value, name) for name in fields if getattr(value, name) != getattr(default, name)}


def _summarise(evaluation: Evaluation, agent: Agent[Any]) -> ReleaseEvaluation:
    if evaluation.version != agent.version or evaluation.agent != agent.name:
        raise MisuseError(
            f"the evaluation is of {evaluation.agent} {evaluation.version or 'without a version'}, and the release is "
            f"{agent.name} {agent.version}: evaluate this version"
        )
    content = json.dumps(evaluation.to_dict(), sort_keys=True)
    return ReleaseEvaluation(
        suite=evaluation.suite,
        at=evaluation.at,
        passed=evaluation.mean(),
        digest=sha256(content.encode()).hexdigest()[:DIGEST_CHARS],
    )


def _compare(before: str | Mapping[str, str], after: str | Mapping[str, str]) -> tuple[str, ...]:
    if isinstance(before, str) or isinstance(after, str):
        return () if before == after else (f"{before or 'none'} -> {after or 'none'}",)
    names = sorted(before.keys() | after.keys())
    pairs = [(name, before.get(name, "unset"), after.get(name, "unset")) for name in names]
    return tuple([f"{name} {then} -> {now}" for name, then, now in pairs if then != now])


async def save_release(store: Store, release: Release) -> None:
    """Save a release in a store, once; an evaluation may be added later.

    Raises:
        ConflictError: if the store has a release of this name with other contents.
    """
    key = f"{release.agent}/{release.version}"
    while True:
        record = await store.read_record(RELEASES, key)
        if record is not None:
            known = Release.from_dict(record.value)
            if known.digest != release.digest:
                changes = "; ".join(f"{name}: {', '.join(words)}" for name, words in known.diff(release).items())
                raise ConflictError(
                    f"release {release.version!r} of agent {release.agent!r} was saved with other contents "
                    f"({changes}): give the changed agent another version"
                )
            if release.evaluation is None or known.evaluation == release.evaluation:
                return
        try:
            await store.write_record(
                RELEASES, key, release.to_dict(), revision=0 if record is None else record.revision
            )
        except ConflictError:  # another process was faster: compare with what it saved
            continue
        return


async def load_release(store: Store, agent: str, version: str) -> Release:
    """Return a release that was saved.

    Raises:
        MisuseError: if the store has no such release.
    """
    record = await store.read_record(RELEASES, f"{agent}/{version}")
    if record is None:
        known = [each.key.removeprefix(f"{agent}/") for each in await store.list_records(RELEASES, prefix=f"{agent}/")]
        raise MisuseError(f"agent {agent!r} has no release {version!r}; saved are: {', '.join(known) or 'none'}")
    return Release.from_dict(record.value)
