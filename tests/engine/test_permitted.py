"""Permissions in a run: what is not allowed is not offered, and does not run when the model calls it anyway."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm import (
    Agent,
    ErrorType,
    Level,
    Limits,
    MisuseError,
    Outcome,
    Permissions,
    Rule,
    RunContext,
    Settings,
    Tool,
    tool,
)
from agentfsm.ports import Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, raw_call, say
from tests.support.checks import no_leases, results_of, sound


@pytest.fixture
async def store():
    """A store in memory: what is shown here does not depend on it."""
    made = MemoryStore()
    yield made
    await no_leases(made)


class Office:
    """A tool of each level, and one that declares nothing; they note what they did, and for whom."""

    def __init__(self) -> None:
        """Make the tools."""
        self.did: list[str] = []
        self.roles: list[tuple[str, ...]] = []
        self.tools: list[Tool[..., Any]] = [
            self._made("look", read_only=True),
            self._made("pay", permission="write"),
            self._made("purge", permission=Level.ADMIN),
            self._made("plain"),
        ]

    def _made(self, name: str, **options: Any) -> Tool[..., Any]:
        async def act(ctx: RunContext[Any], cents: int = 0) -> str:
            self.did.append(name)
            self.roles.append(ctx.roles)
            return f"{name} {cents}"

        return tool(name=name, **options)(act)

    def agent(self, *replies: object, **options: Any) -> Agent:
        """An agent with these tools, or some of them."""
        return Agent(ScriptedModel(*replies), tools=options.pop("tools", self.tools), **options)


def told(agent: Agent) -> list[list[str]]:
    """The names of the tools that the model was told of, request by request."""
    assert isinstance(agent.model, ScriptedModel)
    return [names_in(request) for request in agent.model.requests]


def names_in(request: Request) -> list[str]:
    """The names of the tools of a request."""
    return [each.name for each in request.tools]


ALL = ["look", "pay", "purge", "plain"]
CASES = {
    "nothing said": (None, ALL),
    "default": (Permissions(), ALL),
    "read": (Permissions(level="read"), ["look"]),
    "write": (Permissions(level="write"), ["look", "pay", "plain"]),
    "admin": (Permissions(level="admin"), ALL),
    "allow": (Permissions(allow=("look", "p*")), ["look", "pay", "purge", "plain"]),
    "allow one": (Permissions(allow=("pay",)), ["pay"]),
    "deny": (Permissions(deny=("pu*",)), ["look", "pay", "plain"]),
    "both": (Permissions(allow=("p*",), deny=("pay",)), ["purge", "plain"]),
    "level and allow": (Permissions(level="write", allow=("purge", "pay")), ["pay"]),
    "none": (Permissions(allow=()), []),
}


@pytest.mark.parametrize(("permissions", "allowed"), CASES.values(), ids=list(CASES))
async def test_what_is_not_allowed_is_neither_offered_nor_run(store, permissions, allowed):
    """The model is told of what is left, in the order of registration; what it calls beside is refused."""
    office = Office()
    replies = say("", *[call(name) for name in ALL]), "done"
    agent = office.agent(*replies, permissions=permissions, store=store)
    run = await agent.run("go")
    assert told(agent) == [allowed, allowed]
    assert office.did == allowed
    for name, result in zip(ALL, results_of(run.messages), strict=True):
        assert result.outcome is (Outcome.DONE if name in allowed else Outcome.FAILED)
        assert result.error_type is (None if name in allowed else ErrorType.NOT_PERMITTED)
        assert result.retryable is False
    await sound(agent, run)


async def test_a_tool_that_declares_nothing_counts_as_write(store):
    """Nobody has said that it changes nothing."""
    office = Office()
    agent = office.agent(say("", call("plain")), "done", permissions=Permissions(level=Level.READ), store=store)
    run = await agent.run("go")
    assert (office.did, told(agent)[0]) == ([], ["look"])
    assert "plain needs level write, and this run has read" in results_of(run.messages)[0].content


async def test_arguments_decide_call_by_call(store):
    """A tool that some calls may use is offered; each of them is judged by what it would do, defaults included."""
    office = Office()
    permissions = Permissions(
        allow=("look", Rule("pay", when=lambda a: a.cents <= 500)),
        deny=(Rule("pay", when=lambda a: a.cents == 13),),
    )
    calls = [call("pay", cents=cents) for cents in (500, 501, 13)] + [call("pay")]
    agent = office.agent(say("", *calls), "done", permissions=permissions, store=store)
    run = await agent.run("go")
    assert told(agent)[0] == ["look", "pay"]
    results = results_of(run.messages)
    assert [each.outcome for each in results] == [Outcome.DONE, Outcome.FAILED, Outcome.FAILED, Outcome.DONE]
    assert all("pay is not permitted with these arguments" in each.content for each in results[1:3])
    assert office.did == ["pay", "pay"]


async def test_a_rule_sees_the_arguments_that_the_tool_gets(store):
    """Validated: a text that the schema reads as a number is a number."""
    office = Office()
    permissions = Permissions(deny=(Rule("pay", when=lambda a: a.cents > 500),))
    agent = office.agent(say("", raw_call("pay", '{"cents": "501"}')), "done", permissions=permissions, store=store)
    await agent.run("go")
    assert office.did == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_read_only_call_does_not_slip_by_while_the_reply_streams(store, stream):
    """It starts early, and is asked about all the same."""
    office = Office()
    permissions = Permissions(deny=(Rule("look", when=lambda a: a.cents > 0),))
    calls = say("", call("look", cents=1), call("look"))
    settings = Settings(stream=stream)
    agent = office.agent(calls, "done", permissions=permissions, store=store, settings=settings)
    run = await agent.run("go")
    assert office.did == ["look"]
    assert [each.error_type for each in results_of(run.messages)] == [ErrorType.NOT_PERMITTED, None]
    await sound(agent, run)


# Roles

ROLES = Permissions(
    level="read",
    deny=("purge",),
    roles={"clerk": Permissions(level="write", allow=("look", "pay")), "chief": Permissions()},
)


@pytest.mark.parametrize(
    ("roles", "allowed"),
    [
        ((), ["look"]),
        (("guest",), []),
        (("clerk",), ["look", "pay"]),
        (("clerk", "guest"), ["look", "pay"]),
        (("chief",), ["look", "pay", "plain"]),
        (("chief", "clerk"), ["look", "pay", "plain"]),
    ],
    ids=str,
)
async def test_the_roles_of_the_run_decide(store, roles, allowed):
    """They are given at the start, kept in the journal, and told to the tools."""
    office = Office()
    replies = say("", *[call(name) for name in ALL]), "done"
    agent = office.agent(*replies, permissions=ROLES, store=store)
    run = await agent.run("go", roles=roles)
    assert told(agent) == [allowed, allowed]
    assert office.did == allowed
    assert set(office.roles) <= {tuple(roles)}
    await sound(agent, run)


@pytest.mark.parametrize("roles", ["clerk", [1]], ids=str)
def test_roles_are_several_names(roles):
    """A text is not taken for its letters, none of which is a role."""
    with pytest.raises(MisuseError, match=r"write roles=\["):
        Agent(ScriptedModel("done")).start("go", roles=roles)


async def test_two_runs_of_one_agent_have_the_roles_of_their_own(store):
    """What one may do is not remembered for the other."""
    office = Office()
    agent = office.agent(*["done"] * 3, permissions=ROLES, store=store)
    for roles in (("chief",), (), ("clerk",)):
        await agent.run("go", roles=roles)
    assert told(agent) == [["look", "pay", "plain"], ["look"], ["look", "pay"]]


async def test_roles_outlive_the_worker(store):
    """Whoever resumes the run is bound by the roles that it was started with."""
    office = Office()
    ask = tool(name="ask", requires_approval=True, read_only=True)(office.tools[0].function)
    permissions = Permissions(level="read", roles={"clerk": Permissions(level="write")})
    first = office.agent(say("", call("ask")), tools=[ask, *office.tools], permissions=permissions, store=store)
    run = await first.run("go", roles=["clerk"])
    await first.approve(run.id, "t1.0")
    other = office.agent(
        say("", call("pay"), call("purge")), "done", tools=[ask, *office.tools], permissions=permissions, store=store
    )
    done = await other.resume(run.id)
    assert (done.output, office.did[-1]) == ("done", "pay")
    assert set(told(other)[0]) == {"ask", "look", "pay", "plain"}
    assert done.header.roles == ("clerk",)


async def test_permissions_are_the_agents_that_drives(store):
    """A run that is resumed with narrower permissions is bound by those."""
    office = Office()
    first = office.agent(say("", call("pay"), call("purge")), store=store)
    run = first.start("go")
    while run.turn < 1:
        run = await first.step(run)
    other = office.agent("done", permissions=Permissions(level="write"), store=store)
    await other.resume(run.id)
    assert office.did == ["pay"]


async def test_sub_agents_inherit_the_roles(store):
    """The agent below asks its own rules about the caller's roles."""
    office = Office()
    below = office.agent(say("", call("pay"), call("purge")), "paid", permissions=ROLES, name="below")
    model = ScriptedModel(say("", call("below", query="pay")), "done")
    agent = Agent(model, tools=[below.as_tool()], store=store)
    run = await agent.run("go", roles=["clerk"])
    assert run.output == "done"
    assert (office.did, office.roles, told(below)[0]) == (["pay"], [("clerk",)], ["look", "pay"])
    child = await agent.load(f"{run.id}.t1.0")
    assert child.header.roles == ("clerk",)


