"""Ask a person about calls with effects after a detector has found a text suspicious; and a detector of phrases."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm._lib.newest import Newest
from agentfsm.core.errors import MisuseError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.text_safety import strip_unsafe
from agentfsm.core.validation import COUNT, SECONDS, is_number, require_between, require_members
from agentfsm.core.value import Value
from agentfsm.ports.guards import CallGuard, GuardDecision
from agentfsm.ports.screening import Detector, TextScreen

if TYPE_CHECKING:
    from agentfsm.ports.guards import GuardedCall, ToolTraits
    from agentfsm.ports.screening import ScreenedText

# Characters of a window: below the 512 tokens that small classifiers read, for most texts in English.
WINDOW_CHARS: Final = 1_600
# Part of a window that the next one repeats, so that a sentence at its end is read whole.
_OVERLAP: Final = 1 / 8
_KNOWN_SCORES: Final = 1_000
_MAX_ERROR_CHARS: Final = 200
_SCORE: Final = require_between(0, 1)
_DETECTOR: Final = require_members("score", wanted="a detector, an object with a method score, as PatternDetector()")


@attrs.define(eq=False, kw_only=True)
class Detection(CallGuard, TextScreen):
    """A guard that asks about calls with effects once a detector scores a text above a threshold.

    `Agent(guards=[Guard.default(), Detection(detector=PatternDetector(), threshold=0.5)])`. The texts are the results
    of calls with the label `untrusted`, and the inputs. They are scored when a call is to be decided on that is not
    read-only, sends out or cannot be undone, so a run that only reads is not delayed. The decision is in the journal
    before the call, with the score and the source of the text, and is not made again after a crash or in a replay. It
    can only add a question: calls that rules refuse stay refused.

    If the detector fails or takes too long, a person is asked too, and the reason says so.
    """

    detector: Detector
    """Scores the texts."""

    threshold: float
    """Score above which a person is asked, from 0 to 1; `calibrate` measures one."""

    seconds: float = 10.0
    """Seconds for all texts of a decision, above 0."""

    window_chars: int = WINDOW_CHARS
    """Characters of the windows in which long texts are scored, 1 or more; the highest score counts."""

    _scores: Newest[bytes, float] = attrs.field(factory=lambda: Newest(_KNOWN_SCORES), init=False, repr=False)
    """Scores of the texts scored last, by their hash."""

    def __attrs_post_init__(self) -> None:
        _DETECTOR.check("Detection", "detector", self.detector)
        _SCORE.check("Detection", "threshold", self.threshold)
        SECONDS.check("Detection", "seconds", self.seconds)
        COUNT.check("Detection", "window_chars", self.window_chars)

    def __str__(self) -> str:
        return f"Detection({type(self.detector).__name__}, {self.threshold:g})"

    @property
    def screens(self) -> Sequence[TextScreen]:
        """The screen that the engine asks: this object."""
        return (self,)

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether calls of the tool can have an effect."""
        return not tool.read_only or bool(tool.effects)

    def decide(self, call: GuardedCall) -> GuardDecision | None:  # noqa: ARG002  the texts decide
        """Return None: calls are decided on by `screen`."""
        return None

    async def screen(self, texts: Sequence[ScreenedText]) -> GuardDecision | None:
        """Return the decision to ask if a text has a score above the threshold, or could not be scored."""
        name = type(self.detector).__name__
        place = "the texts"
        try:
            with anyio.fail_after(self.seconds):
                for each in texts:
                    place = each.place
                    score = await self._score(each.text)
                    if score > self.threshold:
                        found = f"{name} scores {each.place} with {score:.2f}, above {self.threshold:g}"
                        return self._ask(found, each)
        except Exception as error:  # noqa: BLE001  a detector that fails must not let calls pass
            problem = f"{type(error).__name__}: {error}".rstrip(": ")[:_MAX_ERROR_CHARS]
            return self._ask(f"{name} could not score {place} ({problem})")
        return None

    def _ask(self, reason: str, text: ScreenedText | None = None) -> GuardDecision:
        sources = () if text is None or text.source is None else (text.source,)
        return GuardDecision(verdict=GuardVerdict.ASK, rule=str(self), reason=reason, labels=sources)

    async def _score(self, text: str) -> float:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if digest not in self._scores:
            score = await score_windows(self.detector, text, window_chars=self.window_chars)
            self._scores[digest] = score
        return self._scores[digest]


def split_windows(text: str, window_chars: int) -> Iterator[str]:
    """Yield the windows of a text, in order; each begins with the last eighth of the one before."""
    step = max(1, window_chars - int(window_chars * _OVERLAP))
    yield text[:window_chars]
    for start in range(step, max(step, len(text) - window_chars + step), step):
        yield text[start : start + window_chars]


async def score_windows(detector: Detector, text: str, *, window_chars: int = WINDOW_CHARS) -> float:
    """Return the highest score of the windows of a text.

    Args:
        detector: The detector.
        text: The text.
        window_chars: Characters of a window, 1 or more.

    Raises:
        ValueError: if a score is not a number from 0 to 1.
    """
    scores: list[float] = []
    for window in split_windows(text, window_chars):
        score = await detector.score(window)
        if not _SCORE.fits(score):
            raise ValueError(f"the score {score!r} is not a number from 0 to 1")
        scores.append(score)
    return max(scores)


async def calibrate(
    detector: Detector, texts: Iterable[str], *, false_alarms: float = 0.01, window_chars: int = WINDOW_CHARS
) -> float:
    """Return the lowest threshold at which a share of harmless texts, at most, is found suspicious.

    Args:
        detector: The detector.
        texts: Harmless texts of your own traffic, such as results of your tools: `1 / false_alarms` of them or more.
        false_alarms: Share of the texts with a score above the threshold, above 0 and below 1.
        window_chars: Characters of a window, as for `Detection`.

    Returns:
        The score of one of the texts. It holds for texts like these; it says nothing of the attacks that are found.

    Raises:
        MisuseError: if there are too few texts for that share, or it is not a share.
    """
    given = list(texts)
    if not (is_number(false_alarms) and 0 < false_alarms < 1):
        raise MisuseError(f"calibrate(false_alarms={false_alarms!r}): give a share above 0 and below 1, such as 0.01")
    needed = math.ceil(1 / false_alarms)
    if len(given) < needed:
        raise MisuseError(
            f"calibrate: {len(given)} texts cannot show a share of {false_alarms:g} false alarms: give {needed} or more"
        )
    scores = sorted([await score_windows(detector, text, window_chars=window_chars) for text in given])
    return scores[len(scores) - 1 - math.floor(false_alarms * len(scores))]


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
