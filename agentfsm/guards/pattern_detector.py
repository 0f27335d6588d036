"""A detector of phrases that are common in injected instructions, in English and Chinese."""

from __future__ import annotations

import re
from typing import Final

import attrs

from agentfsm.core.text_safety import strip_unsafe
from agentfsm.core.value import Value
from agentfsm.ports.screening import Detector

_DROP: Final = r"\b(ignore|disregard|forget|override|bypass|discard|do not follow|don't follow|stop following)\b"
_EARLIER: Final = r"\b(previous|prior|above|preceding|earlier|before|so far|original|initial|all|any|your|every)\b"
_RULES: Final = r"\b(instruction|rule|guideline|directive|prompt|order|command|constraint)s?\b"
_TOLD: Final = r"\b(what|everything|anything|whatever)\b.{0,30}\b(told|said|asked|instructed|learned)\b"
_SHOW: Final = r"\b(reveal|print|output|repeat|show|leak|display)\b"
_PROMPT: Final = r"\b(system prompt|your (hidden |initial )?(prompt|instructions))\b"
_FREED: Final = r"\b(without|no longer|unrestricted|free|dan|jailbroken|developer mode|not bound)\b"
_DROP_ZH: Final = "(忽略|无视|忘记|忘掉|不要理会|不要遵守|不必遵守|抛开)"
_EARLIER_ZH: Final = "(之前|以上|所有|先前|前面|此前|你的|一切|任何)"
_RULES_ZH: Final = "(指令|规则|限制|提示|要求|指示|设定|约束)"
# Each pattern with its weight, from 0 to 1. The phrases are those of document H, 5.1, without its faults: a question
# about system prompts is harmless, and there are other words than "ignore".
_WEIGHTS: Final = (
    (f"{_DROP}.{{0,40}}{_EARLIER}.{{0,30}}{_RULES}", 0.9),
    (f"{_DROP}.{{0,30}}{_TOLD}", 0.9),
    (f"{_DROP_ZH}.{{0,20}}{_EARLIER_ZH}.{{0,10}}{_RULES_ZH}", 0.9),
    (f"{_SHOW}.{{0,40}}{_PROMPT}", 0.6),
    ("(输出|打印|显示|告诉我|泄露|复述|重复).{0,20}(系统提示|系统指令|system prompt|提示词)", 0.6),
    (rf"\byou are now\b.{{0,60}}{_FREED}", 0.8),
    ("你(现在|从现在起)是.{0,30}(没有|不受|无).{0,10}(限制|约束)", 0.8),
    (r"^\s{0,8}(#{2,}|\[|<\|?)\s{0,4}/?(system|instruction|im_start|inst)\b", 0.6),
    ("</?hidden>", 0.6),
    (r"\b(new|updated|real|important) (instructions?|task|directive)\s{0,2}(:|for (the|you)\b)", 0.5),
    (r"\b(do not|don't|never) (tell|inform|mention|reveal|alert)\b.{0,40}\b(the )?user\b", 0.5),
    ("(不要|不得|别)(告诉|提醒|通知|提及).{0,10}用户", 0.5),
    (r"\byou are now\b", 0.2),
    (r"\bsystem prompt\b", 0.1),
)
_PATTERNS: Final = tuple(
    [(re.compile(text, re.IGNORECASE | re.DOTALL | re.MULTILINE), weight) for text, weight in _WEIGHTS]
)


@attrs.frozen
class PatternDetector(Value, Detector):
    """Scores a text by phrases that are common in injected instructions, in English and Chinese.

    It needs no model, and it is a weak detector: text that is worded otherwise passes, and a page about prompt
    injection is found suspicious.
    """

    async def score(self, text: str) -> float:
        """Return the score of a text: 0 without a phrase, near 1 with several or a clear one."""
        readable = strip_unsafe(text)
        doubt = 1.0
        for pattern, weight in _PATTERNS:
            if pattern.search(readable):
                doubt *= 1 - weight
        return 1 - doubt