@pytest.mark.parametrize(("level", "offered"), [("read", []), ("write", []), ("admin", ["below"])])
async def test_an_agent_as_a_tool_needs_the_level_of_its_tools(store, level, offered):
    """Whoever may not purge may not have it done by another agent either."""
    below = Office().agent("purged", name="below")
    model = ScriptedModel(say("", call("below", query="purge")), "done")
    agent = Agent(model, tools=[below.as_tool()], permissions=Permissions(level=level), store=store)
    run = await agent.run("go")
    assert told(agent)[0] == offered
    assert (results_of(run.messages)[0].outcome is Outcome.DONE) == bool(offered)


# What the engine brings along, and what may not leak


def long(office: Office) -> Tool[..., Any]:
    """A tool whose result is cut."""

    async def report() -> str:
        office.did.append("report")
        return "0123456789" * 1_000

    return tool(read_only=True, shown_bytes=100)(report)


@pytest.mark.parametrize(
    ("permissions", "may"),
    [
        (Permissions(level="read"), True),
        (Permissions(allow=("report", "read_result")), True),
        (Permissions(allow=("report",)), False),
    ],
    ids=["level", "named", "not named"],
)
async def test_a_result_that_was_shown_in_part_is_read_on_by_who_may(store, permissions, may):
    """The tool for that comes with the engine; it is offered exactly where a call of it would run."""
    office = Office()
    replies = say("", call("report")), say("", call("read_result", result="t1.0", start=9_990)), "done"
    agent = office.agent(*replies, tools=[long(office)], permissions=permissions, store=store)
    run = await agent.run("go")
    assert told(agent)[1] == (["report", "read_result"] if may else ["report"])
    result = results_of(run.messages)[1]
    assert (result.content == "0123456789") is may
    assert result.error_type is (None if may else ErrorType.NOT_PERMITTED)


