"""Each way in which a person can shape a call: runs that wait for the approval of a payment."""

from __future__ import annotations

from agentfsm import Agent, InputRequired, OutcomeUnknownError, Question, RunContext, Runs, ask_user, tool
from agentfsm.core import events as e
from agentfsm.testing import ScriptedModel, call, say

PAYMENT = call("pay", iban="DE1", cents=5)
ASK = call("ask_user", question="To whom?")


@tool(requires_approval=True)
async def pay(iban: str, cents: int) -> str:
    """Pay an amount."""
    return f"paid {cents} to {iban}"


@tool(read_only=True)
async def look(at: str) -> str:
    """Look at a thing."""
    return at


@tool(idempotent=True)
async def ask(ctx: RunContext, thing: str) -> str:
    """Ask a person during the call."""
    if "iban" not in ctx.answers:
        fields = {"type": "object", "properties": {"to": {"type": "string"}}}
        raise InputRequired(Question(key="iban", message=f"To whom is {thing}?", schema=fields))
    return str(ctx.answers["iban"])


@tool
async def order(thing: str) -> str:
    """Order a thing, with an unknown outcome."""
    raise OutcomeUnknownError(f"the line broke while {thing} was ordered")


def shop(store, *replies, tools=()):
    """Return an agent that makes these calls, and then pays."""
    script = ScriptedModel(*[say("", each) for each in replies], say("", PAYMENT), say("done"))
    return Agent(script, tools=[pay, look, ask, order, ask_user, *tools], name="shop", store=store)


async def by_prompt(store, person):
    return await shop(store).run("pay", user=person)


async def by_input(store, person):
    agent = shop(store, call("look", at="mail"))
    run = await agent.step(agent.start("pay", user="ann"))
    await agent.send(run.id, "to DE1", by=person)
    return await agent.resume(run.id)


async def by_answer(store, person):
    agent = shop(store, ASK)
    run = await agent.run("pay", user="ann")
    await agent.answer(run.id, run.pending[0].call_id, "DE1", by=person)
    return await agent.resume(run.id)


async def by_answer_to_a_tool(store, person):
    agent = shop(store, call("ask", thing="it"))
    run = await agent.run("pay", user="ann")
    await agent.answer(run.id, run.pending[0].call_id, "DE1", by=person)
    return await agent.resume(run.id)


async def by_reason_of_a_rejection(store, person):
    agent = shop(store, call("pay", iban="DE0", cents=5))
    run = await agent.run("pay", user="ann")
    await agent.reject(run.id, run.pending[0].call_id, message="to DE1 instead", by=person)
    return await agent.resume(run.id)


async def by_edit_of_an_earlier_call(store, person):
    agent = shop(store, call("pay", iban="DE0", cents=5))
    run = await agent.run("pay", user="ann")
    await agent.approve(run.id, run.pending[0].call_id, arguments={"iban": "DE1", "cents": 1}, by=person)
    return await agent.resume(run.id)


async def by_edit_of_the_call(store, person):
    agent = shop(store)
    run = await agent.run("pay", user="ann")
    runs = Runs(store, four_eyes=True)
    await runs.approve(run.id, run.pending[0].call_id, arguments={"iban": "FE1", "cents": 9}, by=person)
    return await agent.resume(run.id)


async def by_settled_outcome(store, person):
    agent = shop(store, call("order", thing="a book"))
    run = await agent.run("pay", user="ann")
    await agent.settle(run.id, run.pending[0].call_id, result="ordered, pay DE1", by=person)
    return await agent.resume(run.id)


async def by_fork(store, person):
    agent = shop(store, call("look", at="mail"))
    first = await agent.run("pay", user="ann")
    history = await agent.history(first.id)
    at = next(number for number, each in enumerate(history, 1) if isinstance(each, e.Continued))
    fork = await agent.fork(first.id, at=at, by=person)
    return await shop(store).resume(fork.id)


