"""Our client as the official suite drives it: one scenario, against the server that the suite has started.

Usage: `conformance_client.py URL` plays the scenario that the environment names, as the suite has it;
`conformance_client.py SOCKET` waits for `conformance_door.py`, and plays each scenario in a process forked for it.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import redirect_stderr
from typing import Any, Final
from urllib.parse import urljoin

import anyio
import attrs
import httpx2
from mcp.client.auth.extensions.identity_assertion import IdentityAssertionOAuthProvider
from mcp.shared.auth import OAuthToken

from agentfsm import Agent, Answer, Pending
from agentfsm.mcp import LoginRequiredError, MCPServer, MemoryTokens, OAuth
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.tool import make_tool

# Logins of one person: a server that wants more is refused one.
LOGINS: Final = 3
# Which the suite wants the client to be known by, where the server lets it.
METADATA_URL: Final = "https://conformance-test.local/client-metadata.json"
PARENT: Final = os.getppid()
PATIENCE_S: Final = 120.0
OAUTH: Final = "urn:ietf:params:oauth"
# A value of each type.
ALIKE: Final = {"string": "x", "number": 1, "integer": 1, "boolean": True, "array": [], "object": {}}


@attrs.frozen(kw_only=True)
class Scenario:
    """What is played."""

    name: str
    url: str
    context: Mapping[str, Any]
    # What the suite tells of it: credentials, calls to make.


Play = Callable[[Scenario], Awaitable[None]]


async def play(scenario: Scenario) -> None:
    """Play a scenario to its end, as its name says."""
    fallback = authorized if scenario.name.startswith("auth/") else listing
    await PLAYS.get(scenario.name, fallback)(scenario)


async def converse(server: MCPServer, *calls: tuple[str, Mapping[str, Any]]) -> None:
    """Let an agent with the server's tools call these of them, one in each turn, and end.

    What a tool asks in its call is answered with the defaults of the form, by whoever goes on with the stored run.
    """
    lines = [say("", call(f"{server.name}__{name}", **arguments)) for name, arguments in calls]
    async with Agent(ScriptedModel(*lines, say("done")), tools=[server]) as agent:
        run = await agent.run("go on", elicit=_fill_in)
        while run.pending:
            for each in run.pending:
                (question,) = each.questions
                await agent.answer(run.id, each.call_id, _defaults(question.schema or {}), digest=each.digest)
            run = await agent.resume(run.id)
    sys.stderr.write("".join(f"{message.text}\n" for message in run.messages))


def reached(scenario: Scenario, auth: httpx2.Auth | OAuth | None = None) -> MCPServer:
    """Return the suite's server, with patience: dozens of scenarios are played on a core or two at once."""
    return MCPServer.http(scenario.url, auth=auth, name="s", start_s=PATIENCE_S, timeout_s=PATIENCE_S, confirm=False)


def _fill_in(item: Pending) -> Answer:
    """Answer inside the call, as a server of the handshake revision needs it."""
    (question,) = item.questions
    return Answer(content=_defaults(question.schema or {}))


def _defaults(schema: Mapping[str, Any]) -> dict[str, Any]:
    fields = schema.get("properties", {})
    return {name: form["default"] for name, form in fields.items() if "default" in form}


async def listing(scenario: Scenario) -> None:
    """Only look at the tools."""
    await converse(reached(scenario))


def calling(*calls: tuple[str, Mapping[str, Any]]) -> Play:
    """Call these tools."""

    async def calls_them(scenario: Scenario) -> None:
        await converse(reached(scenario), *calls)

    return calls_them


async def every_tool(scenario: Scenario) -> None:
    """Call each tool that the agent is given, with arguments that fit its schema."""
    server = reached(scenario)
    await server.update()
    names = [tool.name.removeprefix("s__") for tool in server.tools]
    fitting = [_fitting(tool.parameters) for tool in server.tools]
    await converse(server, *zip(names, fitting, strict=True))


def _fitting(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: ALIKE[inner["type"]] for name, inner in schema.get("properties", {}).items()}


async def named_calls(scenario: Scenario) -> None:
    """Make the calls that the suite dictates."""
    calls = scenario.context["toolCalls"]
    await converse(reached(scenario), *((each["name"], each["arguments"]) for each in calls))


async def every_method(scenario: Scenario) -> None:
    """Ask for tools, resources and prompts, and for one of each."""
    server = reached(scenario)
    await every_tool(scenario)
    (resource, *_) = await server.resources()
    await server.read(resource.uri)
    (prompt, *_) = await server.prompts()
    await server.prompt(prompt.name)
    await server.aclose()


async def schema_echoed(scenario: Scenario) -> None:
    """Give the server back the schema of its tool as the agent has it."""
    server = reached(scenario)
    await server.update()
    tools = {tool.name: tool for tool in server.tools}
    await converse(server, ("json_schema_echo", {"schema": tools["s__json_schema_2020_12_tool"].input_schema}))


# Servers that want a token.


@attrs.define
class Unstored:
    """Storage of the SDK for a provider that is used once."""

    async def get_tokens(self) -> None:
        """Return no tokens."""

    async def set_tokens(self, tokens: OAuthToken) -> None:
        """Store nothing."""


async def person(url: str) -> None:
    """Go to the authorization server, which says yes, and return to the port where the login waits."""
    async with httpx2.AsyncClient(trust_env=False, follow_redirects=True) as client:
        await client.get(url)


