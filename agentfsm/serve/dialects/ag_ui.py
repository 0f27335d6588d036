"""AG-UI 1.0: front ends start runs, follow them, and answer their interrupts, which are the waits of a run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal
from urllib.parse import unquote

import attrs
from pydantic import ConfigDict, Field

from agentfsm.agents.admission import admit_answer
from agentfsm.core.errors import ConflictError, MisuseError, RunNotFoundError
from agentfsm.core.header import FRONT_END
from agentfsm.core.inbox import InputKind
from agentfsm.core.messages import AudioPart, FilePart, ImagePart, Part, TextPart, ToolResult
from agentfsm.core.pending import PendingKind
from agentfsm.core.run_ids import build_key_id, build_said_key
from agentfsm.core.value import Value
from agentfsm.serve.access import read_session_name
from agentfsm.serve.bodies import RequestBody
from agentfsm.serve.dialects.ag_ui_encoder import AGUIEncoder
from agentfsm.serve.dialects.conversations import (
    OPEN_WAITS,
    FrontEndResult,
    Turn,
    collect_versions,
    find_latest_run,
    give_results,
    knows_message,
    list_front_end_calls,
    say,
)
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.errors import ForbiddenError
from agentfsm.serve.event_stream import Versions, parse_position
from agentfsm.serve.queries import read_traceparent
from agentfsm.serve.run_control import answer_call, reject_call, send_text
from agentfsm.tools.front_end import Page, describe_change, read_front_end, read_page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    from agentfsm.core.header import Header
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run
    from agentfsm.serve.access import Caller
    from agentfsm.serve.event_stream import RunEventStream
    from agentfsm.serve.gateway import Gateway

ClientId = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]


class _DialectBody(RequestBody):
    """Base of the bodies of AG-UI, whose unknown fields are ignored, as its versions demand."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)


class ResumeBody(_DialectBody):
    """Answer to an interrupt."""

    interruptId: Annotated[str, Field(min_length=1, max_length=100_000)]  # noqa: N815  the protocol's name
    """`id` of the interrupt."""

    status: Literal["resolved", "cancelled"]
    """Whether it was answered."""

    payload: Any = None
    """The answer, which fits `responseSchema` of the interrupt."""


class RunAgentBody(_DialectBody):
    """`RunAgentInput` of AG-UI."""

    threadId: ClientId  # noqa: N815  the protocol's name
    """Id of the conversation: the caller's session of this name."""

    runId: ClientId  # noqa: N815  the protocol's name
    """Id that the client gives to the run; the caller's own, and not the id in the store. A request that is repeated
    with it has no further effect.
    """

    messages: list[dict[str, Any]] = Field(default_factory=list)
    """The conversation. Of these, the last message is read, if it is the user's, and the results of tools after the
    last reply: the store has the others.
    """

    tools: list[dict[str, Any]] | None = None
    """Tools that the client carries out, for a run that this request starts."""

    state: Any = None
    """State that the client shares with the run, a JSON object. Empty: that of the conversation."""

    context: list[dict[str, Any]] | None = None
    """Data of the page for the model. Each item has a description and a value."""

    forwardedProps: Any = None  # noqa: N815  the protocol's name
    """Stored as metadata of a run that this request starts."""

    resume: list[ResumeBody] | None = None
    """Answers to interrupts."""


async def run_agent(gateway: Gateway, request: Request, caller: Caller, body: RunAgentBody) -> RunEventStream:
    """Start or continue a run of a conversation, and stream it as AG-UI events until it is over or waits."""
    agent = gateway.find_agent(request.path_params["agent"]).name
    encoder = AGUIEncoder(thread_id=body.threadId, run_id=body.runId)
    results, prompt = _read_results(body.messages), _read_prompt(body.messages)
    if not (body.resume or prompt or results):  # the client connects to a run
        header = await _open_named_run(gateway, caller, body.runId)
        return await gateway.open_stream(header.id, {}, encoder)
    latest = await find_latest_run(gateway, caller, body.threadId)
    if latest is not None and latest.header.agent != agent:
        latest = None
    metadata = _read_metadata(caller, body, latest)
    is_open = latest is not None and not latest.is_over
    is_new = is_open and (await gateway.find_keyed_run(caller, body.runId))[1] is None

    async def report() -> None:
        """Tell an open run what has changed on the page: before it goes on, and not for a request that is refused."""
        if latest is not None and is_new:
            await _report_page(gateway, caller, latest, metadata, body.runId)

    if body.resume:
        run_id, versions = await answer_interrupts(gateway, caller, agent, body.resume, report)
        await give_results(gateway, caller, list_front_end_calls(await gateway.runs.load(run_id)), results)
        turn = Turn(run_id=run_id, versions=versions)
    elif prompt is None:
        turn = await _continue(gateway, caller, latest, results, report)
    else:
        if latest is None or results or all(each.kind in OPEN_WAITS for each in latest.pending):
            await report()  # else the message is refused
        turn = await say(
            gateway,
            caller,
            prompt,
            agent=agent,
            session=body.threadId,
            key=body.runId,
            metadata={name: each for name, each in metadata.items() if name != FRONT_END or any(each.values())},
            results=results,
            traceparent=read_traceparent(request),
        )
    return await gateway.open_stream(turn.run_id, turn.versions, encoder)


