"""A conversation at the terminal: each message is a run of one session."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from agentfsm.agents.admission import admit
from agentfsm.agents.agent_starts import StartOptions
from agentfsm.cli import codes
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.chat_view import ChatView, PlainChatView
from agentfsm.cli.render.formatting import NOTE_CHARS, format_count, format_time
from agentfsm.cli.render.json_documents import build_run_json
from agentfsm.cli.render.pending import format_pending
from agentfsm.cli.render.text import format_prompt
from agentfsm.cli.session.attended_run import AttendedRun, build_hint, describe_end, format_end
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import user_name
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, UserMessage
from agentfsm.core.pending import PendingKind
from agentfsm.core.text_safety import one_line
from agentfsm.ports.store import Filter
from agentfsm.tools.queue.result_text import describe_error

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.agents.runs import Prompt
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Run
    from agentfsm.ports.store import RunSummary
    from agentfsm.releases import Rollout

T = TypeVar("T")

# Runs that are read for the list of sessions and for the history of the arrow keys.
RECENT_RUNS: Final = 200
# Sessions that are listed.
MAX_SESSIONS: Final = 20
_COMMAND: Final = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)

# Commands of the chat with their descriptions.
COMMANDS: Final[Mapping[str, str]] = {
    "/help": "list the commands",
    "/new": "begin a new session",
    "/sessions": "list the sessions with this agent, or go on with one: /sessions NUMBER|NAME",
    "/history": "show the conversation",
    "/cost": "show the tokens and the cost of the session",
    "/retry": "go on with an unfinished reply, or replace the last one",
    "/cancel": "end an unfinished reply",
    "/exit": "end the chat (or Ctrl-D)",
}


@attrs.define(eq=False, repr=False, kw_only=True)
class ChatSession:
    """A chat with an agent. No event loop runs while the person types, so each reply has one of its own."""

    terminal: Terminal
    agent: Agent
    """Agent of the newest run."""

    rollout: Rollout | None = None
    """Roll-out that chooses the agent of each new run; None if there is one agent."""

    store_location: str | None
    """Path or URL of the store; None if only the agent can open it."""

    session: str
    """Session of the conversation."""

    user: str | None = None
    """User of the runs; None if not given."""

    tenant: str | None = None
    """Tenant of the user; None if not given."""

    roles: Sequence[str] = ()
    """Roles of the user."""

    target: str
    """Target of the agent, for the command that continues the session."""

    view: ChatView = attrs.field(
        init=False, default=attrs.Factory(lambda self: choose_chat_view(self.terminal), takes_self=True)
    )
    last: Run | None = attrs.field(default=None, init=False)
    """Newest run of the session; None if the session has none."""

    exit_code: ExitCode = attrs.field(default=ExitCode.DONE, init=False)
    """Code of the first reply that did not end in DONE. A chat that reads from a pipe exits with it."""

    _is_ended: bool = attrs.field(default=False, init=False)

    @property
    def is_interactive(self) -> bool:
        """Whether a person types the messages."""
        return self.terminal.can_ask

    def chat(self) -> ExitCode:
        """Read messages and reply to them, until Ctrl-D, `/exit` or SIGTERM."""
        try:
            self._open()
            read = self._choose_reader()
            while not self._is_ended:
                try:
                    text = read()
                except KeyboardInterrupt:
                    if not self.is_interactive:
                        raise
                    self.view.show_note("Ctrl-D or /exit ends the chat.")
                    continue
                if text is None:
                    break
                if text.strip():
                    self._handle(text.strip())
        finally:
            if self.last is not None:
                self.view.show_note(f"To continue: {self._build_command()}")
            self._run(self.agent.aclose)
        return ExitCode.DONE if self.is_interactive else self.exit_code

    def _build_command(self) -> str:
        given = [("--user", self.user), ("--tenant", self.tenant), *[("--role", role) for role in self.roles]]
        user = "".join([f" {name} {shlex.quote(value)}" for name, value in given if value is not None])
        hint = build_hint(self.last, self.agent, self.store_location) if self.last is not None else None
        command = f"chat {self.target} --session {shlex.quote(self.session)}{user}"
        return hint.build(command) if hint is not None else command

    def _run(self, act: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        with InterruptibleRunner() as runner:
            return runner.run(partial(act, *args, **options))

    # Reading messages.

    def _choose_reader(self) -> Callable[[], str | None]:
        if not self.is_interactive:
            return self._read_piped
        if not self.terminal.can_edit:
            return partial(self.terminal.ask, ">")
        from agentfsm.cli.line_editor import MessageEditor  # noqa: PLC0415  the one file that loads prompt_toolkit

        prompts = [summary.prompt for summary in reversed(self._list_runs()) if summary.prompt]
        return MessageEditor(COMMANDS, prompts).read

    def _read_piped(self) -> str | None:
        """Return the next line of stdin; None at its end."""
        return sys.stdin.readline() or None

    def _start(self, prompt: Prompt, after: Run | None = None) -> Run:
        """Begin a run of the session, of the arm of its user if there is a roll-out."""
        whose = StartOptions(session=self.session, user=self.user, tenant=self.tenant, roles=self.roles)
        options = StartOptions(after=after)
        options.update(whose)
        if self.rollout is not None:
            self.agent, chosen = self._run(self.rollout.choose, **whose)
            options.update(chosen)
        return self.agent.start(prompt, **options)

    def _handle(self, text: str) -> None:
        try:
            if (found := _COMMAND.fullmatch(text)) is not None:
                self._execute_command(found[1], (found[2] or "").strip())
            elif self.last is None or self.last.is_over:
                prompt = admit(text, user_name())
                self._reply(self._start(prompt))
            elif any(item.kind is PendingKind.INPUT for item in self.last.pending):
                self._run(self.agent.send, self.last.id, admit(text, user_name()))
                self._reply(self.last)
            else:
                self._show_unfinished()
        except AgentError as error:
            if not self.is_interactive:
                raise
            self.view.show_note(str(error))

    # Sessions.

    def _open(self) -> None:
        """Load the newest run of the session, and finish it if its process was killed."""
        found = self._run(self.agent.runs.list, Filter(session=self.session), limit=1)
        self.last = None
        if found and found[0].agent != self.agent.name:
            raise MisuseError(f"session {self.session!r} is one of the agent {found[0].agent!r}: name another session")
        if self.is_interactive:
            known = "" if found else "new "
            self.view.show_note(
                f"{self.agent.name} ({self.agent.model.name}), {known}session {self.session}. /help lists the commands."
            )
        else:
            self.terminal.err(f"session {self.session}")
        if not found:
            return
        self.last = self._run(self.agent.load, found[0].id)
        if self.rollout is not None:
            self.agent = self.rollout.find_agent(self.last.header.release)
        if self.is_interactive:
            self.view.show_message(format_prompt(self.last))
        if self.last.is_over:
            if self.is_interactive:
                self._show_end(is_new=False)
        else:
            self.view.show_note("The last reply was not finished. It continues.")
            self._reply(self.last)

    def _list_runs(self) -> tuple[RunSummary, ...]:
        """Return recent runs of all sessions of the user with this agent, newest first."""
        where = Filter(agent=self.agent.name, user=self.user, purpose="")
        found = self._run(self.agent.runs.list, where, limit=RECENT_RUNS, subagents=False)
        return tuple([each for each in found if each.session is not None and each.user == self.user])

    # Replies.

    def _reply(self, run: Run) -> None:
        """Execute a run, and show how it ends."""
        self.last = run
        attended = AttendedRun(
            terminal=self.terminal,
            agent=self.agent,
            run=run,
            store_location=self.store_location,
            resumes_pause=True,
            view=self.view,
        )
        with attended.runner:
            try:
                attended.submit()
                attended.run_until_blocked()
            except KeyboardInterrupt:
                if attended.runner.is_terminated or not self.is_interactive:
                    raise
                if attended.is_stored:
                    self._run(self.agent.cancel, run.id, by=user_name(), message="the person pressed Ctrl-C")
            except AgentError:
                raise
            except Exception as error:  # noqa: BLE001  a bug in the agent must not end the chat
                self.view.show_note(f"The reply failed: {describe_error(error)}. /retry goes on with it.")
            finally:
                if attended.is_stored:
                    self.last = attended.run
                else:
                    found = self._run(self.agent.runs.list, Filter(session=self.session), limit=1)
                    self.last = self._run(self.agent.load, found[0].id) if found else None
        if attended.is_stored:
            self.last = self._run(self.agent.load, run.id)
            self._show_end()

    def _show_end(self, *, is_new: bool = True) -> None:
        """Show the answer of the last run, or why there is none."""
        run = self.last
        if run is None:
            return
        code = codes.for_run(run)
        self.exit_code = self.exit_code or code
        if run.state is State.DONE:
            if self.terminal.json:
                self._write_document(run)
            else:
                self.view.show_answer(run.answer, is_new=is_new)
            if is_new and self.is_interactive:
                self.view.show_note(describe_end(run))
            return
        if self.terminal.json:
            self._write_document(run)
        if run.is_over:
            end = "cancelled" if run.stop_reason is StopReason.CANCELLED else describe_end(run)
            self.view.show_note(f"{end}. /retry sends the message again.")
            return
        self._show_unfinished()
        self._is_ended = not self.is_interactive

    def _write_document(self, run: Run) -> None:
        self.terminal.document(build_run_json(run, build_hint(run, self.agent, self.store_location)))

    def _show_unfinished(self) -> None:
        run = self.last
        if run is None:
            return
        if not self.is_interactive:
            for line in format_end(run, build_hint(run, self.agent, self.store_location)):
                self.terminal.err(line)
            return
        for item in run.pending:
            self.view.show_note(f"The reply waits. {format_pending(item, run.id)}")
        self.view.show_note("/retry goes on with the reply and asks again, and /cancel ends it.")

    # Commands.

    def _execute_command(self, name: str, rest: str) -> None:
        match name:
            case "help":
                self._help()
            case "new":
                self.session = build_session_name(self.agent)
                self._open()
            case "sessions":
                self._show_sessions(rest)
            case "history":
                self._show_history()
            case "cost":
                self._show_cost()
            case "retry":
                self._retry()
            case "cancel":
                self._cancel()
            case "exit":
                self._is_ended = True
            case _:
                self.view.show_note(f"There is no command /{one_line(name, NOTE_CHARS)}: /help lists them.")

    def _help(self) -> None:
        width = max(map(len, COMMANDS))
        lines = [f"{name:{width}}  {text}" for name, text in COMMANDS.items()]
        if self.terminal.can_edit:
            lines.append("Alt-Enter begins a new line of the message. Ctrl-C cancels the reply that is being written.")
        self.view.show_note("\n".join(lines))

    def _show_sessions(self, rest: str) -> None:
        sessions: dict[str, list[RunSummary]] = {}  # recent ones with their runs, the newest first
        for summary in self._list_runs():
            sessions.setdefault(summary.session or "", []).append(summary)
        sessions = dict([*sessions.items()][:MAX_SESSIONS])
        names = [*sessions]
        if rest:
            number = int(rest) if rest.isascii() and rest.isdecimal() else 0
            chosen = names[number - 1] if 1 <= number <= len(names) else rest
            if chosen not in sessions:
                raise MisuseError(f"there is no session {rest!r} with this agent: /sessions lists them")
            self.session = chosen
            self._open()
            return
        for number, (name, runs) in enumerate(sessions.items(), 1):
            mark = "*" if name == self.session else " "
            about = f"{format_time(runs[0].created_at)}, {format_count(len(runs), 'message')}"
            self.view.show_note(f"{mark}{number:3}  {name}  ({about})  {one_line(runs[-1].prompt, 60)}")
        if not sessions:
            self.view.show_note("There are no sessions yet.")

    def _show_history(self) -> None:
        for message in () if self.last is None else self.last.messages:
            if isinstance(message, UserMessage):
                self.view.show_message(message.text)
            elif isinstance(message, AssistantMessage):
                if message.text.strip():
                    self.view.show_answer(message.text, is_new=False)
                for call in message.calls:
                    self.view.show_note(f"  {call.name}({one_line(call.arguments, NOTE_CHARS)})")

    def _show_cost(self) -> None:
        cost = self._run(self.agent.session_cost, self.session)
        self.view.show_note(
            f"{format_count(len(cost.runs), 'message')}, {cost.usage.tokens:,} tokens "
            f"({cost.usage.input_tokens:,} in, {cost.usage.output_tokens:,} out), {cost.usage.format_cost()}"
            f"{f', no price for {models}' if (models := ' and '.join(cost.unpriced)) else ''}"
        )

    def _cancel(self) -> None:
        if self.last is None or self.last.is_over:
            self.view.show_note("There is no unfinished reply.")
            return
        self._run(self.agent.cancel, self.last.id, by=user_name(), message="cancelled in the chat")
        self.last = self._run(self.agent.load, self.last.id)
        self.view.show_note(describe_end(self.last))

    def _retry(self) -> None:
        run = self.last
        if run is None:
            self.view.show_note("There is no message yet.")
        elif not run.is_over:
            self._reply(run)
        elif run.state is not State.DONE:  # its calls stay in the history, so that none is made twice unknowingly
            self._reply(self._start(run.header.prompt))
        elif self._may_repeat(run):
            self._branch(run)

    def _may_repeat(self, run: Run) -> bool:
        """Ask the person if the reply had effects, which another reply to the message may have again."""
        tools = {call.name: self.agent.tools.get(call.name) for call in run.calls}
        effects = [name for name, tool in tools.items() if tool is None or not tool.read_only]
        if not effects:
            return True
        if not self.is_interactive:
            raise MisuseError(
                f"the reply called {', '.join(effects)}, which another reply may do again: send a message"
            )
        question = f"The reply called {', '.join(effects)}, and a new one may do so again. Replace it? [y/n]"
        return self.terminal.ask_choice(question, {"y": "y", "yes": "y", "n": "n", "no": "n"}) == "y"

    def _branch(self, run: Run) -> None:
        """Answer the message of a run again, in a new session that branches off before it."""
        before = None if run.header.after is None else self._run(self.agent.load, run.header.after)
        base, _, number = self.session.rpartition("~")
        count = int(number) if base and number.isdecimal() else 1
        base = base if count > 1 else self.session
        while self._run(self.agent.runs.list, Filter(session=self.session), limit=1):
            count += 1
            self.session = f"{base}~{count}"
        self.view.show_note(f"The earlier answer stays in its session. This one is session {self.session}.")
        self._reply(self._start(run.header.prompt, after=before))


def choose_chat_view(terminal: Terminal) -> ChatView:
    """Return the view with Markdown for a capable terminal if rich is installed, else that with plain lines."""
    if terminal.can_render and terminal.width is not None and not terminal.json:
        from agentfsm.cli.render.rich_chat import RichChatView  # noqa: PLC0415  it loads rich

        return RichChatView()
    return PlainChatView(terminal=terminal)


def build_session_name(agent: Agent) -> str:
    """Return a name for a new session."""
    return f"chat-{agent.new_id()[:8]}"
