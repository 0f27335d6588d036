"""The answer cache over processes: each agent has a store of its own on one database."""

import anyio

from agentfsm import Agent, AnswerCache
from agentfsm.testing import FunctionModel

QUESTION = "When does the office open?"


class Office(FunctionModel):
    """Takes a moment to answer, so that others ask meanwhile, and counts its answers."""

    name = "office"

    def __init__(self, answers):
        async def answer(_):
            await anyio.sleep(0.05)
            answers.append("9 to 17")
            return answers[-1]

        super().__init__(answer)


async def test_one_run_answers_for_all_that_ask_at_once(place):
    """The others wait for it, and take its answer from the database; so does one that comes later."""
    answers, runs = [], []

    async def ask(agent):
        runs.append(await agent.run(QUESTION, user="ann"))

    agents = [Agent(Office(answers), store=place.make(), answer_cache=AnswerCache()) for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for agent in agents * 2:
            tasks.start_soon(ask, agent)
    await ask(agents[-1])
    assert {run.output for run in runs} == {"9 to 17"}
    [source] = [run for run in runs if run.answered_from is None]
    assert {run.answered_from.run_id for run in runs if run is not source} == {source.id}
    assert len(answers) == 1
    stranger = await agents[0].run(QUESTION, user="bob")
    assert stranger.answered_from is None
