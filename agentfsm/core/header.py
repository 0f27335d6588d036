"""Header of a run, which is entry 0 of its journal, the fingerprint of its agent, and the version of the format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

import attrs

from agentfsm.core.labels import LabelSource
from agentfsm.core.messages import Message, Part
from agentfsm.core.settings import Settings
from agentfsm.core.value import Value


def short_hash(text: str, digits: int) -> str:
    """Return the first hexadecimal digits of the SHA-256 of a text, which may contain lone surrogates."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


@attrs.frozen(kw_only=True)
class Fingerprint(Value):
    """Hashes of the parts that determine an agent's behaviour: 8 hexadecimal digits each."""

    instructions: str = ""
    """Hash of the instructions."""

    model: str = ""
    """Name of the model; empty if the fingerprint is unknown."""

    tools: Mapping[str, str] = attrs.field(factory=dict)
    """Hashes by tool name: of its description, its schema, whether it is read-only, idempotent and strict, and its
    labels; of one that calls an agent, also of that agent and those below it. Other options, such as timeouts and
    approvals, do not count.
    """

    config: str = ""
    """Hash of limits, settings, guards, and the names of context policies, selector, judge and planner; empty if it is
    unknown.
    """

    prompts: Mapping[str, str] = attrs.field(factory=dict)
    """Version and digest of each prompt in the instructions of the run, by name: "1.4.0#0123456789ab"."""

    skills: Mapping[str, str] = attrs.field(factory=dict)
    """Hashes of all files of each skill, by name."""

    @property
    def digest(self) -> str:
        """Hash of all parts: 12 hexadecimal digits."""
        parts = attrs.asdict(self)
        if not self.skills:  # as before there were skills
            del parts["skills"]
        return short_hash(json.dumps(parts, sort_keys=True), 12)

    def changes_since(self, before: Fingerprint) -> tuple[str, ...]:
        """Return the changes since an earlier fingerprint, a few words each; none if the earlier one is unknown."""
        if not before.model:
            return ()
        words = []
        if self.instructions != before.instructions:
            words.append("other instructions")
        names = sorted(self.prompts.keys() | before.prompts.keys())
        pairs = [(name, before.prompts.get(name, "none"), self.prompts.get(name, "none")) for name in names]
        words += [f"prompt {name} {then} -> {now}" for name, then, now in pairs if then != now]
        if self.model != before.model:
            words.append(f"model {before.model} -> {self.model}")
        if before.config and self.config != before.config:
            words.append("other limits, settings or policies")
        words += [f"tool {name} is gone" for name in before.tools if name not in self.tools]
        words += [f"tool {name} is new" for name in self.tools if name not in before.tools]
        words += [f"tool {name} has changed" for name, own in self.tools.items() if before.tools.get(name, own) != own]
        words += [f"skill {name} is gone" for name in before.skills if name not in self.skills]
        words += [f"skill {name} is new" for name in self.skills if name not in before.skills]
        words += [
            f"skill {name} has changed" for name, own in self.skills.items() if before.skills.get(name, own) != own
        ]
        return tuple(words)


# Version of the format that this code writes. It is raised with every change that an older reader would misread.
FORMAT: Final = 5

# Fields that the header of a sub-agent's run takes from the run that called it.
INHERITED_FIELDS: Final = ("tenant", "clearance", "release", "arms", "traceparent", "withhold", "purpose")

# Purpose of runs that show what another agent would have done. They reach nothing outside.
WHAT_IF: Final = "what-if"

# Key in the metadata of a run: what its front end gives it, an object with `tools`, `state` and `context`.
FRONT_END: Final = "agentfsm.front_end"


def _copy(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return dict(metadata)


@attrs.frozen(kw_only=True, slots=False)
class Header(Value):
    """Entry 0 of a journal: the start options of a run. It never changes. Not slotted, for the reason of `OpenCall`."""

    id: str
    """Id of the run, unique in the store."""

    nonce: str = ""
    """Random text that distinguishes runs even if an id is used again. The idempotency keys of the calls begin with it.
    Empty in runs of formats older than 4, whose keys begin with the id.
    """

    prompt: tuple[Part, ...]
    """Parts of the prompt, in reading order."""

    created_at: float
    """Time at which the run was created, seconds since 1970."""

    session: str | None = None
    """Id of the session that the run belongs to; None if it belongs to none."""

    after: str | None = None
    """Id of the run whose history this run continues; None if there is none."""

    history: tuple[Message, ...] = ()
    """History to continue that is in no store; empty if there is none."""

    agent: str = ""
    """Name of the agent."""

    agent_version: str = ""
    """Version of the agent; empty if it has none."""

    fingerprint: Fingerprint = Fingerprint()
    """Fingerprint of the agent when the run was created."""

    target: str = ""
    """Location of the agent for the command line: "module:attribute"; empty if unknown."""

    user: str | None = None
    """User on whose behalf the run works; None if not given."""

    roles: tuple[str, ...] = ()
    """Roles of the user."""

    tenant: str | None = None
    """Tenant that the user belongs to; None if not given. Sub-agents inherit it and the three fields below."""

    clearance: str = ""
    """Highest level of data that the run may use: "public", "internal", "confidential" or "restricted"; empty if not
    given.
    """

    release: str = ""
    """Name of the release of the agent that the run was assigned to; empty if there are no releases."""

    arms: Mapping[str, str] = attrs.field(factory=dict)
    """Arm of each experiment that the run takes part in, by the name of the experiment."""

    traceparent: str = ""
    """Span that has started the run, as the value of the W3C header `traceparent`; empty if there is none. For the run
    of a sub-agent it is the span of the call.
    """

    labels: tuple[LabelSource, ...] = ()
    """Labels that the prompt brings into the run, each with its source: those that were given for it, and those of the
    run that called this agent as a tool.
    """

    parent: str | None = None
    """Id of the run that called this agent as a tool; None for a top-level run. The id of this run combines it with the
    id of the call.
    """

    caller: str | None = None
    """Run and call, as "RUN/CALL", whose tool started this run by itself; None if no tool did. Such a run is top-level.
    Its id is made of both, unless one was given.
    """

    depth: int = 0
    """Number of runs above this one."""

    forked_from: str | None = None
    """Id of the run that this one was forked from; None if it is not a fork."""

    forked_at: int = 0
    """Number of events that this run shares with that run."""

    forked_by: str = ""
    """Person who made the fork; empty if it is not a fork, or no name was given."""

    withhold: bool = False
    """Whether calls of tools that are not read-only are refused, because the run only shows them: a fork that was made
    with `withhold=True`, and the runs of its sub-agents and of its calls.
    """

    purpose: str = ""
    """Purpose of the run if it is not production, such as "eval" for one of an evaluation: figures of tasks, alerts,
    limits of callers, lists and the learner leave it out unless they are asked for it. Empty for production. Forks,
    sub-agents, and runs that its calls start inherit it. Workers leave it to who has started it.
    """

    instructions: str | None = None
    """Instructions of this run, if they were resolved at its start from a prompt or a function; None: the agent's."""

    settings: Settings | None = None
    """Settings of model requests for this run; set fields override the agent's."""

    metadata: dict[str, Any] = attrs.field(factory=dict, converter=_copy)
    """Metadata of the caller, as JSON values."""

    format: int = FORMAT
    """Version of the format of the journal."""
