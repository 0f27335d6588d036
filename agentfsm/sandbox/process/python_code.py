"""Run Python code that a model wrote. The function below is loaded from this file, inside a sandbox."""

from __future__ import annotations

import ast
import contextlib
import io
import traceback
from typing import Any, Final

# Characters of the output of the code that are kept, and of the value of its last line.
_MAX_PRINTED_CHARS: Final = 50_000
_MAX_RESULT_CHARS: Final = 20_000
_MAX_ERROR_CHARS: Final = 4_000
_NAME: Final = "<code>"


class _Printed(io.TextIOBase):
    """The beginning of the output of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = io.StringIO()
        self.chars = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.kept.write(text[: max(0, _MAX_PRINTED_CHARS - self.chars)])
        self.chars += len(text)
        return len(text)

    def __str__(self) -> str:
        dropped = self.chars - _MAX_PRINTED_CHARS
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


def _split(code: str) -> tuple[Any, Any]:
    """Return the compiled statements, and the compiled expression of the last line if it is one."""
    tree = ast.parse(code, _NAME)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = compile(ast.Expression(tree.body.pop().value), _NAME, "eval")  # type: ignore[attr-defined]
    return compile(tree, _NAME, "exec"), last


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