async def follow_run(gateway: Gateway, request: Request, caller: Caller, _body: object) -> RunEventStream:
    """Stream a run as AG-UI events after `Last-Event-ID` or `after`, whichever protocol started it."""
    header = await _open_named_run(gateway, caller, request.path_params["run_id"])
    position = request.headers.get("last-event-id") or request.query_params.get("after", "")
    thread_id = read_session_name(header.session) or header.id
    encoder = AGUIEncoder(thread_id=thread_id, run_id=header.id)
    return await gateway.open_stream(header.id, parse_position(position, header.id), encoder)


async def _open_named_run(gateway: Gateway, caller: Caller, name: str) -> Header:
    """Return the header of a run by the `runId` that its client gave it, or by its id in the store.

    Raises:
        RunNotFoundError: when there is no such run, or the caller may not see it.
    """
    known = (await gateway.find_keyed_run(caller, name))[1]
    return await gateway.open_run(name if known is None else known.id, caller)


# The user's message.


def _read_prompt(messages: list[dict[str, Any]]) -> tuple[Part, ...] | None:
    """Return the last message, if it is the user's; None if there is none.

    Raises:
        MisuseError: when the message has content of an unknown form.
    """
    if not messages or messages[-1].get("role") != "user":
        return None
    content = messages[-1].get("content")
    if isinstance(content, str):
        return (TextPart(text=content),)
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise MisuseError("the content of the last message must be a text or a list of parts")
    return tuple(_read_part(each) for each in content)


def _read_part(part: dict[str, Any]) -> Part:
    kind, source = part.get("type"), part.get("source")
    if kind == "text" and isinstance(part.get("text"), str):
        return TextPart(text=part["text"])
    makers: dict[object, Any] = {"image": ImagePart, "audio": AudioPart, "document": FilePart}
    if kind not in makers or not isinstance(source, dict) or not isinstance(source.get("value"), str):
        raise MisuseError(f"a part of the type {str(kind)[:40]!r} cannot be read: send text, image, audio or document")
    if source.get("type") == "url":
        return makers[kind](url=source["value"])  # type: ignore[no-any-return]
    if source.get("type") == "data":
        url = f"data:{source.get('mimeType', '')};base64,{source['value']}"
        return makers[kind](url=url)  # type: ignore[no-any-return]
    raise MisuseError(f"a source of the type {str(source.get('type'))[:40]!r} cannot be read: send data or a URL")


# Tools of the client, and what it shares.


def _read_results(messages: list[dict[str, Any]]) -> dict[str, FrontEndResult]:
    """Return the results of tools after the last reply, by the ids of their calls.

    Raises:
        MisuseError: when one is not a text.
    """
    results: dict[str, FrontEndResult] = {}
    for each in reversed(messages):
        if each.get("role") == "assistant":
            break
        if each.get("role") != "tool":
            continue
        content, error = each.get("content"), each.get("error")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(each.get("toolCallId"), str) or not isinstance(content, str):
            raise MisuseError("the result of a tool must have the `toolCallId` of its call and a text as `content`")
        text = error if isinstance(error, str) and error else content
        results.setdefault(each["toolCallId"], FrontEndResult(content=text, failed=bool(error)))
    return results