async def test_a_tool_of_that_name_of_the_users_own_takes_its_place(store):
    """The model is told of one tool of a name: providers refuse a request with two."""
    office = Office()

    @tool(read_only=True)
    async def read_result(page: int) -> str:
        return f"page {page}"

    replies = say("", call("report")), say("", call("read_result", page=3)), "done"
    agent = office.agent(*replies, tools=[long(office), read_result], store=store)
    run = await agent.run("go")
    assert results_of(run.messages)[1].content == "page 3"
    assert told(agent)[1] == ["report", "read_result"]


async def test_the_names_of_what_is_not_allowed_do_not_leak(store):
    """A model that calls a tool that does not exist is told of those that it may use, and of no other."""
    office = Office()
    hidden = tool(name="vault", enabled=lambda _ctx: False)(office.tools[0].function)
    permissions = Permissions(level="read", deny=(Rule("pay"),))
    model = ScriptedModel(say("", call("purg"), call("valt"), call("nothing_like_it")), "done")
    agent = Agent(model, tools=[*office.tools, hidden], permissions=permissions, store=store)
    run = await agent.run("go")
    for result in results_of(run.messages):
        assert result.error_type is ErrorType.UNKNOWN_TOOL
        assert "look" in result.content
        for name in ("purge", "pay", "vault", "plain"):
            assert name not in result.content


@pytest.mark.parametrize("arguments", ['{"cents": "x"}', "[]", '{"cents": 1'])
async def test_what_is_not_allowed_is_refused_whatever_its_arguments(store, arguments):
    """A model that is told to mend its arguments would be led on, and learn what it may not use."""
    office = Office()
    model = ScriptedModel(say("", raw_call("purge", arguments)), "done")
    agent = Agent(model, tools=office.tools, permissions=Permissions(level="write"), store=store)
    run = await agent.run("go")
    (result,) = results_of(run.messages)
    assert (result.error_type, result.retryable) == (ErrorType.NOT_PERMITTED, False)
    assert "Parameters" not in result.content


async def test_three_refused_turns_are_three_error_turns(store):
    """A model that insists on what it may not do is stopped."""
    office = Office()
    replies = [say("", call("purge", cents=n)) for n in range(3)]
    agent = office.agent(*replies, permissions=Permissions(level="write"), limits=Limits(errors=3), store=store)
    run = await agent.run("go")
    assert run.stop_reason == "too_many_errors"
    assert office.did == []
