"""Flows: agents whose plan a programmer has written, and whose model is never asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

import attrs

from agentfsm.agents.agent import Agent
from agentfsm.agents.agent_starts import StartOptions
from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import JSON, ErrorType, Outcome
from agentfsm.flow.agent_steps import make_child_step
from agentfsm.flow.child_flows import NoModel, check_inputs, write_inputs
from agentfsm.flow.flow_plan import FlowPlan, StepStatus, find_results
from agentfsm.flow.step_types import select_types
from agentfsm.flow.steps import Join, Step
from agentfsm.ports.guards import find_order_flaws
from agentfsm.tools.run_context import ToolReturn

if TYPE_CHECKING:
    from agentfsm.agents.runs import Prompt
    from agentfsm.core.pending import Elicit
    from agentfsm.core.run import Run

# Fields of an agent that the steps determine.
_DERIVED: Final = ("model", "tools", "planner", "claims")


class Flow(Agent[Any]):
    """Steps in an order that a program declares: an agent whose plan is given, and whose model is never asked.

    A run of a flow is a run like any other: `run`, `submit`, `worker`, `resume`, `approve` and all other methods of
    `Agent` apply. The prompt is a mapping of the flow's inputs. The answer is a JSON object with the results of the
    steps that no other step depends on.

    Args:
        steps: The steps, in any order, at least one.
        name: Name of the flow.
        **options: Further fields of `Agent`: `store`, `limits`, `permissions`, `guards`, `watch`, ... By default,
            `limits` allow for the time limits of all steps together, and for two calls of each.

    Raises:
        MisuseError: if two steps share a name, steps depend on each other in a circle or on unknown steps, a step takes
            the result of a step that it does not depend on, the type hints of a result or an input contradict each
            other, the steps break a rule of `guards` in any order, or an option is invalid.
    """

    __slots__ = ()

    def __init__(self, steps: Iterable[Step], *, name: str = "flow", **options: Any) -> None:
        if refused := sorted(options.keys() & set(_DERIVED)):
            raise MisuseError(f"the steps of a flow determine its {refused[0]}: leave out {refused[0]}=")
        planner = FlowPlan(tuple(steps))
        super().__init__(
            NoModel(),
            name=name,
            tools=planner.list_tools(),
            planner=planner,
            limits=planner.build_limits(options.pop("limits", None)),
            **options,
        )
        if flaws := find_order_flaws(self.guards, planner.list_planned_calls()) if self.guards else ():
            raise MisuseError(f"the steps of the flow {name!r} cannot be carried out: {'; '.join(flaws)}")

    def __repr__(self) -> str:
        return f"<Flow {self.name}, steps: {', '.join(each.name for each in self.ordered_steps)}>"

    @property
    def ordered_steps(self) -> tuple[Step, ...]:
        """The steps, in an order in which each depends only on earlier ones."""
        return self._plan.steps

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that a run needs."""
        return self._plan.inputs

    @property
    def input_schema(self) -> Mapping[str, JSON]:
        """JSON Schema of the inputs, of type "object", from the type hints of the steps that take them.

        An input without a hint takes any value. `start`, `run` and `submit` refuse inputs that do not fit.
        """
        return self._plan.input_schema

    @property
    def _plan(self) -> FlowPlan:
        assert isinstance(self.planner, FlowPlan)  # set by __init__  # noqa: S101
        return self.planner

    def start(self, prompt: Prompt | Mapping[str, Any], **start: Unpack[StartOptions]) -> Run[Any]:
        """Begin a run, without I/O. See `Agent.start`.

        Args:
            prompt: The inputs by name, JSON values; also as the text of a JSON object.
            **start: As in `Agent.start`.

        Raises:
            MisuseError: if an input is missing or unknown, is not JSON, or does not fit the type hints of the steps.
        """
        return super().start(self._plan.write_inputs(prompt), **start)

    async def run(
        self,
        prompt: Prompt | Mapping[str, Any],
        *,
        deps: Any = None,
        elicit: Elicit | None = None,
        **start: Unpack[StartOptions],
    ) -> Run[Any]:
        """Start a run and finish it, as far as it goes without a person. See `start` and `Agent.run`."""
        return await super().run(self._plan.write_inputs(prompt), deps=deps, elicit=elicit, **start)

    async def submit(
        self, prompt_or_run: Prompt | Mapping[str, Any] | Run[Any], *, deps: Any = None, **start: Unpack[StartOptions]
    ) -> Run[Any]:
        """Create a run in the store for a worker to execute. See `start` and `Agent.submit`."""
        if isinstance(prompt_or_run, Mapping):
            prompt_or_run = self._plan.write_inputs(prompt_or_run)
        return await super().submit(prompt_or_run, deps=deps, **start)

    async def fork(self, run_id: str, *, prompt: Prompt | Mapping[str, Any] | None = None, **options: Any) -> Run[Any]:
        """Create a run that begins with the first events of another. See `Agent.fork`; `prompt` has other inputs."""
        written = None if prompt is None else self._plan.write_inputs(prompt)
        return await super().fork(run_id, prompt=written, **options)

    def as_step(
        self,
        *,
        name: str | None = None,
        depends_on: Iterable[str | Step] = (),
        when: Callable[..., bool] | None = None,
        join: Join = "all_success",
        timeout_s: float | None = None,
        compensate: Callable[..., Any] | Step | None = None,
        **options: Any,
    ) -> Step:
        """Make a step of another flow. Its inputs are taken by name, as the parameters of a function are.

        The work is a child run, with its own journal. The result is its answer, a JSON object.

        Args:
            name: Name of the step; by default that of the flow.
            depends_on: As in `agentfsm.flow.step`.
            when: As in `agentfsm.flow.step`.
            join: As in `agentfsm.flow.step`.
            timeout_s: Seconds for the step, above 0. None: `limits.seconds` of this flow.
            compensate: As in `agentfsm.flow.step`. The compensations of this flow run only if it fails itself.
            **options: Further options of `as_tool`.

        Raises:
            MisuseError: if an option is invalid.
        """
        names = self.inputs, self._plan.optional_inputs
        made = make_child_step(
            self,
            name=name or self.name,
            names=names,
            write_prompt=write_inputs(names),
            check_arguments=self._check_arguments,
            read_result=lambda _, found: found,
            order={"depends_on": depends_on, "when": when, "join": join},
            timeout_s=self.limits.seconds if timeout_s is None else timeout_s,
            compensate=compensate,
            options=options,
        )
        return attrs.evolve(
            made,
            calls=1 + sum(each.calls for each in self.ordered_steps),
            types=select_types([types for _, types in self._plan.types.takers], {*names[0], *names[1]}),
            result_hint=dict[str, Any] if self.output_type is None else Any,
        )

    def _check_arguments(self, arguments: Mapping[str, Any]) -> ToolReturn | None:
        """Return the result of a step of another flow whose arguments cannot be the inputs of this one."""
        flaw = self._plan.types.find_flaw(arguments)
        if flaw is None:
            return check_inputs(arguments)
        return ToolReturn(
            outcome=Outcome.FAILED, content=f"the flow was not begun: {flaw}", error_type=ErrorType.ARGUMENTS
        )

    def statuses(self, run: Run[Any]) -> dict[str, StepStatus]:
        """Return the status of each step in a run of this flow, by name."""
        return self._plan.find_statuses(run)

    def results(self, run: Run[Any]) -> dict[str, JSON]:
        """Return the results of the steps that have succeeded in a run of this flow, by name."""
        return find_results(run)

    def with_(self, **changes: Any) -> Flow:
        """Return a variant of the flow with other fields, as `flow.with_(store=store)`. `steps` is one of them."""
        fields = {
            each.name: getattr(self, each.name)
            for each in attrs.fields(Agent)
            if each.init and each.name not in _DERIVED
        }
        return Flow(**{"steps": self.ordered_steps, **fields, **changes})