async def _continue(
    gateway: Gateway,
    caller: Caller,
    run: Run | None,
    results: Mapping[str, FrontEndResult],
    report: Callable[[], Awaitable[None]],
) -> Turn:
    """Give the newest run of a conversation the results of the client's tools. The same ones have no further effect.

    `report` is called before, unless they are refused.

    Raises:
        ConflictError: when the run does not wait for one of them, or it has another one.
    """
    asked = () if run is None else list_front_end_calls(run)
    open_ids = {each.call_id for each in asked}
    known = {} if run is None else {each.call_id: each.content for each in run.messages if isinstance(each, ToolResult)}
    known |= {} if run is None else {each.call.id: each.result.content for each in run.open if each.result is not None}
    for call_id, given in results.items():
        if call_id in open_ids or known.get(call_id) in (given.content, admit_answer(given.content, caller.user)):
            continue
        why = "it has another result already" if call_id in known else "no run of this conversation waits for it"
        raise ConflictError(f"the result of {call_id[:80]!r} as a call of the page's tools was refused: {why}")
    assert run is not None  # noqa: S101  there is a result, and it is known
    versions = await collect_versions(gateway.runs, run.id, run.version) if open_ids.intersection(results) else {}
    await report()
    await give_results(gateway, caller, asked, results)
    return Turn(run_id=run.id, versions=versions)


def _read_metadata(caller: Caller, body: RunAgentBody, latest: Run | None) -> dict[str, Any]:
    """Return the metadata of a run that a request starts: what its client gives it.

    Raises:
        MisuseError: when a text is too long, or a value is nested too deeply.
    """
    state = body.state or None
    if state is None and latest is not None and (kept := read_page(latest).state):  # a page that was loaded again
        state = dict(kept)
    front_end = {"tools": body.tools or None, "state": state, "context": body.context}
    given = {FRONT_END: {name: each for name, each in front_end.items() if each is not None}}
    return admit_answer(given | ({"forwardedProps": body.forwardedProps} if body.forwardedProps else {}), caller.user)


async def _report_page(gateway: Gateway, caller: Caller, run: Run, metadata: Mapping[str, Any], key: str) -> None:
    """Send an open run what has changed in the page since the run began, once for each key."""
    found = read_front_end(metadata, has_begun=True)
    if changes := read_page(run).changes_to(Page() if found is None else found[1]):
        said = build_key_id(f"{key}.page", tenant=caller.tenant, user=caller.user)
        await send_text(gateway, caller, run.id, describe_change(changes), key=said, kind=InputKind.EVENT)


# Answers to interrupts.


@attrs.frozen(kw_only=True)
class _InterruptId(Value):
    """Parts of the id of an interrupt."""

    run_id: str
    call_id: str
    digest: str
    position: str

    @classmethod
    def parse(cls, text: str) -> _InterruptId:
        """Parse an id.

        Raises:
            MisuseError: when it is not one.
        """
        parts = text.split("/")
        if len(parts) != 4:
            raise MisuseError(f"{text[:80]!r} is not the id of an interrupt: send it as it is")
        run_id, call_id, digest, position = parts
        return cls(run_id=unquote(run_id), call_id=unquote(call_id), digest=unquote(digest), position=position)


async def answer_interrupts(
    gateway: Gateway,
    caller: Caller,
    agent: str,
    answers: list[ResumeBody],
    report: Callable[[], Awaitable[None]] | None = None,
) -> tuple[str, Versions]:
    """Apply the answers to the interrupts of a run. Return its id and the position of the interrupts.

    Args:
        gateway: The gateway.
        caller: The caller.
        agent: Name of the agent of the run.
        answers: The answers.
        report: Called before the first of them takes effect, unless one is refused.

    Raises:
        RunNotFoundError: when there is no such run of the agent, or the caller may not see it.
        ForbiddenError: when the caller may not decide this.
        ConflictError: when another decision was made.
        MisuseError: when an answer does not fit.
    """
    root_id, versions = "", {}
    waiting: list[tuple[_InterruptId, Pending, ResumeBody]] = []
    for each in answers:
        asked = _InterruptId.parse(each.interruptId)
        await gateway.open_run(asked.run_id, caller)
        root = await gateway.runs.root(asked.run_id)
        if root.agent != agent or (root_id and root.id != root_id):
            raise RunNotFoundError(f"there is no run {asked.run_id!r} of {agent!r} with these interrupts")
        root_id, versions = root.id, parse_position(asked.position, root.id)
        if (item := await _find_pending(gateway, caller, asked, each)) is not None:
            waiting.append((asked, item, each))
    if report is not None:
        await report()
    for asked, item, each in waiting:
        await _decide(gateway, caller, asked, item, each)
    return root_id, versions


async def _find_pending(gateway: Gateway, caller: Caller, asked: _InterruptId, answer: ResumeBody) -> Pending | None:
    """Return what waits for an answer that the caller may give; None if the caller has given it already."""
    run = await gateway.runs.load(asked.run_id)
    found = [item for item in run.pending if (item.run_id, item.call_id) == (asked.run_id, asked.call_id)]
    if not found:  # perhaps this is the same request again
        await _check_decided_by(gateway, caller, asked, answer)
        return None
    item = found[0]
    if item.digest != asked.digest:
        raise ConflictError(f"{asked.call_id} was not decided: it has changed since it was shown, look at it again")
    if item.kind in (PendingKind.APPROVAL, PendingKind.OUTCOME) and not caller.allows("approve"):
        raise ForbiddenError("this needs a key with the scope 'approve'")
    return item


