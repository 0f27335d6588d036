"""The header of a run: entry 0 of its journal, and the version of the format that journals are written in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from agentfsm.core.fingerprint import Fingerprint
from agentfsm.core.messages import Message, Part
from agentfsm.core.settings import Settings
from agentfsm.core.value import Value

# The format of journals that this code writes; raised with every change that an older reader would misunderstand.
FORMAT: Final = 4


def _copy(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return dict(metadata)


@attrs.frozen(kw_only=True, slots=False)
class Header(Value):
    """Entry 0 of a journal: what a run was begun with. It never changes. Not slotted, as `OpenCall`."""

    id: str
    """Unique in the store."""

    nonce: str = ""
    """Random, and of no other run, also where an id is used again: the keys of its calls begin with it. Empty in runs
    of formats older than 4, whose keys begin with the id.
    """

    prompt: tuple[Part, ...]
    created_at: float
    """Seconds since 1970."""

    session: str | None = None
    """The conversation that the run belongs to."""

    after: str | None = None
    """The id of the run whose history this one goes on from."""

    history: tuple[Message, ...] = ()
    """Messages to go on from that no store has."""

    agent: str = ""
    agent_version: str = ""
    fingerprint: Fingerprint = Fingerprint()
    """What the agent was."""

    target: str = ""
    """Where the command line finds the agent again: "module:attribute"."""

    user: str | None = None
    roles: tuple[str, ...] = ()
    parent: str | None = None
    """The id of the run whose tool this one is; its own id is that and the call's."""

    depth: int = 0
    """How many runs are above it."""

    forked_from: str | None = None
    """The id of the run whose first events are this one's, too."""

    forked_at: int = 0
    """How many."""

    settings: Settings | None = None
    """How the model is asked in this run, over what the agent says."""

    metadata: dict[str, Any] = attrs.field(factory=dict, converter=_copy)
    """JSON values; a copy of what the caller gave."""

    format: int = FORMAT
    """The version of the format that the journal is written in."""
