"""Run Python code that a model wrote. The functions below are loaded from this file, inside a sandbox."""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import datetime as dt
import inspect
import io
import json
import os
import random
import selectors
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

# Characters of the output of the code that are kept, and of the value of its last line.
MAX_PRINTED_CHARS: Final = 50_000
_MAX_RESULT_CHARS: Final = 20_000
_MAX_ERROR_CHARS: Final = 4_000
_NAME: Final = "<code>"
# Tool that a script calls when it waits.
SLEEP: Final = "sleep"


class _Printed(io.TextIOBase):
    """The beginning of the output of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = io.StringIO()
        self.chars = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.kept.write(text[: max(0, MAX_PRINTED_CHARS - self.chars)])
        self.chars += len(text)
        return len(text)

    def __str__(self) -> str:
        dropped = self.chars - MAX_PRINTED_CHARS
        return self.kept.getvalue() + (f"\n[... {dropped} more characters ...]" if dropped > 0 else "")


def run_code(code: str) -> dict[str, Any]:
    """Run code; return its output, the value of its last line if that is an expression, and its error."""
    printed, result, error = _Printed(), None, None
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            body, last = _split(code)
            exec(body, names)  # noqa: S102  this is the purpose, in a sandbox
            if last is not None and (value := eval(last, names)) is not None:  # noqa: S307  as above
                result = _shorten(repr(value), _MAX_RESULT_CHARS)
        except BaseException as raised:  # noqa: BLE001  whatever it raises is its result
            error = _describe(raised)
    return {"printed": str(printed), "result": result, "error": error}


def _split(code: str, flags: int = 0) -> tuple[Any, Any]:
    """Return the compiled statements, and the compiled expression of the last line if it is one."""
    tree = ast.parse(code, _NAME)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = compile(ast.Expression(tree.body.pop().value), _NAME, "eval", flags)  # type: ignore[attr-defined]
    return compile(tree, _NAME, "exec", flags), last


def _describe(error: BaseException) -> str:
    """Return the error with the lines of the code that led to it."""
    if isinstance(error, SystemExit) and not error.code:
        return "the code ended by exit()"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _NAME]
    lines = [f"line {frame.lineno}, in {frame.name}" for frame in frames]
    text = "".join(traceback.format_exception_only(error)).strip()
    return _shorten("\n".join([text, *lines[-5:]]), _MAX_ERROR_CHARS)


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}[... {len(text) - most} more characters ...]"


def run_script(source: dict[str, Any]) -> dict[str, Any]:
    """Run a script, a `ScriptSource`, until it waits for a call without an answer or ends; return a `ScriptStep`."""
    script = _Script(source)
    threading.Thread(target=script.run, daemon=True).start()  # it may wait for ever
    script.stopped.wait()
    return {"calls": script.calls, "printed": str(script.printed), "end": script.end}


def bind_call(
    tool: str, parameters: Mapping[str, Sequence[str]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, as JSON values.

    Raises:
        NameError: if there is no such tool.
        TypeError: if there are too many, one is given twice, or one is no JSON value.
        ValueError: if one contains itself.
    """
    if tool not in parameters:
        raise NameError(f"name '{tool}' is not defined")
    names = parameters[tool]
    if len(args) > len(names):
        raise TypeError(
            f"{tool}() takes {len(names)} arguments, and {len(args)} were given: {', '.join(names) or 'none'}"
        )
    given = dict(zip(names, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise TypeError(f"{tool}() got two values for {', '.join(sorted(twice))}")
    found: dict[str, Any] = json.loads(json.dumps({**given, **kwargs}))
    return found


class _Script:
    """A script that runs in a thread, which stays behind when the script waits."""

    def __init__(self, source: dict[str, Any]) -> None:
        self.source = source
        self.answers: list[dict[str, Any]] = source["answers"]
        self.calls: list[dict[str, Any]] = []
        self.printed = _Printed()
        self.end: dict[str, Any] | None = None
        self.stopped = threading.Event()
        self.now: float = source["started_at"]
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.loop = _Loop(self)

    def run(self) -> None:
        names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        names |= {tool: partial(self.call, tool) for tool in self.source["parameters"]}
        self._fix_chance()
        self._fix_time()
        asyncio.set_event_loop(self.loop)
        asyncio.run = lambda main, **_options: self.loop.run_until_complete(main)
        warnings.filterwarnings("ignore", "coroutine '_await' was never awaited")  # the caller says which call it is
        end: dict[str, Any] = {"value": None, "error": None}
        with contextlib.redirect_stdout(self.printed), contextlib.redirect_stderr(self.printed):
            try:
                end["value"] = _to_json(self._execute(names))
            except BaseException as raised:  # noqa: BLE001  whatever it raises is its result
                end["error"] = _describe(raised)
        self.end = end
        self.stopped.set()

    def _execute(self, names: dict[str, Any]) -> Any:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self.source["has_await"] else 0
        codes = [code for code in _split(self.source["code"], flags) if code is not None]

        async def main() -> Any:
            value: Any = None
            for code in codes:
                value = eval(code, names)  # noqa: S307  this is the purpose, in a sandbox
                if code.co_flags & inspect.CO_COROUTINE:
                    value = await value
            return value

        if any(code.co_flags & inspect.CO_COROUTINE for code in codes):
            return self.loop.run_until_complete(main())
        return [eval(code, names) for code in codes][-1]  # noqa: S307  as above

    def _fix_chance(self) -> None:
        """Have random numbers come from the seed of the run."""
        random.seed(self.source["seed"])
        os.urandom = random.Random(self.source["seed"]).randbytes  # noqa: S311  the same each time is the purpose
        random._urandom = os.urandom  # type: ignore[attr-defined]  # noqa: SLF001  that of `secrets`

    def _fix_time(self) -> None:
        """Have the time come from the run, in UTC."""
        os.environ["TZ"] = "UTC"
        time.tzset()
        asyncio.sleep = self._sleep_async
        strftime, localtime = time.strftime, time.localtime
        functions: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(("time", "monotonic", "perf_counter"), lambda: self.now),
            **dict.fromkeys(("time_ns", "monotonic_ns", "perf_counter_ns"), lambda: int(self.now * 1e9)),
            **dict.fromkeys(("localtime", "gmtime"), lambda at=None: localtime(self.now if at is None else at)),
            "strftime": lambda text, at=None: strftime(text, localtime(self.now) if at is None else at),
            "sleep": self._sleep,
        }
        for name, function in functions.items():
            setattr(time, name, function)
        _fix_dates(lambda: self.now)

    def call(self, tool: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call: return its result, or what the script has to await for it."""
        number = self._record(tool, args, kwargs)
        if not self.source["has_await"]:
            return self._wait(number)
        self.waiting[number] = self.loop.create_future()
        return _await(self.waiting[number])

    def _record(self, tool: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        arguments = bind_call(tool, self.source["parameters"], args, kwargs)
        frame = sys._getframe(1)  # noqa: SLF001  the documented way to the line of the caller
        while frame.f_back is not None and frame.f_code.co_filename != _NAME:
            frame = frame.f_back
        self.calls.append({"tool": tool, "arguments": arguments, "line": frame.f_lineno})
        if len(self.calls) > self.source["max_calls"]:
            self._stop()
        return len(self.calls) - 1

    def _wait(self, number: int) -> Any:
        if number >= len(self.answers):
            self._stop()
        return self._read(self.answers[number])

    def _read(self, answer: dict[str, Any]) -> Any:
        self.now = max(self.now, answer["at"])
        if answer["error"] is None:
            return answer["value"]
        kind: Callable[[str], Exception] = getattr(builtins, answer["error_kind"])
        raise kind(answer["error"])

    def _stop(self) -> None:
        """Let the script wait for ever."""
        self.stopped.set()
        threading.Event().wait()

    def settle(self) -> None:
        """Answer all calls that the script waits for, or let it wait."""
        waiting, self.waiting = self.waiting, {}
        if not waiting or max(waiting) >= len(self.answers):
            self._stop()
        for number, future in sorted(waiting.items()):
            if future.done():  # the script has cancelled it
                continue
            try:
                future.set_result(self._read(self.answers[number]))
            except Exception as error:  # noqa: BLE001  the exception of the call
                future.set_exception(error)

    def _sleep(self, seconds: float) -> None:
        self._wait(self._record(SLEEP, (seconds,), {}))

    async def _sleep_async(self, delay: float, result: Any = None) -> Any:
        await self.call(SLEEP, delay)
        return result


class _Loop(asyncio.SelectorEventLoop):
    """Event loop whose time goes on when the script waits for no call, so that a timeout ends none."""

    def __init__(self, script: _Script) -> None:
        self.script = script
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    """Selector that shows when an event loop has nothing to do."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        if timeout is not None and not self._loop.script.waiting:
            self._loop.now += timeout + 1e-6  # beyond the next timer, whatever was rounded
        else:
            self._loop.script.settle()
        return []


async def _await(future: asyncio.Future[Any]) -> Any:
    """Make a coroutine of a future, as a call of an `async def` is one."""
    return await future


def _fix_dates(now: Callable[[], float]) -> None:
    """Replace the classes of `datetime` that know the time by some that read it from a function."""
    real = (dt.datetime, dt.date)

    class Kind(type):
        def __instancecheck__(cls, each: object) -> bool:
            return super().__instancecheck__(each) or (cls.__base__ in real and isinstance(each, cls.__base__))

    class Date(dt.date, metaclass=Kind):
        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(now())

    class DateTime(dt.datetime, metaclass=Kind):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(now(), tz)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now()

    for name, kind in (("date", Date), ("datetime", DateTime)):
        kind.__name__ = kind.__qualname__ = name
        kind.__module__ = "datetime"
        setattr(dt, name, kind)


def _to_json(value: Any) -> Any:
    """Return a value as JSON has it: sets as lists, and other values as Python shows them."""
    shown = json.dumps(value, default=lambda each: sorted(each, key=repr) if isinstance(each, set) else repr(each))
    return json.loads(shown)
