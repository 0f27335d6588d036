"""Lint tools before use: find problems that make them hard to choose or call, or unsafe to run.

The checks judge names and descriptions, for a person to review. They have no effect at run time, when only declarations
count.

Source: document E, 3.2, 3.3, 9.1, 9.2 and 10; document C, 2.2.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs

from agentfsm.core.labels import Label, ToolKind
from agentfsm.core.value import Value
from agentfsm.tokens.ledger import estimate_tokens

if TYPE_CHECKING:
    from agentfsm.tools.tool import Tool

# Minimum of words of a description: fewer add nothing to the name.
MIN_DESCRIPTION_WORDS: Final = 3
# Maximum of parameters: more suggest a tool that does several things (document E, 3.3).
MAX_PARAMETERS: Final = 10
# Maximum of nesting levels of objects and lists, counted from an argument: a filter with a list of ranges.
MAX_NESTING: Final = 3
# Maximum of tokens of one definition, the upper end of the usual (document E, 9.2).
MAX_DEFINITION_TOKENS: Final = 500
# Maximum of tools offered at once; with more, models choose wrongly more often (document E, 9.1).
MAX_OFFERED_TOOLS: Final = 20

# First words of names that suggest a tool without side effects.
READING_VERBS: Final = frozenset({"search", "get", "check", "list", "find", "read", "fetch"})
# First words of names that suggest a tool with side effects.
CHANGING_VERBS: Final = frozenset({"save", "update", "delete", "send", "write", "create", "pay", "generate"})

# Words of a name in snake_case or camelCase.
_NAME_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Words in prose. Chinese and Japanese have no spaces; about every two characters are a word. The pattern is compiled on
# first use: so wide a range takes 2 ms, which would slow down `import agentfsm`.
_WORD: Final = r"[\u3040-\u30ff\u3400-\u9fff]{1,2}|[^\W_\u3040-\u30ff\u3400-\u9fff]+"
# Words that add nothing to a name.
_FILLER_WORDS: Final = frozenset({"a", "an", "the", "this", "tool", "function"})
_SENTENCE_END: Final = re.compile(r"[.;。；\n]")  # noqa: RUF001  Chinese ends sentences so
_NEGATION: Final = re.compile(r"\b(?:not|never|no|nothing|cannot|without)\b|n't\b|不|无", re.IGNORECASE)
# A verb that begins a clause. Elsewhere it is often a noun, or has another subject.
_CHANGE_VERB: Final = re.compile(
    r"(?:^|[,，]|\b(?:and|then|or)\b|并)\s*"  # noqa: RUF001  a Chinese comma
    r"((?:delete|remove|send|save|create|update|write|insert|charge|pay)s?\b|删除|发送|保存|创建|更新)",
    re.IGNORECASE,
)

# A warning: something will probably go wrong. A hint: something could be better.
Severity: TypeAlias = Literal["warning", "hint"]
CountTokens: TypeAlias = Callable[[str], int]
_Tool: TypeAlias = "Tool[..., Any]"
_Schema: TypeAlias = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Finding(Value):
    """A possible improvement of a tool."""

    tool: str | None
    """Name of the tool; None for a finding about all tools."""

    severity: Severity
    """"warning" for a probable mistake, "hint" for a possible improvement."""

    message: str
    """The problem, its reason, and the remedy."""


def lint_tools(tools: Iterable[_Tool], count: CountTokens | None = None) -> tuple[Finding, ...]:
    """Check tools and return the findings. Nothing is called or changed.

    Args:
        tools: A registry, or any tools.
        count: Function that counts the tokens of a text. None: tokens are estimated from bytes.

    Returns:
        The findings, tool by tool; those about all tools come last.
    """
    looked_at = tuple(tools)
    reader = next((tool.name for tool in looked_at if Label.UNTRUSTED in tool.labels), None)
    found: list[Finding] = []
    for tool in looked_at:
        found += [
            *_check_description(tool),
            *_check_declarations(tool),
            *_check_effects(tool, reader),
            *_check_parameters(tool),
            *_check_nesting(tool),
            *_check_size(tool, count),
        ]
    offered = sum(tool.enabled is True for tool in looked_at)
    if offered > MAX_OFFERED_TOOLS:
        message = (
            f"{offered} tools are always offered together, and beyond {MAX_OFFERED_TOOLS} models choose worse: offer "
            "fewer with registry.filter(...) or @tool(enabled=...), or share them among several agents"
        )
        found.append(Finding(tool=None, severity="hint", message=message))
    return tuple(found)


def _warning(tool: _Tool, message: str) -> Finding:
    return Finding(tool=tool.name, severity="warning", message=message)


def _hint(tool: _Tool, message: str) -> Finding:
    return Finding(tool=tool.name, severity="hint", message=message)


# Checks of the name and the description.


def _check_description(tool: _Tool) -> Iterator[Finding]:
    if not tool.description.strip():
        message = "it has no description, so the model knows only its name: give the function a docstring"
        yield _warning(tool, message)
        return
    words = [word.lower() for word in re.findall(_WORD, tool.description)]
    if len(words) < MIN_DESCRIPTION_WORDS or _stems(words) <= _stems(_name_words(tool)) | _FILLER_WORDS:
        message = (
            f"its description, {' '.join(tool.description.split())!r}, says no more than its name: describe its "
            "effect, its result and its limits, in two or three sentences"
        )
        yield _hint(tool, message)


def _name_words(tool: _Tool) -> list[str]:
    return [word.lower() for word in _NAME_WORD.findall(tool.name)]


def _stems(words: Iterable[str]) -> set[str]:
    return {word.removesuffix("s") for word in words}


def _check_declarations(tool: _Tool) -> Iterator[Finding]:
    first = next(iter(_name_words(tool)), "")
    change = f"is named {tool.name}" if first in CHANGING_VERBS else _find_described_change(tool.description)
    if change and tool.read_only:
        message = (
            f"it {change}, and is declared read_only: it may start early, overlap other calls, and run again after a "
            "crash. If it changes anything, remove read_only"
        )
        yield _warning(tool, message)
    elif change and tool.concurrency_safe is True and tool.locks is None:
        message = (
            f"it {change}, and is declared concurrency_safe: it may overlap itself. If two calls can "
            "conflict, remove that, or declare with locks= the resources that a call uses"
        )
        yield _warning(tool, message)
    if first in READING_VERBS and not (tool.read_only or tool.concurrency_safe or tool.locks):
        message = (
            f"it is named {tool.name} and declares nothing, so it runs alone and is never repeated: if it changes "
            "nothing, write @tool(read_only=True)"
        )
        yield _hint(tool, message)


def _check_effects(tool: _Tool, reader: str | None) -> Iterator[Finding]:
    """Find a tool that may change something and declares no effect, beside one that reads texts of strangers.

    The texts may ask for its calls. `reader` is the name of the other tool; None if there is none.
    """
    if reader is None or tool.read_only or tool.harmless or tool.effect_labels or tool.requires_approval is not False:
        return
    if tool.external or tool.kind is ToolKind.AGENT:  # a person answers it; the calls of the agent are looked at
        return
    advice = (
        "declare irreversible= or sends_out= if others notice it or it gives power, harmless= with the reason if it "
        "may run without a question, read_only= if nothing changes"
    )
    yield _warning(
        tool,
        f"it may change something and declares no effect, and {reader} reads texts of strangers, which may ask for a "
        f"call: {advice}",
    )


def _find_described_change(description: str) -> str | None:
    for sentence in _SENTENCE_END.split(description):
        if not _NEGATION.search(sentence) and (found := _CHANGE_VERB.search(sentence.strip())):
            return f"says {found[1]!r} in its description"
    return None


# Checks of the parameters.


def _check_parameters(tool: _Tool) -> Iterator[Finding]:
    properties, types = _get_mapping(tool.parameters, "properties"), _definitions(tool.parameters)
    if silent := [name for name, schema in properties.items() if not _is_described(schema, types)]:
        message = (
            f"no description of {_join_names(silent)}: the model guesses from the name. Write a sentence and an "
            "example for each, in the docstring under Args"
        )
        yield _hint(tool, message)
    if short := [name for name in properties if len(name) == 1]:
        yield _hint(
            tool,
            f"parameters called {_join_names(short)}: models infer meaning from names, so write the word out",
        )
    if len(properties) > MAX_PARAMETERS:
        message = f"{len(properties)} parameters; more than {MAX_PARAMETERS} suggest several tools in one"
        yield _hint(tool, f"{message}: split it")


def _is_described(schema: Any, types: _Schema) -> bool:
    if not isinstance(schema, Mapping):  # a schema may also be just true or false
        return False
    return bool(schema.get("description") or _get_mapping(types, _referenced_name(schema)).get("description"))


def _check_nesting(tool: _Tool) -> Iterator[Finding]:
    levels = _measure_nesting(tool.parameters, _definitions(tool.parameters), {}) - 1  # the arguments' own object
    if levels > MAX_NESTING:
        deep = "without end" if math.isinf(levels) else f"{levels:.0f} levels deep"
        message = (
            f"its arguments are nested {deep}, and models make more mistakes in deep values: keep to "
            f"{MAX_NESTING} levels"
        )
        yield _hint(tool, message)


def _measure_nesting(schema: _Schema, types: _Schema, known: dict[str, float]) -> float:
    """Return the maximum depth of nested objects and lists; infinite for a recursive type."""
    target = _referenced_name(schema)
    if target and target not in known:
        known[target] = math.inf  # for a reference to itself
        known[target] = _measure_nesting(_get_mapping(types, target), types, known)
    inside = [schema.get("items"), schema.get("additionalProperties"), *schema.get("prefixItems", ())]
    inside += [*_get_mapping(schema, "properties").values(), *_get_mapping(schema, "patternProperties").values()]
    held = [_measure_nesting(each, types, known) for each in inside if isinstance(each, Mapping)]
    is_bracket = bool(held) or schema.get("type") in ("object", "array")
    branches = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key, ())]
    return max(
        is_bracket + max(held, default=0),
        known.get(target, 0),
        *(_measure_nesting(branch, types, known) for branch in branches if isinstance(branch, Mapping)),
    )


def _check_size(tool: _Tool, count: CountTokens | None) -> Iterator[Finding]:
    text = json.dumps(tool.definition.openai(), ensure_ascii=False, default=str)
    tokens = (count or estimate_tokens)(text)
    if tokens > MAX_DEFINITION_TOKENS:
        message = (
            f"its definition has {'about ' if count is None else ''}{tokens:,} tokens, which every request pays for; "
            f"{MAX_DEFINITION_TOKENS} are enough: shorten the descriptions, and use enumerations instead of "
            "listing values in words"
        )
        yield _hint(tool, message)


def _get_mapping(schema: _Schema, key: str) -> _Schema:
    part = schema.get(key)
    return part if isinstance(part, Mapping) else {}


def _definitions(schema: _Schema) -> _Schema:
    return {**_get_mapping(schema, "definitions"), **_get_mapping(schema, "$defs")}


def _referenced_name(schema: _Schema) -> str:
    """Return the name of the type that a schema refers to, or an empty string."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _join_names(names: list[str]) -> str:
    more = len(names) - MAX_PARAMETERS
    return ", ".join(names[:MAX_PARAMETERS]) + (f" and {more} more" if more > 0 else "")
