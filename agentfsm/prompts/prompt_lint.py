"""Lint prompts before use. The findings are advice for a person, and have no effect at run time.

Source: document F, 6.3, 8.1, 8.2 and 8.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

import attrs

from agentfsm.core.value import Value
from agentfsm.prompts.assertions import CountTokens
from agentfsm.prompts.evaluation import PromptReport
from agentfsm.prompts.folder import Prompts
from agentfsm.prompts.template import LayerKind, PromptTemplate, VariableKind
from agentfsm.tokens.estimate import EstimatedCounter
from agentfsm.tools.lint import Severity

# More rules than this are followed less reliably (document F, 8.1).
MAX_RULES: Final = 7
# Tests of one version: normal, edge and adversarial input (document F, 6.3).
MIN_TESTS: Final = 10
# Tokens of the fixed text of a prompt that has no max_tokens: the share of instructions in a budget of 8,000
# (document F, 2.2).
USUAL_MAX_TOKENS: Final = 2_000

_HEADING: Final = re.compile(r"#+\s+(.*)|(.*(?:rules|constraints|principles|规则|约束|原则).*)[:：]\s*", re.IGNORECASE)  # noqa: RUF001
_RULES: Final = re.compile(r"rule|constraint|principle|规则|约束|原则", re.IGNORECASE)
_ITEM: Final = re.compile(r"\s*(?:[-*•]|\d+[.)、])\s*\S")
_BAN: Final = re.compile(r"\b(?:never|do not|don't|must not|may not|cannot)\b|禁止|不要|不得|不能", re.IGNORECASE)
# What makes a rule of an item of a list that stands below no heading of rules.
_ORDER: Final = re.compile(
    rf"{_BAN.pattern}|\b(?:always|must|should|shall|only|avoid|make sure|ensure|required?)\b"
    r"|必须|应当|应该|总是|只能|务必|避免|确保"
    # an imperative at the beginning; numbered ones are steps
    r"|^\s*[-*•]\s*(?:please\s+)?(?:add|answer|apologi[sz]e|ask|be|begin|call|check|cite|confirm|end|explain|follow|format|give"
    r"|greet|include|keep|limit|list|mention|name|offer|prefer|put|quote|refer|refuse|repeat|reply|respond|return|round|say"
    r"|show|sign|speak|start|state|stay|stick|summari[sz]e|tell|thank|translate|treat|use|verify|write)\b"
    r"|^\s*[-*•]\s*(?:请|回答|使用|保持|引用|说明|检查|调用|返回|确认)",
    re.IGNORECASE,
)
_SENTENCE: Final = re.compile(r"(?:[.;。；!！?？]\s|\n)")  # noqa: RUF001  Chinese ends sentences so
_EXIT: Final = re.compile(
    r"\b(?:clarif\w+|refus\w+|declin\w+|escalat\w+|ask (?:the|a|for|back)|say so|(?:do not|don't) know|[\"']none[\"'])"
    r"|澄清|拒绝|不知道|询问",
    re.IGNORECASE,
)
_OTHER_PLACEHOLDER: Final = re.compile(r"(?<![{\w])\$?\{([a-z_]\w*)\}(?!\})")
# Words for one change, as prompts and tool descriptions write them.
_CHANGES: Final = tuple(
    re.compile(rf"\b(?:{words})(?:s|d|es|ed|ing|ion)?\b|{chinese}", re.IGNORECASE)
    for words, chinese in (
        ("delet|delete|remov|remove|eras|erase|drop|purge", "删除"),
        ("send|sent|mail|email|post|publish", "发送"),
        ("pay|paid|charge|charg|transfer|refund|purchase|buy", "支付|付款"),
        ("write|writ|update|updat|save|sav|create|creat|change|modify", "写入|更新|保存|创建|修改"),
        ("execute|execut|run|deploy|install", "执行|部署"),
    )
)


class DescribedTool(Protocol):
    """A tool as far as the linter reads it; `agentfsm.Tool` is one."""

    @property
    def name(self) -> str:
        """Name of the tool."""
        ...

    @property
    def description(self) -> str:
        """Description for the model."""
        ...


@attrs.frozen(kw_only=True)
class PromptFinding(Value):
    """A possible improvement of a prompt."""

    prompt: str
    """Name and version of the prompt: "billing 1.4.0"."""

    severity: Severity
    """"warning" for a probable mistake, "hint" for a possible improvement."""

    message: str
    """The problem, its reason, and the remedy."""


def lint_prompt(
    prompt: PromptTemplate,
    *,
    tools: Iterable[DescribedTool] = (),
    results: Sequence[PromptReport] | None = None,
    count: CountTokens | None = None,
) -> tuple[PromptFinding, ...]:
    """Check a prompt and return the findings.

    Args:
        prompt: The prompt.
        tools: Tools that the model is offered beside it.
        results: Recorded results of this version, the oldest first. None: results are not checked.
        count: Function that counts tokens; None: an estimate.
    """
    found = [
        *_check_rules(prompt),
        *_check_bans(prompt, tools),
        *_check_exit(prompt),
        *_check_variables(prompt),
        *_check_size(prompt, count or EstimatedCounter().count),
        *(_check_results(prompt, results) if results is not None else ()),
    ]
    label = f"{prompt.name} {prompt.version}"
    return tuple(PromptFinding(prompt=label, severity=severity, message=message) for severity, message in found)


def lint_prompts(prompts: Prompts, *, tools: Iterable[DescribedTool] = ()) -> tuple[PromptFinding, ...]:
    """Check the version of each prompt of a folder that is in use, and that one was activated."""
    offered = tuple(tools)
    found: list[PromptFinding] = []
    for name in prompts.names:
        prompt = prompts[name]
        found += lint_prompt(prompt, tools=offered, results=prompts.results(prompt))
        if prompts.active(name) is None:
            message = "no version was activated, so the newest file is in use: activate the version that was tested"
            found.append(PromptFinding(prompt=f"{name} {prompt.version}", severity="hint", message=message))
    return tuple(found)


def _literals(prompt: PromptTemplate) -> str:
    return "".join(part if isinstance(part, str) else f" {part.name} " for part in prompt.parts)


def _check_rules(prompt: PromptTemplate) -> Iterator[tuple[Severity, str]]:
    rules, is_rules, items = 0, False, list[str]()
    for line in [*_literals(prompt).splitlines(), "# End"]:
        heading = _HEADING.fullmatch(line.strip())
        if _ITEM.match(line) and heading is None:
            items.append(line)
        elif heading is not None or (line.strip() and not line[0].isspace()):  # the list is over
            if is_rules or sum(_ORDER.search(item) is not None for item in items) * 2 > len(items):
                rules += len(items)
            items = []
        if heading is not None:
            is_rules = _RULES.search(heading[0]) is not None
    if rules > MAX_RULES:
        message = "models forget the middle of a long list: keep the most important, the critical ones first and last"
        yield "warning", f"{rules} rules, more than {MAX_RULES}; {message}"


def _check_bans(prompt: PromptTemplate, tools: Iterable[DescribedTool]) -> Iterator[tuple[Severity, str]]:
    bans = [sentence.strip() for sentence in _SENTENCE.split(_literals(prompt)) if _BAN.search(sentence)]
    for tool in tools:
        described = f"{tool.name.replace('_', ' ')}. {tool.description}"
        for ban in bans:
            if any(change.search(ban) and change.search(described) for change in _CHANGES):
                message = (
                    f"it forbids {ban[:100]!r}, and the tool {tool.name} says that it does this: do not offer the "
                    "tool, or say here which of the two holds"
                )
                yield "warning", message
                break


def _check_exit(prompt: PromptTemplate) -> Iterator[tuple[Severity, str]]:
    if prompt.layer is LayerKind.SYSTEM and not _EXIT.search(_literals(prompt)):
        message = (
            "it offers no exit, so the model has to invent an answer: allow it to ask or to refuse, for example with "
            "output_type=Answer | Clarify | Refuse, and say so"
        )
        yield "hint", message


def _check_variables(prompt: PromptTemplate) -> Iterator[tuple[Severity, str]]:
    used = {part.name for part in prompt.parts if not isinstance(part, str)}
    if unused := sorted(prompt.variables.keys() - used):
        message = f"its text has no place for {', '.join(unused)}: write {{{{{unused[0]}}}}}, or remove the declaration"
        yield "warning", message
    text = "".join(part for part in prompt.parts if isinstance(part, str))
    if other := sorted({found[0] for found in _OTHER_PLACEHOLDER.finditer(text)}):
        message = f"{', '.join(other)} stays as it is written: a variable has two braces, {{{{name}}}}"
        yield "warning", message
    if prompt.layer is LayerKind.USER and (
        plain := [each.name for each in prompt.declared if each.kind is VariableKind.TEXT]
    ):
        yield "hint", f"{', '.join(plain)} stands in the layer of the user as text: declare it as untrusted"


def _check_size(prompt: PromptTemplate, count: CountTokens) -> Iterator[tuple[Severity, str]]:
    tokens = count("".join(part for part in prompt.parts if isinstance(part, str)))
    most = prompt.max_tokens or USUAL_MAX_TOKENS
    if tokens > most:
        own = "max_tokens" if prompt.max_tokens else "the usual share of instructions"
        yield "warning", f"about {tokens:,} tokens without its values, more than {own} of {most:,}: shorten it"


def _check_results(prompt: PromptTemplate, results: Sequence[PromptReport]) -> Iterator[tuple[Severity, str]]:
    if not results:
        command = f"agentfsm prompts test {prompt.name}@{prompt.version}"
        yield "warning", f"there are no test results for this version: run `{command}`"
    elif not results[-1].passed:
        failed = ", ".join(test.name for test in results[-1].tests if test.rate < results[-1].pass_rate)
        yield "warning", f"its newest results are below {results[-1].pass_rate:.0%} in {failed}"
    if len(prompt.tests) < MIN_TESTS:
        number = f"{len(prompt.tests)} test{'' if len(prompt.tests) == 1 else 's'}"
        yield "hint", f"{number}; write {MIN_TESTS} or more: usual requests, edge cases, and attacks"