async def by_earlier_run_of_the_session(store, person):
    script = ScriptedModel(say("", ASK), say("noted"), say("", PAYMENT), say("done"))
    agent = Agent(script, tools=[pay, ask_user], name="shop", store=store)
    first = await agent.run("remember", user="ann", session=f"of {person}")
    await agent.answer(first.id, first.pending[0].call_id, "DE1", by=person)
    await agent.resume(first.id)
    return await agent.run("pay", user="ann", session=f"of {person}")


def build_clerk(*replies):
    script = ScriptedModel(*[say("", each) for each in replies], say("to DE1"))
    return Agent(script, tools=[pay, ask_user], name="clerk")


async def by_answer_below(store, person):
    clerk = build_clerk(ASK).as_tool(timeout_s=600)
    agent = shop(store, call("clerk", query="To whom?"), tools=[clerk])
    run = await agent.run("pay", user="ann")
    [item] = run.pending
    await agent.answer(item.run_id, item.call_id, "DE1", by=person)
    return await agent.resume(run.id)


async def by_reason_of_a_cancelled_agent(store, person):
    clerk = build_clerk(ASK).as_tool(timeout_s=600)
    agent = shop(store, call("clerk", query="To whom?"), tools=[clerk])
    run = await agent.run("pay", user="ann")
    await agent.cancel(run.pending[0].run_id, by=person, message="it is DE1: pay that")
    return await agent.resume(run.id)


async def by_answer_above(store, person):
    agent = shop(store, ASK, call("clerk", query="Pay DE1"), tools=[build_clerk(PAYMENT).as_tool(timeout_s=600)])
    run = await agent.run("pay", user="ann")
    await agent.answer(run.id, run.pending[0].call_id, "DE1", by=person)
    return await agent.resume(run.id)


async def by_answer_above_the_forked_run(store, person):
    run = await by_answer_above(store, person)
    clerk = build_clerk(PAYMENT).with_(store=store, name="shop")
    fork = await clerk.fork(run.pending[0].run_id, at=1)
    return await clerk.resume(fork.id)


async def by_answer_below_the_forked_run(store, person):
    run = await by_answer_below(store, person)
    history = await Runs(store).history(run.id)
    at = next(number for number, event in enumerate(history, 1) if isinstance(event, e.Continued))
    fork = await shop(store).fork(run.id, at=at)
    return await shop(store).resume(fork.id)


async def by_answer_in_a_run_of_a_tool(store, person):
    clerk = build_clerk(ASK).with_(store=store)

    @tool(idempotent=True)
    async def inquire(thing: str) -> str:
        """Let an agent find out."""
        run = await clerk.run(thing)
        if run.is_waiting:
            [item] = run.pending
            await clerk.answer(run.id, item.call_id, "DE1", by=person)
            run = await clerk.resume(run.id)
        return run.answer

    return await shop(store, call("inquire", thing="To whom?"), tools=[inquire]).run("pay", user="ann")


async def by_reason_of_a_cancelled_run_of_a_tool(store, person):
    clerk = build_clerk(ASK).with_(store=store)

    @tool(idempotent=True)
    async def inquire(thing: str) -> str:
        """Let an agent find out."""
        run = await clerk.run(thing)
        await clerk.cancel(run.id, by=person, message="it is DE1: pay that")
        return (await clerk.load(run.id)).stop_message

    return await shop(store, call("inquire", thing="To whom?"), tools=[inquire]).run("pay", user="ann")


WAYS = (
    by_prompt,
    by_input,
    by_answer,
    by_answer_to_a_tool,
    by_reason_of_a_rejection,
    by_edit_of_an_earlier_call,
    by_edit_of_the_call,
    by_settled_outcome,
    by_fork,
    by_earlier_run_of_the_session,
    by_answer_below,
    by_reason_of_a_cancelled_agent,
    by_reason_of_a_cancelled_run_of_a_tool,
    by_answer_above,
    by_answer_above_the_forked_run,
    by_answer_below_the_forked_run,
    by_answer_in_a_run_of_a_tool,
)
