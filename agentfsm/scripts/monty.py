"""The interpreter Monty: Python in a process of its own, without files, network, imports of packages or threads."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs
from anyio import to_thread

from agentfsm._lib.plugins import require_extra
from agentfsm.core.validation import COUNT, SECONDS
from agentfsm.core.value import Value
from agentfsm.sandbox.process.python_code import MAX_PRINTED_CHARS, SLEEP, bind_call
from agentfsm.scripts.interpreter import Answer, ScriptCall, ScriptEnd, ScriptSource, ScriptStep

# Calls, names and waits of a script in one run from its start.
_MAX_SUSPENSIONS: Final = 20_000
_SLEEPS: Final = {"time.sleep": "seconds", "asyncio.sleep": "delay"}


@attrs.frozen(kw_only=True)
class Monty(Value):
    """The interpreter of pydantic-monty: fast to start, and the script can do nothing but compute and call tools.

    It has a part of Python and of its standard library: no classes with inheritance, no `with`, no files, and the
    modules `asyncio`, `datetime`, `json`, `math`, `random`, `re` and few others.
    """

    seconds: float = attrs.field(default=5.0, validator=SECONDS)
    """Seconds that the script may compute, its calls not counted, above 0. Default 5."""

    memory_mb: int = attrs.field(default=100, validator=COUNT)
    """Memory of the script in megabytes, 1 or more. Default 100."""

    name = "monty"
    description = "The interpreter has a part of Python's standard library, and neither files nor network."

    async def advance(self, source: ScriptSource) -> ScriptStep:
        """Run a script from its start until it waits or ends.

        Raises:
            MissingExtraError: if pydantic-monty is not installed.
        """
        with require_extra("agentfsm.scripts.Monty", "monty", "pydantic_monty"):
            import pydantic_monty  # noqa: PLC0415  an extra
        return await to_thread.run_sync(_Execution(pydantic_monty, source, self).run, abandon_on_cancel=True)


@attrs.define
class _Execution:
    """A script that runs."""

    monty: Any
    source: ScriptSource
    rights: Monty
    calls: list[ScriptCall] = attrs.field(factory=list)
    now: float = attrs.field(default=attrs.Factory(lambda self: self.source.started_at, takes_self=True))
    numbers: dict[int, int] = attrs.field(factory=dict)
    """Positions of the calls that the script may await, by Monty's ids."""

    def run(self) -> ScriptStep:
        """Run the script until it waits or ends."""
        monty, printed = self.monty, self.monty.CollectString(MAX_PRINTED_CHARS)
        limits = {
            "max_feed_duration_secs": self.rights.seconds,
            "max_memory": self.rights.memory_mb << 20,
            "max_suspensions": _MAX_SUSPENSIONS,
        }
        policy = {"datetime": "call_host", "sleep": "call_host", "random_start": {"seed": self.source.seed}}
        try:
            with monty.Monty() as pool, pool.checkout(limits=limits, os_policy=policy) as session:
                snapshot = session.feed_start(self.source.code, print_callback=printed)
                while not isinstance(snapshot, monty.MontyComplete):
                    if (advance := self._find_answer(snapshot)) is None:
                        return ScriptStep(calls=tuple(self.calls), printed=printed.output)
                    snapshot = advance()
                end = ScriptEnd(value=snapshot.output)
        except monty.MontyCrashedError as error:
            end = ScriptEnd(error=f"the interpreter was ended: {error}")
        except monty.MontyError as error:
            end = ScriptEnd(error=error.display().replace("<python-input-0>", "<script>"))
        return ScriptStep(calls=tuple(self.calls), printed=printed.output, end=end)

    def _find_answer(self, snapshot: Any) -> Callable[[], Any] | None:
        """Return a function that lets the script go on; None if it waits, or makes too many calls."""
        if isinstance(snapshot, self.monty.NameLookupSnapshot):
            name = snapshot.variable_name
            return (
                partial(snapshot.resume, value=_stand_for(name)) if name in self.source.parameters else snapshot.resume
            )
        if isinstance(snapshot, self.monty.FutureSnapshot):
            numbers = {each: self.numbers[each] for each in sorted(snapshot.pending_call_ids)}
            if any(number >= len(self.source.answers) for number in numbers.values()):
                return None
            return partial(snapshot.resume, {each: self._read_answer(number) for each, number in numbers.items()})
        name = str(snapshot.function_name)
        if snapshot.is_os_function and name not in _SLEEPS:
            value = self._read_clock(name, snapshot.args)
            return snapshot.resume_not_handled if value is None else partial(snapshot.resume, {"return_value": value})
        tool = SLEEP if snapshot.is_os_function else name
        try:
            arguments = bind_call(tool, self.source.parameters, snapshot.args, snapshot.kwargs)
        except (NameError, TypeError, ValueError, RecursionError) as error:
            return partial(snapshot.resume, {"exception": error})
        number = len(self.calls)
        before = self.source.code.encode()[: snapshot.position.start]
        self.calls.append(ScriptCall(tool=tool, arguments=arguments, line=before.count(b"\n") + 1))
        if len(self.calls) > self.source.max_calls:
            return None
        # A sleep of `time` is not awaited.
        if self.source.has_await and name != "time.sleep":
            self.numbers[snapshot.call_id] = number
            return partial(snapshot.resume, {"future": ...})
        return partial(snapshot.resume, self._read_answer(number)) if number < len(self.source.answers) else None

    def _read_answer(self, number: int) -> Mapping[str, Any]:
        answer: Answer = self.source.answers[number]
        self.now = max(self.now, answer.at)
        if answer.error is None:
            return {"return_value": answer.value}
        return {"exc_type": answer.error_kind, "message": answer.error}

    def _read_clock(self, name: str, args: Sequence[Any]) -> Any:
        """Return the time of the run for the functions that ask for it; None for other functions."""
        if name == "time.time":
            return self.now
        if name not in ("datetime.now", "date.today"):
            return None
        zone: dt.tzinfo | None = args[0] if args else None
        found = dt.datetime.fromtimestamp(self.now, zone or dt.UTC)
        if name == "date.today":
            return found.date()
        return found if zone else found.replace(tzinfo=None)


def _stand_for(name: str) -> Callable[[], None]:
    """Return a function with the name of a tool, which stands for it as a value of the script."""

    def function() -> None:
        return

    function.__name__ = function.__qualname__ = name
    return function
