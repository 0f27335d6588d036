"""A step for each item of a list: a child run whose plan has a step for each item.

The list is known only when the step starts, so the plan with its items is an event of the journal of the child run, and
each item is a call of its own there: after a crash, the items without a result are the only ones that run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Optional

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.events import PlanKind
from agentfsm.core.messages import JSON, ErrorType, Outcome
from agentfsm.core.plans import (
    Compensation,
    Plan,
    PlanProgress,
    PlanStep,
    build_compensations,
    find_step_number,
    is_skipped,
    read_content,
)
from agentfsm.core.validation import FUNCTION, STRING, ValueRule
from agentfsm.flow.agent_steps import check_json, make_child_step
from agentfsm.flow.child_flows import REPEATED_TIMEOUT_S, build_repeating_agent, check_inputs, write_inputs
from agentfsm.flow.flow_plan import add_compensations, find_steps, has_outcome, is_failure, read_inputs, shorten_reason
from agentfsm.flow.step_types import ParameterTypes, build_list_hint
from agentfsm.flow.steps import Condition, Names, Step, check_options, join_names, log
from agentfsm.ports.policies import PlanAsk, PlanEnd, PlanMaker, PlanRequest
from agentfsm.tools.run_context import RunContext, ToolReturn

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolResult
    from agentfsm.core.run import Run

# Called with types known only at run time, which a type checker cannot follow.
_LIST: Any = list
_OPTIONAL: Any = Optional
# Items at once: as many as calls of a run by default.
EACH_PARALLEL: Final = 20
# Items of a list by default, and at most: a call of ten thousand items is still one event of the journal.
EACH_ITEMS: Final = 1_000
MAX_ITEMS: Final = 10_000
# Failed items that the message of the step names.
_NAMED_ITEMS: Final = 5
# Characters of the reason why an item failed, in that message.
_REASON_CHARS: Final = 160
_ITEMS: Final = ValueRule(
    fits=lambda value: type(value) is int and 1 <= value <= MAX_ITEMS, wanted=f"a whole number from 1 to {MAX_ITEMS:,}"
)
_OVER: Final = ValueRule(fits=lambda value: isinstance(value, str | Step), wanted="a step, or the name of an input")


def each(
    step: Step,
    over: str | Step,
    *,
    parallel: int = EACH_PARALLEL,
    key: Callable[[Any], object] | None = None,
    item: str | None = None,
    name: str | None = None,
    depends_on: Iterable[str | Step] = (),
    when: Callable[..., bool] | None = None,
    fallback: Any = attrs.NOTHING,
    max_items: int = EACH_ITEMS,
    timeout_s: float = REPEATED_TIMEOUT_S,
    **options: Any,
) -> Step:
    """Make a step that carries out another step for each item of a list.

    The result is the list of the results, in the order of the items; that of an item whose step was skipped is None.
    Each item is a call of its own in a child run, with the retries, keys, approvals and rules after a crash of the
    step. The first parameter of the step takes the item, and the others take results and inputs by name.

    If items fail, the others still run. Then the step fails, with the keys of the items in its message, or the failed
    items have the fallback as their result. If the step has a `compensate`, it undoes the items that have succeeded,
    also if a later step of the flow fails.

    Args:
        step: The step for one item. `depends_on`, `join` and `when` are its own; it is not listed in the flow itself.
        over: The list: a step whose result it is, or the name of a step or an input. A step comes before this
            one. A list whose step was skipped has no items.
        parallel: Maximum of items at once, 1 or more. Default 20.
        key: Function of an item that returns its key, which messages name, such as an id; as text, it has to be unique
            in the list. None: the position from 0.
        item: The parameter of the step that takes the item; by default the first.
        name: Name of the step in the flow, and of its result, the list, for other steps; by default that of `step`. A
            compensation of `step` takes the result of its item by the name of `step`.
        depends_on: Further steps, besides `over` and those that `step` depends on.
        when: Function of results and inputs, as in `step`, on which the whole step depends.
        fallback: JSON value that is the result of an item that has failed. The log names the items. Without it, failed
            items fail the step.
        max_items: Maximum of items, from 1 to 10,000. A longer list fails the step before anything runs. Default 1,000.
        timeout_s: Seconds of active time for all items together, above 0. Default 3,600.
        **options: Further options of `Agent.as_tool`, such as `requires_approval` for the whole list.

    Raises:
        MisuseError: if an option is invalid, or does not fit the step.
    """
    if not isinstance(step, Step):
        raise MisuseError(f"each({step!r}): give a step, made with @step, agent_step(...), until(...) or as_step()")
    title, source = name or step.name, over.name if isinstance(over, Step) else over
    check_options(title, _OVER, over=over)
    check_options(title, FUNCTION.or_none(), key=key)
    check_options(title, STRING.or_none(), item=item, name=name)
    check_options(title, _ITEMS, max_items=max_items)
    taken = _find_item_parameter(step, source, item)
    if fallback is not attrs.NOTHING:
        check_json(title, fallback=fallback)
        if step.compensate is not None:
            undo = step.compensate.name
            raise MisuseError(f"step {title!r}: with a fallback=, it is unknown which items {undo!r} has to undo")
    plan = EachPlan(title=title, step=step, over=source, item=taken, key=key, fallback=fallback, max_items=max_items)
    undo_step = step.compensate
    return _make_each_step(
        plan,
        depends_on=[*([over] if isinstance(over, Step) else []), *step.depends_on, *depends_on],
        when=when,
        parallel=parallel,
        timeout_s=timeout_s,
        options=options,
        compensate=None
        if undo_step is None
        else _make_each_step(
            EachPlan(
                title=f"compensate_{title}",
                step=undo_step,
                over=source,
                item=taken,
                key=key,
                max_items=max_items,
                fallback=attrs.NOTHING,
                undoes=step,
                results=title,
            ),
            parallel=parallel,
            timeout_s=timeout_s,
        ),
    )


def _find_item_parameter(step: Step, over: str, item: str | None) -> str:
    """Return the parameter of a step that takes the item.

    Raises:
        MisuseError: if there is none, or another one takes the list.
    """
    found = item if item is not None else next(iter(step.names), None)
    if found is None or found not in step.names:
        raise MisuseError(
            f"step {step.name!r} has no parameter {found!r} for the item: its parameters are "
            f"{', '.join(step.names) or 'none'}"
        )
    if over in step.names and over != found:
        raise MisuseError(f"step {step.name!r} takes the whole list {over!r} for each item: take the item only")
    return found


def _make_each_step(
    plan: EachPlan,
    *,
    parallel: int,
    timeout_s: float,
    depends_on: Iterable[str | Step] = (),
    when: Callable[..., bool] | None = None,
    options: Mapping[str, Any] | None = None,
    compensate: Step | None = None,
) -> Step:
    agent = build_repeating_agent(
        plan.title, plan, plan.steps, times=plan.max_items, parallel=parallel, timeout_s=timeout_s
    )
    made = make_child_step(
        agent,
        name=plan.title,
        names=plan.names,
        write_prompt=write_inputs(plan.names),
        check_arguments=plan.check_items,
        read_result=plan.read_result,
        order={"depends_on": depends_on, "when": when, "join": plan.step.join},
        timeout_s=timeout_s,
        compensate=compensate,
        options=options or {},
    )
    return attrs.evolve(
        made,
        over=(plan.over,),
        calls=1 + plan.max_items * sum(each.calls for each in plan.steps),
        types=plan.types,
        result_hint=_LIST[_OPTIONAL[plan.step.result_hint]] if plan.fallback is attrs.NOTHING else list[Any],
        description=f"for each of {plan.over}" + ("" if plan.step.description == "" else f", {plan.step.description}"),
    )


@attrs.define(eq=False, repr=False, kw_only=True)
class EachPlan(PlanMaker):
    """Plans a step for each item of a list, and after a failure a compensation for each item that has succeeded."""

    title: str
    """Name of the step in the flow."""

    step: Step
    """The step for one item."""

    over: str
    """Name of the list among the inputs of the child run."""

    item: str
    """The parameter of the step that takes the item."""

    key: Callable[[Any], object] | None
    max_items: int
    fallback: Any
    """Result of an item that has failed; `attrs.NOTHING` if the step fails then."""

    undoes: Step | None = None
    """The step whose results the step undoes; None if it undoes nothing."""

    results: str = ""
    """Name of the list of these results among the inputs; empty if there is none."""

    fixed = True
    maker = "each"
    replans = 1

    def __attrs_post_init__(self) -> None:
        """Bound the plan."""
        self.max_steps: int = self.max_items

    @property
    def names(self) -> Names:
        """Names of the parameters of the step in the flow: the lists, and what all items share."""
        lists = (self.over, *([self.results] if self.results else []))
        own = {self.item, *lists, *[step.name for step in (self.step, self.undoes) if step is not None]}
        used = [(step.required, step.optional) for step in self.steps]
        used += [] if self.undoes is None else [Condition(self.undoes.when).names]
        required, optional = join_names((lists, ()), *used)
        return tuple([name for name in required if name in lists or name not in own]), tuple(
            [name for name in optional if name not in own]
        )

    @property
    def types(self) -> tuple[ParameterTypes, ...]:
        """Type hints of the parameters of the step in the flow."""
        lists = {self.item: self.over} | ({self.undoes.name: self.results} if self.undoes else {})
        own = {*lists, self.step.name}
        found: list[dict[str, Any]] = [{self.over: build_list_hint(Any)}]
        for types in self.step.types:
            shared = {name: hint for name, hint in types.hints.items() if name not in own}
            # With a fallback, an item that does not fit has it.
            taken = lists.items() if self.fallback is attrs.NOTHING else ()
            lists_of = {name: build_list_hint(types.hints[each]) for each, name in taken if each in types.hints}
            found.append(shared | lists_of)
        if any(self.over in each for each in found[1:]):
            del found[0]
        return tuple(map(ParameterTypes, found))

    @property
    def steps(self) -> list[Step]:
        """The steps that the plans may have: that of an item, and its compensation."""
        return [self.step, *([] if self.step.compensate is None else [self.step.compensate])]

    def wants(self, run: Run) -> bool:  # noqa: ARG002  the list is given
        """Return True."""
        return True

    # The list.

    def check_items(self, arguments: Mapping[str, Any]) -> ToolReturn | None:
        """Return the result of the step if no item has to run: the list is empty, or cannot be used."""
        items = arguments[self.over]
        flaw = None if items is None else self._find_flaw(items)  # None: the step of the list was skipped
        if flaw is not None:
            return ToolReturn(outcome=Outcome.FAILED, content=flaw, error_type=ErrorType.ARGUMENTS)
        if not items or not self._list_numbers(arguments):
            return ToolReturn(outcome=Outcome.DONE, content="[]")
        return check_inputs(arguments)

    def _find_flaw(self, items: Any) -> str | None:
        if not isinstance(items, list):
            return f"{self.over} is not a list of items, but {json.dumps(items, ensure_ascii=False)[:80]}"
        if self.undoes is not None:  # a list that was carried out is undone, whatever the program says of it now
            return None
        if len(items) > self.max_items:
            return f"{self.over} has {len(items):,} items, and max_items= allows {self.max_items:,}"
        try:
            keys = self._list_keys(items)
        except Exception as error:  # noqa: BLE001  a function of the user's
            return f"the key of an item of {self.over} could not be determined: {type(error).__name__}: {error}"
        places: dict[str, int] = {}
        for place, key in enumerate(keys):
            if key in places:
                return (
                    f"two items of {self.over} have the key {key!r}, at the positions {places[key]} and {place}: "
                    "remove one, or give key= that tells them apart"
                )
            places[key] = place
        return None

    def _list_keys(self, items: list[Any]) -> list[str]:
        return [str(place) if self.key is None else str(self.key(item)) for place, item in enumerate(items)]

    # The plans.

    async def plan(self, request: PlanRequest, ask: PlanAsk) -> Plan | None:  # noqa: ARG002  no model is asked
        """Return a step for each item; after a failure, the compensations of the items that have succeeded."""
        values = read_inputs(request.run)
        if request.failure:
            return build_compensations(self._complete(request.run, values), in_order=False)
        return Plan(steps=tuple([self._plan_item(values, number) for number in self._list_numbers(values)]))

    def _complete(self, run: Run, values: Mapping[str, Any]) -> PlanProgress:
        return add_compensations(run.plan or PlanProgress(), lambda step: self._plan_item(values, step.id).compensation)

    def _plan_item(self, values: Mapping[str, Any], number: int) -> PlanStep:
        """Return the step of an item, with the call that undoes it."""
        # The inputs of an item: itself, what all items share, and the result that the step undoes.
        known = {**values, self.item: values[self.over][number - 1]}
        if self.undoes is not None:
            known[self.undoes.name] = values[self.results][number - 1]
        compensation = None
        if (undo := self.step.compensate) is not None:
            found: dict[str, JSON] = {**known, self.step.name: {"$step": number}}
            arguments = {name: found[name] for name in undo.names if name in found}
            compensation = Compensation(tool=undo.name, arguments=arguments)
        return PlanStep(
            id=number,
            tool=self.step.name,
            arguments={name: known[name] for name in self.step.names if name in known},
            compensation=compensation,
        )

    def _list_numbers(self, values: Mapping[str, Any]) -> list[int]:
        """Return the numbers of the items that have a step, from 1: all but those whose step to undo was skipped."""
        items = list(enumerate(values[self.over], 1))
        if self.undoes is None:
            return [number for number, _ in items]
        condition, results = Condition(self.undoes.when), values.get(self.results)
        return [
            number
            for number, item in items
            # A result shows that the item was carried out. Without one, it was skipped, or has none.
            if (isinstance(results, list) and results[number - 1] is not None)
            or condition.holds({**values, self.item: item})
        ]

    # The end.

    def conclude(self, run: Run) -> PlanEnd | None:
        """Return the results, or the failure of the items; None if compensations come first."""
        values = read_inputs(run)
        items: Any = values[self.over]
        progress = self._complete(run, values)
        steps = () if progress.forward is None else progress.forward.steps
        ended = {find_step_number(entry.call.id) or 0: entry.result for entry in find_steps(run) if entry.result}
        try:
            keys = self._list_keys(items)
        except Exception:  # noqa: BLE001  the function has changed since the run began
            keys = list(map(str, range(len(items))))
        unstarted = [step.id for step in steps if step.id not in ended]
        if unstarted or not steps:
            return PlanEnd(failure=f"{len(unstarted) or len(items):,} of {len(items):,} items did not run")
        failed = {number: result for number, result in ended.items() if is_failure(result)}
        if failed and self.fallback is attrs.NOTHING:
            if progress.kind is PlanKind.FORWARD and build_compensations(progress, in_order=False) is not None:
                return None
            return PlanEnd(failure=self._describe(run, len(items), keys, failed))
        answer = {
            "results": [self._read_item(ended.get(number)) for number in range(1, len(items) + 1)],
            "fallback": {
                keys[number - 1]: shorten_reason(result, _REASON_CHARS) if number in failed else "that of its step"
                for number, result in sorted(ended.items())
                if number in failed or result.error_type is ErrorType.FALLBACK
            },
        }
        return PlanEnd(answer=json.dumps(answer, ensure_ascii=False))

    def _read_item(self, result: ToolResult | None) -> JSON:
        if result is None or is_skipped(result):
            return None
        value: JSON = self.fallback if is_failure(result) else read_content(result.content)
        return value

    def _describe(self, run: Run, count: int, keys: list[str], failed: Mapping[int, ToolResult]) -> str:
        first = [
            f"{keys[number - 1]} ({shorten_reason(failed[number], _REASON_CHARS)})"
            for number in sorted(failed)[:_NAMED_ITEMS]
        ]
        more = f" and {len(failed) - _NAMED_ITEMS:,} more" if len(failed) > _NAMED_ITEMS else ""
        text = f"{len(failed):,} of {count:,} items failed: {', '.join(first)}{more}"
        undone = [entry for entry in find_steps(run, compensations=True) if entry.result is not None]
        if undone:
            done = len([entry for entry in undone if has_outcome(entry, Outcome.DONE)])
            text += f"; compensated: {done:,} of {len(undone):,} items that had succeeded"
        return text

    def read_result(self, ctx: RunContext[Any], found: ToolReturn) -> ToolReturn:
        """Return the result of the step from that of its child run, and log which items have a fallback."""
        if found.outcome is not Outcome.DONE:
            return found
        answer = json.loads(found.content)
        for key, reason in answer["fallback"].items():
            log.warning("item %s of step %s of run %s has its fallback: %s", key, self.title, ctx.run_id, reason)
        kind = ErrorType.FALLBACK if answer["fallback"] else None
        return attrs.evolve(found, content=json.dumps(answer["results"], ensure_ascii=False), error_type=kind)