async def _decide(gateway: Gateway, caller: Caller, asked: _InterruptId, item: Pending, answer: ResumeBody) -> None:
    is_cancelled, payload = answer.status == "cancelled", answer.payload
    if item.kind is PendingKind.APPROVAL:
        await _decide_approval(gateway, caller, item, {"approved": False} if is_cancelled else payload)
    elif item.kind is PendingKind.QUESTION:
        await _answer_question(gateway, caller, item, payload, is_cancelled=is_cancelled)
    elif item.kind is PendingKind.OUTCOME and isinstance(payload, dict) and not is_cancelled:
        words = {name: payload[name] for name in ("result", "failed") if isinstance(payload.get(name), str)}
        texts = admit_answer(words, caller.user)
        rerun = payload.get("rerun") is True
        await (await gateway.decide_as(caller, await gateway.runs.header(item.run_id))).settle(
            item.run_id, item.call_id, **texts, rerun=rerun, by=caller.user
        )
    elif item.kind is PendingKind.INPUT and isinstance(payload, str) and not is_cancelled:
        await send_text(gateway, caller, item.run_id, payload, key=build_said_key(f"resume:{asked.position}"))
    else:
        raise MisuseError(f"this does not answer the {item.kind} of {item.tool or 'the run'}: see its responseSchema")


async def _decide_approval(gateway: Gateway, caller: Caller, item: Pending, payload: Any) -> None:
    given: Any = {"approved": payload} if isinstance(payload, bool) else payload
    if not isinstance(given, dict) or not isinstance(given.get("approved"), bool):
        raise MisuseError('an approval is answered by {"approved": true} or {"approved": false}')
    if given["approved"]:
        arguments = given.get("arguments")
        if not isinstance(arguments, dict | None):
            raise MisuseError("the arguments of an approval must be an object")
        await (await gateway.decide_as(caller, await gateway.runs.header(item.run_id))).approve(
            item.run_id, item.call_id, by=caller.user, arguments=arguments, digest=item.digest
        )
    else:
        message = given.get("message", "")
        if not isinstance(message, str):
            raise MisuseError("the message of a rejection must be a string")
        await reject_call(gateway, caller, item.run_id, item.call_id, shown_run=item.run_id, message=message)


async def _answer_question(
    gateway: Gateway, caller: Caller, item: Pending, payload: Any, *, is_cancelled: bool
) -> None:
    answer = partial(answer_call, gateway, caller, item.run_id, item.call_id, shown_run=item.run_id, digest=item.digest)
    if not is_cancelled:
        await answer(payload)
    elif item.questions:
        await answer(None, declined=True)
    else:
        await answer("the user gave no answer", failed=True)


async def _check_decided_by(gateway: Gateway, caller: Caller, asked: _InterruptId, answer: ResumeBody) -> None:
    """Check that the caller decided on a call that does not wait any more, and not otherwise than now.

    Raises:
        ConflictError: when another person did, it was decided otherwise, or its time was up.
    """
    word = answer.payload.get("approved") if isinstance(answer.payload, dict) else answer.payload
    approves, refuses = word is True, word is False or answer.status == "cancelled"
    if await knows_message(gateway.runs, asked.run_id, build_said_key(f"resume:{asked.position}")):
        return
    records = [each for each in await gateway.runs.audit(asked.run_id) if each.call_id == asked.call_id]
    for each in records:
        deciders = {each.decided_by if each.decision else None, each.approved_by, *each.informed_by, *each.rerun_by}
        if caller.user in deciders:
            if (refuses and each.approved_by) or (approves and each.decision == "rejected"):
                raise ConflictError(f"{asked.call_id} was decided already, and otherwise: look at it again")
            return
    raise ConflictError(f"run {asked.run_id!r} does not wait for {asked.call_id or 'input'} any more: look at it again")


AG_UI: Final = RouteGroup(
    name="ag-ui",
    endpoints=(
        Endpoint(method="POST", path="/v1/agents/{agent}/ag-ui", handler=run_agent, scope="run", body=RunAgentBody),
        Endpoint(method="GET", path="/v1/runs/{run_id}/ag-ui", handler=follow_run, query=("after",)),
    ),
)
