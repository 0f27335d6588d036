"""How an agent begins runs: `start` from a prompt, `submit` for a worker, `fork` from the journal of another run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from os import urandom
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypedDict, TypeVar, Unpack

import attrs

from agentfsm.agents.agent_fields import AgentFields
from agentfsm.agents.validation import (
    as_messages,
    as_roles,
    as_text,
    check_identity,
    check_new_id,
    check_start_options,
    to_plain_json,
    warn_once,
)
from agentfsm.core.errors import ConflictError, LeaseHeldError, MisuseError, PartlyDoneError, StoreError
from agentfsm.core.header import FRONT_END, INHERITED_FIELDS, WHAT_IF, Header
from agentfsm.core.json_text import round_timestamp
from agentfsm.core.labels import Label, LabelSource, as_labels, find_owner, join_labels
from agentfsm.core.messages import AssistantMessage, Message, Part, ToolResult, check_history
from agentfsm.core.run import A_co, Run, begin_run
from agentfsm.core.run_ids import child_run_id
from agentfsm.core.settings import Settings
from agentfsm.core.trace_context import child_traceparent
from agentfsm.core.validation import BOOL
from agentfsm.journal import load as journals
from agentfsm.ports.store import Filter
from agentfsm.stores.rules import check_run_id
from agentfsm.tools.executing_call import (
    check_withheld,
    current_call,
    list_passed_labels,
    report_read_run,
    withholding_run,
)

if TYPE_CHECKING:
    from agentfsm.agents.runs import Prompt
    from agentfsm.core.events import Event

P = ParamSpec("P")
R = TypeVar("R")

# Fields that the header of a fork takes from that of the forked run. Its release is that of the agent.
_FORKED_FIELDS: Final = ("tenant", "clearance", "traceparent")
# Bytes of a run's nonce: enough that no two runs have the same one.
NONCE_BYTES: Final = 8


class StartOptions(TypedDict, total=False):
    """Optional arguments of `Agent.start`, which documents them."""

    id: str | None
    after: Run[Any] | None
    session: str | None
    messages: Sequence[Message] | None
    user: str | None
    roles: Iterable[str] | None
    settings: Settings | None
    metadata: Mapping[str, Any] | None
    tenant: str | None
    clearance: str
    release: str
    arms: Mapping[str, str] | None
    traceparent: str
    labels: Iterable[str]
    parent: Run[Any] | None
    purpose: str


def check_option_names(method: str, options: Iterable[str]) -> None:
    """Refuse options that a run does not have.

    Raises:
        TypeError: naming the method and the option; for a field of the agent, it points to `with_`.
    """
    for name in options:
        if name in StartOptions.__annotations__:
            continue
        fields = attrs.fields_dict(AgentFields)
        if name in fields and fields[name].init:
            hint = f"it is a field of the agent: write agent.with_({name}=...).{method}(...)"
        else:
            hint = f"valid options: {', '.join(StartOptions.__annotations__)}"
        raise TypeError(f"Agent.{method}() got an unexpected keyword argument {name!r}; {hint}")


def _checks_start_options(start: Callable[P, R]) -> Callable[P, R]:
    """Decorate `Agent.start`, whose explicit parameters serve type checkers, with the check of its options."""

    @wraps(start)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if options:
            check_option_names("start", options.keys() - {"prompt"})
        return start(*args, **options)

    return checked


class AgentStarts(AgentFields[A_co]):
    """Methods of an agent that begin runs."""

    __slots__ = ()

    @_checks_start_options
    def start(
        self,
        prompt: Prompt,
        *,
        id: str | None = None,  # noqa: A002  the contract's name
        after: Run[Any] | None = None,
        session: str | None = None,
        messages: Sequence[Message] | None = None,
        user: str | None = None,
        roles: Iterable[str] | None = None,
        settings: Settings | None = None,
        metadata: Mapping[str, Any] | None = None,
        tenant: str | None = None,
        clearance: str = "",
        release: str = "",
        arms: Mapping[str, str] | None = None,
        traceparent: str = "",
        labels: Iterable[str] = (),
        parent: Run[Any] | None = None,
        purpose: str = "",
    ) -> Run[A_co]:
        """Begin a run, in OBSERVE, without I/O. The first call that executes it creates it in the store.

        The function of a tool or of a flow's step may start runs. Such a run has the labels of the calling run, and the
        labels that it brings in become those of the call. Its user, with the roles, its tenant and its clearance are
        those of the calling run unless they are given.

        Args:
            prompt: The task: text, or parts.
            id: Id of the run, unique in the store. If the store has a run with this id and prompt, that run is resumed.
                The forms of ids that agentfsm derives, such as those of sub-agents and schedules, are refused.
                By default a new id; in the function of a tool, an id made of its call, so that the call resumes the run
                when it is repeated.
            after: A run that is over; this run continues its history.
            session: Id of a session; this run continues the history of the session's last run. With `after`, the
                session is new and branches off after that run.
            messages: A history to continue that is not in the store.
            user: User on whose behalf the run works.
            roles: Roles of the user; by default none.
            settings: Settings of model requests for this run; set fields override the agent's.
            metadata: Metadata of your own, as plain JSON.
            tenant: Tenant that the user belongs to.
            clearance: Highest level of data that the run may use: "public", "internal", "confidential", "restricted".
            release: Name of the release of the agent that the run was assigned to.
            arms: Arm of each experiment that the run takes part in, by the name of the experiment.
            traceparent: Trace that the run belongs to, as in the W3C header `traceparent`.
            labels: Labels of the prompt and of `messages`, such as "untrusted" for a prompt that contains a mail, and
                `labels=other.labels` for one that contains the answer of another run. The run has those of the results
                in `messages` as well.
            parent: The run that calls this agent as a tool.
            purpose: Purpose of the run if it is not production, such as "eval"; lists, metrics and alerts leave it out.

        Raises:
            TypeError: when an option is unknown; `with_` changes the fields of the agent.
            MisuseError: when the prompt is empty, several histories are given, a history is invalid, the metadata is
                not JSON, or an argument is of a wrong type.
        """
        parts = self._check_prompt(prompt)
        check_start_options(user, session, settings, after, parent)
        history = as_messages(messages)
        if history:
            check_history(history)
        if history and (after is not None or session is not None):
            raise MisuseError("messages= is a history to go on from, as after= and session= are: give one of them")
        if after is not None and not after.is_over:
            raise MisuseError(f"run {after.id!r} is in {after.state.upper()}: finish it before you go on after it")
        call = current_call() if parent is None else None
        if call is not None:
            own = call.run.header
            check_withheld(own)
            roles = own.roles if roles is None and user in {None, own.user} else roles
            user, tenant, clearance = user or own.user, tenant or own.tenant, clearance or own.clearance
        if self.memory is not None and user is None:
            warn_once(
                f"a run of agent {self.name} has no user, so its memory is neither searched nor filled: give user=, as "
                'in agent.run(prompt, user="ann")',
                logger="agentfsm",
            )
        identity: dict[str, Any] = {}
        if not traceparent and parent is None and (tracer := self.driver.config.tracer) is not None:
            traceparent = tracer.current_traceparent()
        if call is not None:
            traceparent = traceparent or child_traceparent(call.run.header, call.call.id)
        if tenant or clearance or release or arms or traceparent or purpose:
            given = {"tenant": tenant, "clearance": clearance, "release": release, "arms": arms, "purpose": purpose}
            identity = check_identity({**given, "traceparent": traceparent})
        if parent is not None:
            inherited = {name: getattr(parent.header, name) for name in INHERITED_FIELDS}
            called = next((each.call.id for each in parent.open if id == child_run_id(parent.id, each.call.id)), "")
            identity = inherited | {"traceparent": child_traceparent(parent.header, called)} | identity
        elif call is not None:
            own = call.run.header
            identity |= {"caller": call.caller, "withhold": own.withhold, "purpose": purpose or own.purpose}
            id = call.next_run_id() if id is None else id  # noqa: A001
        elif (withholding := withholding_run.get()) is not None:
            check_withheld(withholding)
            identity |= {"withhold": True, "purpose": purpose or withholding.purpose}
        header = self._build_header(
            parts,
            id,
            session=session,
            after=None if after is None else after.id,
            history=history,
            user=user,
            roles=() if roles is None else as_roles(roles),
            settings=settings,
            parent=None if parent is None else parent.id,
            depth=0 if parent is None else parent.header.depth + 1,
            metadata=to_plain_json(metadata, "metadata") if metadata else {},
            **identity,
        )
        shown = metadata and FRONT_END in metadata and self._check_front_end(header)
        inherited_labels = parent.labels if parent is not None else {} if call is None else call.labels
        # A task that a call has left behind is outside of the call, and has what that had read.
        passed = list_passed_labels() if parent is None and call is None else ()
        if labels or passed or inherited_labels or header.history or shown:
            sources = _list_label_sources(header, join_labels(as_labels(labels), passed), inherited_labels)
            if shown and all(each.label is not Label.UNTRUSTED for each in sources):
                sources += (LabelSource(label=Label.UNTRUSTED, run_id=header.id, name="page"),)
            header = attrs.evolve(header, labels=sources)
        return self.driver.attach_decoder(begin_run(header, after))

    def _check_front_end(self, header: Header) -> bool:
        """Check what the front end gives a run; return whether it gives state or context, which are untrusted.

        Raises:
            MisuseError: when it is not valid, or a tool has the name of one of the agent's.
        """
        from agentfsm.tools.front_end import describe_page, read_front_end  # noqa: PLC0415  few runs have one

        found = read_front_end(header.metadata)
        if found is None:
            return False
        self.driver.config.check_free(tool.name for tool in found[0])
        return bool(describe_page(found[1]))

    def _build_header(self, prompt: tuple[Part, ...], run_id: str | None, **more: Any) -> Header:
        config = self.driver.config
        header = Header(
            id=check_new_id(self.new_id() if run_id is None else run_id, more.get("parent"), more.get("caller")),
            nonce=urandom(NONCE_BYTES).hex(),
            prompt=prompt,
            created_at=round_timestamp(self.clock.now()),
            agent=self.name,
            agent_version=self.version,
            fingerprint=config.fingerprint,
            target=self.target,
            **more,
        )
        if config.resolve_instructions is not None:
            header = config.resolve_instructions(header)
        elif not header.metadata or FRONT_END not in header.metadata:
            return header
        return attrs.evolve(header, fingerprint=config.for_run(header).fingerprint)

    async def submit(
        self, prompt_or_run: Prompt | Run[A_co], *, deps: Any = None, **start: Unpack[StartOptions]
    ) -> Run[A_co]:
        """Create a run in the store for a worker to execute. The run is durable when this returns.

        Args:
            prompt_or_run: The task, or a run that `start` returned.
            deps: Object for the function of `instructions`, if it takes the RunContext; never stored. Tools receive the
                one of the worker.
            **start: As in `start`. A second call with the same id and prompt returns the run of the first call.

        Raises:
            ConflictError: when the id is that of a run with another prompt, or the session has a run that is not over.
            PartlyDoneError: when the run was created, and the store failed then; the message has its id.
        """
        check_option_names("submit", start)
        run = prompt_or_run if isinstance(prompt_or_run, Run) else self.start(prompt_or_run, **start)
        run = await self.driver.record_instructions(run, deps)
        with suppress(LeaseHeldError):  # a worker executes it already
            stored, lease = await self.store.create(run.header, durability=self.durability)
            try:
                await self.store.release(lease).wait()
                stopped = await self.driver.apply_stop_requests(run.id)
                if stopped is None and stored == run.header:  # just created, and after no run that the store has found
                    return run
                return self.driver.attach_decoder(await self.runs.load(run.id))
            except StoreError as error:
                raise _created_error(run.id, error) from error
        return self.driver.attach_decoder(await self.runs.load(run.id))

    async def fork(
        self,
        run_id: str,
        *,
        at: int | None = None,
        edit: Mapping[int, Event] | None = None,
        prompt: Prompt | None = None,
        id: str | None = None,  # noqa: A002  the contract's name
        withhold: bool = False,
        by: str = "",
        deps: Any = None,
    ) -> Run[A_co]:
        """Create a run in the store whose journal begins with the first events of another run.

        A fork acts: once it is executed, it calls tools with their effects, like any other run, also such calls as the
        forked run never made. With `withhold` it only shows these calls.

        Copied calls keep their idempotency keys; later calls get new ones. A copied call that was open and is not
        read-only waits for `settle`, because the original run may have completed it since. The fork has no session. If
        the agent is another release than that of the run, the fork has its release, and no arms.

        Args:
            run_id: The run to fork.
            at: Number of events to copy; by default all, except the event that ended the run.
            edit: Replacements for copied events, by version: `{5: attrs.evolve(history[4], ...)}`.
            prompt: Replacement for the first message.
            id: Id of the fork; by default a new one.
            withhold: Whether calls of tools that are not read-only are refused, each with a result that shows the call.
                Sub-agents run, and their calls are refused in the same way. Questions to people remain.
            by: Name of the person who makes the fork.
            deps: Object for the function of `instructions`, if it takes the RunContext; never stored.

        Raises:
            RunNotFoundError: when the store has no such run.
            MisuseError: when the run has no version `at`, the edited events are not a valid run, or the copy is over;
                and when calls cannot be withheld, because `settings` add tools that agentfsm does not know.
            ConflictError: when another run has the id.
        """
        from agentfsm.engine.deciders.guards import find_counted_tools  # noqa: PLC0415  with the engine
        from agentfsm.engine.execution.forked_calls import ForkedCalls, find_line  # noqa: PLC0415  with the engine
        from agentfsm.engine.fork import build_fork_events  # noqa: PLC0415  with the engine

        check_run_id(run_id)
        BOOL.check("fork", "withhold", withhold)
        stored = await self.store.read(run_id)
        for settings in (self.settings, stored.header.settings) if withhold else ():
            if isinstance(settings, Settings):
                settings.check_withheld()
        before = await journals.load_predecessor(self.store, stored.header)
        whole = begin_run(stored.header, before).fold(stored.events)
        at = len(stored.events) - whole.is_over if at is None else at
        prefix = journals.first_events(stored, at)
        release = self.version if stored.header.release and self.version else stored.header.release
        purpose = "" if stored.header.purpose == WHAT_IF and not withhold else stored.header.purpose
        header = self._build_header(
            stored.header.prompt if prompt is None else self._check_prompt(prompt),
            id,
            after=stored.header.after,
            history=stored.header.history,
            user=stored.header.user,
            roles=stored.header.roles,
            settings=stored.header.settings,
            metadata=stored.header.metadata,
            labels=stored.header.labels,
            **{name: getattr(stored.header, name) for name in _FORKED_FIELDS},
            purpose=purpose,
            withhold=withhold,
            release=release,
            arms=stored.header.arms if release == stored.header.release else {},
            forked_from=run_id,
            forked_at=at,
            forked_by=as_text(by, "by"),
        )
        check_withheld(header, is_recorded=self.driver.is_recorded)
        passed = list_passed_labels() if prompt is not None or edit else ()
        if prompt is None and (stored.header.parent is not None or stored.header.caller is not None):
            passed = join_labels(passed, [Label.USER_DATA])  # a model or a tool has written it: it is no order
        if passed:
            others = [source for source in header.labels if source.label not in passed]
            given = _list_label_sources(attrs.evolve(header, history=()), passed, {})
            header = attrs.evolve(header, labels=(*others, *given))
        header = (await self.driver.record_instructions(begin_run(header, before), deps)).header
        tools = self.driver.config.for_run(header).registry
        events = build_fork_events(header, before, prefix, edit or {}, tools)
        if find_counted_tools(self.driver.config):
            calls = ForkedCalls(self.store, await find_line(self.store, stored.header))
            own = whole.counted
            if (session := stored.header.session) is not None:
                [newest] = await self.runs.list(Filter(session=session), limit=1)
                own = (await journals.load_run(self.store, newest.id)).counted
            await calls.add_fork(header.id, begin_run(header, before).fold(events).counted, own)
        found, lease = await self.store.create(header, events=events, durability=self.durability)
        try:
            await self.store.release(lease).wait()
            stopped = await self.driver.apply_stop_requests(header.id)
        except StoreError as error:
            if found == header:
                raise _created_error(header.id, error) from error
            raise
        if found != header:
            raise ConflictError(f"run {header.id!r} exists already; choose another id")
        run = begin_run(header, before).fold(events) if stopped is None else stopped
        report_read_run(run)
        return self.driver.attach_decoder(run)


def _list_label_sources(
    header: Header, labels: Iterable[Label], inherited: Mapping[Label, LabelSource]
) -> tuple[LabelSource, ...]:
    """Return the labels with which a run begins: of its history, its prompt, and the run that calls the agent."""
    found: list[tuple[Label, str, str]] = []
    for message in header.history:
        if isinstance(message, ToolResult):
            found += [(label, message.tool, message.call_id) for label in message.labels]
        elif isinstance(message, AssistantMessage) and message.hosted is not None:
            found += [(label, "messages", "") for label in message.hosted.labels]
    found += [(label, "prompt", "") for label in labels]
    own = {
        label: LabelSource(
            label=label, run_id=header.id, call_id=call_id, name=name, owner=find_owner(label, header.user)
        )
        for label, name, call_id in found
    }
    return tuple({**own, **inherited}.values())


def _created_error(run_id: str, error: StoreError) -> PartlyDoneError:
    return PartlyDoneError(
        f"run {run_id!r} is in the store, and a worker executes it; but the store failed then: {error}; do not start "
        "it again under another id, and load it by this one"
    )
