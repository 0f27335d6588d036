"""Tools that a provider executes itself, as values that are listed among an agent's tools.

agentfsm does not execute them: permissions, approvals and time limits of tools do not apply to them, and neither do
idempotency keys. Their outcome is recorded with the reply (`HostedContent`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar
from urllib.parse import urlsplit

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import Label, as_labels
from agentfsm.core.validation import COUNT, NAME, STRING
from agentfsm.core.value import Value


def _as_texts(texts: Iterable[str]) -> tuple[str, ...]:
    if isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts):
        return tuple(texts)
    raise MisuseError(f"{texts!r:.100} is not a list of names: give a list of strings, also for a single one")


def _check_stores(_tool: object, _attribute: object, ids: tuple[str, ...]) -> None:
    if not ids:
        raise MisuseError("FileSearch(vector_store_ids=[]) searches nothing: give the id of a store, as ['vs_...']")


def _check_url(_tool: object, _attribute: object, url: str) -> None:
    if not isinstance(url, str) or not url.startswith("https://") or not urlsplit(url).hostname:
        raise MisuseError("HostedMCP(url=...) has to be an https:// address, because the provider connects to it")


@attrs.frozen(kw_only=True)
class HostedTool(Value):
    """Base class of the tools that a provider executes itself."""

    kind: ClassVar[str]
    """Kind of the tool in one word, such as "web_search"."""

    default_labels: ClassVar[tuple[Label, ...]] = ()
    """Labels of tools of this kind: a web search, pages and an MCP server read what strangers can write."""

    read_only: ClassVar[bool] = True
    """Whether tools of this kind change nothing outside of the provider's containers. A run that withholds calls is not
    offered the others, since the provider would execute them.
    """

    labels: tuple[Label, ...] = attrs.field(
        default=attrs.Factory(lambda tool: tool.default_labels, takes_self=True), converter=as_labels
    )
    """Labels of what the tool reads and does, such as `["private"]`. Default: "untrusted" for a web search, pages
    and an MCP server, else none.
    """

    @property
    def name(self) -> str:
        """Name of the tool among the agent's tools, which are all different."""
        return self.kind

    def describe(self) -> dict[str, Any]:
        """Return the kind and the options without secrets, for the hashes that show a change of the agent."""
        shown = attrs.asdict(
            self,
            filter=lambda field, value: field.repr is True and (field.name, value) != ("labels", self.default_labels),
        )
        return {"hosted": self.kind, **shown}


@attrs.frozen(kw_only=True)
class WebSearch(HostedTool):
    """Search of the web by the provider. The pages that it used are citations.

    Raises:
        MisuseError: when an option is of a wrong type.
    """

    kind = "web_search"
    default_labels: ClassVar[tuple[Label, ...]] = (Label.UNTRUSTED,)
    """Results are texts from outside."""

    allowed_domains: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)
    """Domains to which the search is limited, such as "python.org"; empty for all."""

    blocked_domains: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)
    """Domains that the search leaves out. OpenAI has no such option."""

    max_uses: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Largest number of searches in one request, 1 or more. OpenAI has no such option. None: no limit."""

    country: str = attrs.field(default="", validator=STRING)
    """Country of the user, in two letters such as "FR", for results near there; empty if unknown."""

    city: str = attrs.field(default="", validator=STRING)
    """City of the user, such as "Paris"; empty if unknown."""


@attrs.frozen(kw_only=True)
class URLContext(HostedTool):
    """Pages that the provider fetches, by addresses in the prompt and in results of a search."""

    kind = "url_context"
    default_labels: ClassVar[tuple[Label, ...]] = (Label.UNTRUSTED,)
    """Results are texts from outside."""


@attrs.frozen(kw_only=True)
class CodeExecution(HostedTool):
    """Execution of Python in a container of the provider. Files that the code writes are in `HostedContent.files`."""

    kind = "code_execution"


@attrs.frozen(kw_only=True)
class ImageGeneration(HostedTool):
    """Generation of images by the provider, which are in `HostedContent.images`.

    Raises:
        MisuseError: when an option is of a wrong type.
    """

    kind = "image_generation"

    size: str = attrs.field(default="", validator=STRING)
    """Size in pixels, such as "1024x1024"; empty for the provider's choice."""

    quality: str = attrs.field(default="", validator=STRING)
    """Quality in the provider's words, such as "low" or "high"; empty for the provider's choice."""

    output_format: str = attrs.field(default="", validator=STRING)
    """Format of the image: "png", "jpeg" or "webp"; empty for PNG."""

    background: str = attrs.field(default="", validator=STRING)
    """Background in the provider's words, such as "transparent"; empty for the provider's choice."""


@attrs.frozen(kw_only=True)
class FileSearch(HostedTool):
    """Search of files that were uploaded to vector stores of the provider.

    Raises:
        MisuseError: when there is no store, or an option is of a wrong type.
    """

    kind = "file_search"

    vector_store_ids: tuple[str, ...] = attrs.field(converter=_as_texts, validator=_check_stores)
    """Ids of the stores to search, at least one."""

    max_results: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Largest number of results of a search, 1 or more. None: the provider's default."""


@attrs.frozen(kw_only=True)
class HostedMCP(HostedTool):
    """MCP server whose tools the provider calls, without an approval. For approvals, use `agentfsm.mcp.MCPServer`.

    Raises:
        MisuseError: when the URL is not https, or an option is of a wrong type.
    """

    kind = "mcp"
    read_only: ClassVar[bool] = False
    """Its server may do anything."""

    default_labels: ClassVar[tuple[Label, ...]] = (Label.UNTRUSTED,)
    """Results are texts from outside."""

    server: str = attrs.field(validator=NAME)
    """Name of the server, with which its tools appear in `HostedCall.tool`."""

    url: str = attrs.field(repr=False, validator=_check_url)
    """Address of the server, which the provider has to reach: https. It may contain a secret, so `repr` omits it."""

    authorization: str = attrs.field(default="", validator=STRING, repr=False)
    """Token that the provider sends to the server; empty for none."""

    allowed_tools: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)
    """Names of the server's tools that may be called; empty for all."""

    @property
    def name(self) -> str:
        """Name of the server."""
        return self.server