async def authorized(scenario: Scenario) -> None:
    """Use a server after a person has logged in, and again each time that it wants another login, as people do."""
    told = scenario.context
    registered = {}
    if "client_id" in told:
        registered = {name: told[name] for name in ("client_id", "client_secret")} | {"issuer": await issuer(scenario)}
    oauth = OAuth(**registered, client_metadata_url=METADATA_URL, tokens=MemoryTokens())
    server = reached(scenario, oauth)
    for _ in range(LOGINS):
        try:
            await called(server)
        except LoginRequiredError:
            await server.login(person)
        else:
            return
    raise AssertionError(f"{LOGINS} logins were not enough")


async def issuer(scenario: Scenario) -> str:
    """Return the authorization server that knows the client, which the suite does not tell."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        described = await client.get(urljoin(scenario.url, "/.well-known/oauth-protected-resource/mcp"))
    found: str = described.json()["authorization_servers"][0]
    return found


async def with_secret(scenario: Scenario) -> None:
    """Use a server with a secret of our own."""
    await with_credentials(scenario, client_secret=scenario.context["client_secret"])


async def with_key(scenario: Scenario) -> None:
    """Use a server with a key of our own."""
    told = scenario.context
    await with_credentials(scenario, private_key=told["private_key_pem"], key_algorithm=told["signing_algorithm"])


async def with_credentials(scenario: Scenario, **credentials: str) -> None:
    """Use a server without a person."""
    oauth = OAuth(
        grant="client_credentials",
        client_id=scenario.context["client_id"],
        issuer=await issuer(scenario),
        tokens=MemoryTokens(),
        **credentials,
    )
    await called(reached(scenario, oauth))


async def with_assertion(scenario: Scenario) -> None:
    """Use a server of a company whose identity provider vouches for a person who has signed in there."""
    told = scenario.context
    async with httpx2.AsyncClient(trust_env=False) as client:
        described = await client.get(urljoin(scenario.url, "/.well-known/oauth-protected-resource/mcp"))

        async def assertion(audience: str, resource: str) -> str:
            wanted = {
                "grant_type": f"{OAUTH}:grant-type:token-exchange",
                "requested_token_type": f"{OAUTH}:token-type:id-jag",
                "subject_token": told["idp_id_token"],
                "subject_token_type": f"{OAUTH}:token-type:id_token",
                "audience": audience,
                "resource": resource,
                "client_id": told["idp_client_id"],
            }
            token: str = (await client.post(told["idp_token_endpoint"], data=wanted)).json()["access_token"]
            return token

        auth = IdentityAssertionOAuthProvider(
            scenario.url,
            Unstored(),
            told["client_id"],
            told["client_secret"],
            described.json()["authorization_servers"][0],
            assertion,
            token_endpoint_auth_method="client_secret_basic",  # noqa: S106  a method's name
        )
        await called(reached(scenario, auth))


async def called(server: MCPServer) -> None:
    """Call the server's first tool.

    Raises:
        LoginRequiredError: when a person has to log in before, or for this call.
    """
    await server.update()
    first = server.tools[0].name.removeprefix("s__")
    await converse(server, (first, {}))
    if server.logins is not None and server.logins.needs_person:
        status = await server.logins.read_status()
        if status.is_refused:
            raise LoginRequiredError("the call was refused", "log in")


PLAYS: Final[Mapping[str, Play]] = {
    "tools_call": calling(("add_numbers", {"a": 5, "b": 3})),
    "sse-retry": calling(("test_reconnection", {})),
    "elicitation-sep1034-client-defaults": calling(("test_client_elicitation_defaults", {})),
    "sep-2322-client-request-state": calling(
        ("test_mrtr_echo_state", {}),
        ("test_mrtr_no_state", {}),
        ("test_mrtr_unrelated", {}),
        ("test_mrtr_no_result_type", {}),
    ),
    "http-standard-headers": every_method,
    "http-custom-headers": named_calls,
    "http-invalid-tool-headers": every_tool,
    "json-schema-2020-12-preservation": schema_echoed,
    "auth/client-credentials-basic": with_secret,
    "auth/client-credentials-jwt": with_key,
    "auth/enterprise-managed-authorization": with_assertion,
}


# How the suite comes in.


class Door(socketserver.StreamRequestHandler):
    """Plays a scenario in this process, which was forked for it."""

    def handle(self) -> None:
        """Read what is to be played, play it, and tell how it went."""
        asked = json.loads(self.rfile.read())
        with open(self.wfile.fileno(), "w", closefd=False) as told, redirect_stderr(told):
            try:
                anyio.run(play, _scenario(asked["url"], asked["env"]))
                told.write("done\n")
            except Exception:  # noqa: BLE001  the suite shows it
                traceback.print_exc()


class House(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Forks for each scenario, for as long as who started it lives; a few are played at a time, and the others wait.

    The suite starts a hundred at once, and some of them look at the clock: none runs before it is its turn.
    """

    max_children = 8
    request_queue_size = 200

    def service_actions(self) -> None:
        """Look after the forked, and end with the parent, however that ends."""
        super().service_actions()
        if os.getppid() != PARENT:
            sys.exit()


def _scenario(url: str, env: Mapping[str, str]) -> Scenario:
    context = json.loads(env.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    return Scenario(name=env["MCP_CONFORMANCE_SCENARIO"], url=url, context=context)


async def _warm() -> None:
    """Let an agent call a tool, so that what is imported late is there before the first fork."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tool = make_tool(lambda a: a, name="s__warm", description="It returns what it is given.", parameters=schema)
    script = ScriptedModel(say("", call(tool.name, a="x")), say("done"))
    async with httpx2.AsyncClient(), Agent(script, tools=[tool]) as agent:
        await agent.run("go on")


def main(where: str) -> None:
    """Play one scenario, or all that come in at a socket."""
    if where.startswith("http"):
        anyio.run(play, _scenario(where, os.environ))
    else:
        anyio.run(_warm)
        with House(where, Door) as house:
            house.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
