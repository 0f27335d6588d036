"""Read webhooks from a JSON file, for `agentfsm serve --webhooks`. Secrets stay in the environment.

{"incoming": {"crm": {"secret": "${CRM_SECRET}", "user": "crm-bot", "tenant": "acme", "prompt": "Sort this."}},
 "outgoing": {"desk": {"secret": "${DESK_SECRET}", "url": "https://desk.example.org/hook", "tenant": "acme"}}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import attrs
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from agentfsm.core.errors import MisuseError
from agentfsm.core.json_text import build_object
from agentfsm.core.value import Value
from agentfsm.serve.dialects.webhooks import IncomingWebhook, OutgoingWebhook, webhooks
from agentfsm.serve.endpoints import RouteGroup

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# End of the name of the file of events that were given up, unless the file of webhooks names it.
DEAD_LETTERS_SUFFIX: Final = ".dead.jsonl"


def _check_reference(text: str) -> str:
    if _VARIABLE.fullmatch(text) is None:
        raise ValueError('give "${NAME}": the environment variable NAME has the secret, and this file must not')
    return text


_SecretReference = Annotated[str, AfterValidator(_check_reference)]


class _Entry(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    secret: _SecretReference
    tenant: str | None = None

    def list_options(self) -> dict[str, Any]:
        """Return the given fields, except the secret."""
        return self.model_dump(exclude_unset=True, exclude={"secret"})


class IncomingEntry(_Entry):
    """Fields of an `IncomingWebhook`."""

    user: str
    agent: str | None = None
    prompt: str = ""


class OutgoingEntry(_Entry):
    """Fields of an `OutgoingWebhook`."""

    url: str
    statuses: list[Literal["done", "failed", "waiting", "paused"]] = Field(default=[], min_length=1)
    allow_private: bool = False

    def list_options(self) -> dict[str, Any]:
        """Return the given fields, except the secret."""
        options = super().list_options()
        return options | ({"statuses": tuple(self.statuses)} if "statuses" in options else {})


class _Document(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    incoming: dict[str, IncomingEntry] = {}
    outgoing: dict[str, OutgoingEntry] = {}
    dead_letters: str | None = None


@attrs.frozen(kw_only=True)
class WebhookFile(Value):
    """Webhooks of a file, whose secrets are not filled in."""

    path: Path
    """The file."""

    incoming: Mapping[str, IncomingEntry]
    """Webhooks of other systems, by name."""

    outgoing: Mapping[str, OutgoingEntry]
    """Receivers of the runs' events, by name."""

    dead_letters: Path
    """File of the events that were given up."""

    def build_routes(self, environment: Mapping[str, str]) -> RouteGroup:
        """Return the webhooks for a server.

        Args:
            environment: Environment variables, with the secrets.

        Raises:
            MisuseError: when a secret is missing, or a webhook is not valid.
        """
        hooks: list[IncomingWebhook | OutgoingWebhook] = []
        for section, kind, entries in (
            ("incoming", IncomingWebhook, self.incoming),
            ("outgoing", OutgoingWebhook, self.outgoing),
        ):
            for name, entry in entries.items():
                try:
                    secret = _resolve_secret(entry.secret, environment)
                    hooks.append(kind(name=name, secret=secret, **entry.list_options()))
                except MisuseError as error:
                    raise MisuseError(f"{self.path}: {section}.{name}: {error}") from None
        return webhooks(hooks, dead_letters=self.dead_letters)


def _resolve_secret(reference: str, environment: Mapping[str, str]) -> str:
    name = reference.removeprefix("${").removesuffix("}")
    if name not in environment:
        raise MisuseError(f"the environment variable {name} is not set: it has the secret")
    return environment[name]


def read_webhook_file(path: Path) -> WebhookFile:
    """Read a file of webhooks.

    Raises:
        MisuseError: when it cannot be read, or is not valid; with the place of each flaw.
    """
    try:
        given = json.loads(path.read_text("utf-8"), object_pairs_hook=build_object)
        document = _Document.model_validate(given)
    except OSError as error:
        raise MisuseError(f"cannot read the webhooks in {path}: {error.strerror}") from None
    except ValidationError as error:
        flaws = error.errors(include_url=False, include_input=False, include_context=False)
        raise MisuseError(f"{path}: {'; '.join(map(_describe_flaw, flaws[:10]))}") from None
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{path} is not valid JSON: {error}") from None
    if not document.incoming and not document.outgoing:
        raise MisuseError(f'{path} has no webhooks: give "incoming" or "outgoing", each an object of webhooks by name')
    name = document.dead_letters or path.with_suffix(DEAD_LETTERS_SUFFIX).name
    return WebhookFile(
        path=path, incoming=document.incoming, outgoing=document.outgoing, dead_letters=path.parent / name
    )


def _describe_flaw(flaw: ErrorDetails) -> str:
    is_other = flaw["type"] in {"model_type", "dict_type"}
    text = "give a JSON object" if is_other else flaw["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, flaw['loc'])) or 'the file'}: {text}"


@attrs.frozen(kw_only=True)
class DeadLetter(Value):
    """An event that was given up: its receiver refused it, or accepted no attempt."""

    webhook: str
    """Name of the outgoing webhook."""

    run_id: str
    """Id of the run."""

    version: int
    """Version of the run whose status was to be sent."""

    error: str
    """Reason of the last attempt."""

    at: float
    """Time at which it was given up, seconds since 1970."""


def read_dead_letters(path: Path) -> tuple[DeadLetter, ...]:
    """Read the events that were given up, oldest first; none if there is no file.

    A line that a crash of the server has cut off is left out.

    Raises:
        MisuseError: when the file cannot be read.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise MisuseError(f"cannot read the events in {path}: {error}") from None
    return tuple([letter for line in lines if (letter := _parse_dead_letter(line)) is not None])


def _parse_dead_letter(line: str) -> DeadLetter | None:
    try:
        entry = json.loads(line)
        run_id, _, version = entry["id"].rpartition(":")
        return DeadLetter(
            webhook=str(entry["webhook"]),
            run_id=run_id,
            version=int(version),
            error=str(entry["error"]),
            at=float(entry["at"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
