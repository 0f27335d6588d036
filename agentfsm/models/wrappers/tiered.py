"""Answer each request with the smallest model that is good enough for it, and ask the next one if it is not.

The choice follows these rules, the first that applies:

1. *The purpose.* Requests beside the turns (a summary, a selection among tools, a judgement) go to the first tier.
2. *The run.* A turn keeps the tier of the turn before, which the journal records, so that the caches of the provider
   hold, also after a crash. The rule of the user may move a run up, never down.
3. *The rule* of the user names a tier for the first turn.
4. *The classifier*, a small model, reads the task and names a tier.
5. Without any of these, the last tier answers: a weaker model gets only tasks that are known to suit it.

A reply that is a refusal, that cannot be used, or that gets a low score is replaced by that of the next tier, at once
and within the same request. Its tokens are counted, at the price of its own model. If a tier fails, the retry of the
request begins with it, so the tiers below are not paid again.

Source: documents H, 4.3 and A, 8.1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import attrs

from agentfsm.core.errors import MisuseError, ModelError, ModelReplyError
from agentfsm.core.messages import TextPart, UserMessage
from agentfsm.core.settings import Settings
from agentfsm.core.usage import KEPT, Purpose, Spending, TierChoice, Usage
from agentfsm.core.validation import shorten_repr
from agentfsm.models.model_names import resolve_model
from agentfsm.models.wrappers.base import CompositeModel, ask_model
from agentfsm.ports.model import FinishReason, Request
from agentfsm.tokens.billing import attach_usage, estimate_request_tokens, estimate_written_tokens
from agentfsm.tokens.ledger import BYTE_COUNTER

if TYPE_CHECKING:
    from agentfsm.ports.model import Chunk, Emit, Model, Reply

Escalation: TypeAlias = Literal["refusal", "bad_reply"]
# Returns the name of a tier, or None for no opinion; a plain function must not block, an async one may wait.
ChooseTier: TypeAlias = "Callable[[Request], str | Awaitable[str | None] | None]"
# Returns how good a reply is, from 0 to 1.
ScoreReply: TypeAlias = "Callable[[Request, Reply], float | Awaitable[float]]"

# Purposes whose requests are short tasks that small models do well: documents H, 4.3 and A, 8.1.
SMALL_PURPOSES: Final = frozenset({Purpose.SUMMARY, Purpose.TOOL_SELECTION, Purpose.JUDGE})
# Maximum characters of a task that a classifier reads: the kind of a task is seen in its beginning.
CLASSIFIED_CHARS: Final = 4_000
# Maximum tokens of the answer of a classifier: a name, and the reasoning of models that cannot answer without.
CLASSIFIER_TOKENS: Final = 1_024

_ESCALATIONS: Final = frozenset(get_args(Escalation))
_NO_USAGE: Final = Usage()


def _check_tiers(_owner: object, _attribute: object, tiers: Mapping[str, str]) -> None:
    if not isinstance(tiers, Mapping) or not all(isinstance(each, str) and each for each in (*tiers, *tiers.values())):
        raise MisuseError(
            f"TierClassifier(tiers={shorten_repr(tiers)}): give the name of each tier with a sentence on its tasks"
        )


@attrs.define(eq=False)
class TierClassifier:
    """Asks a model which tier a task needs; for `Tiered(classifier=...)`.

    It reads the newest message of the user, and its answer decides on cost alone: a task that is written to be given to
    a large model costs more, and has no other effect.

    Args:
        model: The model that decides, or its string; a small one.
        tiers: For each tier, the tasks that it is for, in a sentence. All tiers of the `Tiered` must be there.
    """

    model: Model = attrs.field(converter=resolve_model)
    """The model that decides; a small one."""

    tiers: Mapping[str, str] = attrs.field(validator=_check_tiers)
    """For each tier, the tasks that it is for, in a sentence."""

    async def classify(self, request: Request) -> tuple[str | None, Usage]:
        """Return the tier that the model names, with the usage. None: it named no tier, or could not be asked."""
        listed = "\n".join([f"- {name}: {tasks}" for name, tasks in self.tiers.items()])
        own = [each for each in request.messages if isinstance(each, UserMessage) and not each.is_note]
        task = own[-1].text if own else ""
        asked = Request(
            instructions=f"You choose who works on a task. Reply with one of these names and nothing else.\n{listed}",
            messages=(UserMessage(parts=(TextPart(text=task[:CLASSIFIED_CHARS]),)),),
            passing=1,
            settings=Settings(max_tokens=CLASSIFIER_TOKENS),
            timeout_s=request.timeout_s,
            purpose=Purpose.ROUTING,
            run=request.run,
        )
        try:
            reply = await ask_model(self.model, asked, None)
        except ModelError as error:
            return None, error.usage or _NO_USAGE
        named = reply.text.strip().strip("\"'`.*").lower()
        tier = next((name for name in self.tiers if name.lower() == named), None)
        return tier, _count_usage(self.model, asked, reply)


class Tiered(CompositeModel):
    """Model that answers each request with one of several tiers, the smallest one first.

    Example: turns with tools go to the large model, and all else to the small one.

        Tiered(
            {"small": "openai:gpt-5.4-mini", "large": "openai:gpt-5.4"},
            choose=lambda request: "large" if request.tools else "small",
        )

    The journal records the tier of each turn with the reason (`event.tier`) and the model (`event.model`). A request
    that escalates costs the replies of all tiers that were asked; the money reserved for it covers them. The reply of a
    tier that may be replaced is streamed when it is complete; the last tier streams at once.

    Args:
        tiers: Models by the names of their tiers, the cheapest first; two or more. Their names must differ.
        choose: Function from a request to a tier, plain or async. It may read `request.run` (its turn, its labels, its
            header), the tools, the messages and the purpose. None, its result or itself, for no opinion.
        purposes: The tier for each purpose that it names, over the defaults: the first tier for summaries, selections
            of tools and judgements.
        classifier: Model that names the tier of a run, if `choose` has no opinion; asked once for each run.
        escalate_on: Reasons for the next tier to answer: "refusal" of the model, "bad_reply" that cannot be used
            (ModelReplyError, or empty). Default both.
        score: Function of the request and the reply, plain or async, that returns how good the reply is, from 0 to 1. A
            reply below `min_score` makes the next tier answer. None: replies are not scored.
        min_score: The lowest score of a reply that is used, 0 to 1. Default 0.5.

    Raises:
        MisuseError: when an argument is invalid, or the models have no common output mode.
    """

    def __init__(
        self,
        tiers: Mapping[str, Model | str],
        choose: ChooseTier | None = None,
        *,
        purposes: Mapping[Purpose, str] | None = None,
        classifier: TierClassifier | None = None,
        escalate_on: Collection[Escalation] = ("refusal", "bad_reply"),
        score: ScoreReply | None = None,
        min_score: float = 0.5,
    ) -> None:
        if not isinstance(tiers, Mapping) or len(tiers) < 2:
            raise MisuseError(
                'Tiered needs two tiers or more, the cheapest first: {"small": "openai:gpt-5.4-mini", "large": ...}'
            )
        if isinstance(escalate_on, str) or not set(escalate_on) <= _ESCALATIONS:
            raise MisuseError(
                f"Tiered(escalate_on={shorten_repr(escalate_on)}): give a list of some of "
                f"{', '.join(sorted(_ESCALATIONS))}"
            )
        if not 0 <= min_score <= 1:
            raise MisuseError(f"Tiered(min_score={min_score}): give 0 to 1")
        super().__init__(" or ", tiers.values())
        self._tiers = tuple(tiers)
        self._places = {name: place for place, name in enumerate(self._tiers)}
        small = dict.fromkeys(SMALL_PURPOSES, self._tiers[0])
        self._purposes = {
            Purpose(purpose): self._find_place(tier) for purpose, tier in {**small, **(purposes or {})}.items()
        }
        self._choose, self._classifier = choose, classifier
        if classifier is not None and (missing := self._places.keys() ^ classifier.tiers.keys()):
            raise MisuseError(
                f"Tiered and its TierClassifier have different tiers ({', '.join(sorted(missing))}): describe each tier"
            )
        self._escalate_on, self._score, self._min_score = frozenset(escalate_on), score, min_score

    def cost_usd(self, usage: Usage) -> float | None:
        """Return the highest cost of one request in US dollars: that of all tiers if it may escalate.

        It reserves money before a request. The replies themselves are priced by the models that gave them.
        """
        if not self._may_escalate:
            return super().cost_usd(usage)
        total = 0.0
        for model in self.models:
            if (cost := model.cost_usd(usage)) is None:
                return None
            total += cost
        return total

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask the chosen tier, and the next one as long as the reply is not good enough; see `Model.reply`.

        Raises:
            ModelError: also if one of the models does not support a setting: any of them may have to answer. It has
                the tier that failed, and the usage of all replies that were paid.
            MisuseError: when a function of the user fails, or names an unknown tier. It has the usage as well.
        """
        if (why := self.unsupported_settings(request.settings)) is not None:
            raise ModelError(why)
        spent: list[Spending] = []
        place, reason = await self._choose_place(request, spent)
        while True:
            reply = None
            model, is_last = self.models[place], place + 1 == len(self.models)
            held: list[Chunk] = []
            receive = emit if emit is None or is_last or not self._may_escalate else held.append
            try:
                reply = await ask_model(model, request, receive)
                flaw = None if is_last else await self._find_flaw(request, reply)
            except BaseException as error:
                is_bad_reply = isinstance(error, ModelReplyError) and "bad_reply" in self._escalate_on
                if is_last or reply is not None or not is_bad_reply:
                    if reply is not None:  # `score` failed
                        spent.append(_build_spending(model, request, reply))
                    _complete_error(error, spent, TierChoice(name=self._tiers[place], reason=reason))
                    raise
                flaw, lost = "bad reply", getattr(error, "usage", None) or _NO_USAGE
                spent.append(Spending(purpose=request.purpose, usage=lost, model=model.name))
            else:
                if flaw is None:
                    for chunk in held:
                        emit(chunk)  # type: ignore[misc]  # held only if there is one
                    choice = TierChoice(name=self._tiers[place], reason=reason, spent=tuple(spent))
                    usage = _sum_usage(spent, _count_usage(model, request, reply)) if spent else reply.usage
                    return attrs.evolve(reply, tier=choice, usage=usage)
                spent.append(_build_spending(model, request, reply))
            reason = f"escalated from {self._tiers[place]}: {flaw}"
            place += 1

    async def aclose(self) -> None:
        """Close all models, and that of the classifier."""
        try:
            await super().aclose()
        finally:
            if self._classifier is not None:
                await self._classifier.model.aclose()

    @property
    def _may_escalate(self) -> bool:
        return bool(self._escalate_on) or self._score is not None

    async def _choose_place(self, request: Request, spent: list[Spending]) -> tuple[int, str]:
        """Return the index of the tier, and the reason; add the usage of the classifier to `spent`."""
        if request.tier is not None and (place := self._places.get(request.tier.name)) is not None:
            return place, request.tier.reason
        if (place := self._purposes.get(request.purpose)) is not None:
            return place, f"purpose {request.purpose}"
        kept = None if request.run is None else self._places.get(request.run.tier)
        last = len(self.models) - 1
        ruled = None
        if self._choose is not None and kept != last:
            chosen = await _call("choose", self._choose, request)
            ruled = None if chosen is None else self._find_place(chosen)
        if kept is not None:
            return (kept, KEPT) if ruled is None or ruled <= kept else (ruled, "rule")
        if ruled is not None:
            return ruled, "rule"
        if self._classifier is None:
            return last, "default"
        named, usage = await self._classifier.classify(request)
        if usage != _NO_USAGE:
            spent.append(Spending(purpose=Purpose.ROUTING, usage=usage, model=self._classifier.model.name))
        return (last, "default") if named is None else (self._find_place(named), "classifier")

    def _find_place(self, tier: Any) -> int:
        place = self._places.get(tier) if isinstance(tier, str) else None
        if place is None:
            there = ", ".join(map(repr, self._tiers))
            raise MisuseError(f"Tiered has no tier {shorten_repr(tier)}: name one of {there}")
        return place

    async def _find_flaw(self, request: Request, reply: Reply) -> str | None:
        """Return the reason why the next tier has to answer; None if the reply is used."""
        if reply.hosted is not None or reply.unanswered:
            return None  # the provider would do its work, and perhaps its effects, again
        if "refusal" in self._escalate_on and reply.finish_reason is FinishReason.REFUSAL:
            return "refusal"
        if "bad_reply" in self._escalate_on and reply.is_empty:
            return "bad reply"
        if self._score is None:
            return None
        score = await _call("score", self._score, request, reply)
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise MisuseError(f"the function score= of Tiered returned {shorten_repr(score)}: return 0 to 1")
        return f"score {score:.2f}" if score < self._min_score else None


async def _call(option: str, function: Callable[..., Any], *arguments: object) -> Any:
    try:
        value = function(*arguments)
        return await value if isawaitable(value) else value
    except ModelError:
        raise
    except Exception as error:
        raise MisuseError(
            f"the function {option}= of Tiered failed ({type(error).__name__}: {error}): it has to serve any request"
        ) from error


def _complete_error(error: BaseException, spent: Collection[Spending], choice: TierChoice) -> None:
    """Add the usage of the replies that were paid to an error, and the choice with which a retry begins."""
    paid = _sum_usage(spent, getattr(error, "usage", None) or _NO_USAGE)
    if paid != _NO_USAGE:
        attach_usage(error, paid)
    if isinstance(error, ModelError):
        error.tier = attrs.evolve(choice, spent=tuple(spent))


def _sum_usage(spent: Collection[Spending], rest: Usage) -> Usage:
    return sum((part.usage for part in spent), rest)


def _build_spending(model: Model, request: Request, reply: Reply) -> Spending:
    return Spending(purpose=request.purpose, usage=_count_usage(model, request, reply), model=reply.model)


def _count_usage(model: Model, request: Request, reply: Reply) -> Usage:
    """Return the usage of a reply with its price; estimated if the provider reports none."""
    if reply.usage is not None:
        return reply.usage
    size = BYTE_COUNTER.count(reply.text) + sum(BYTE_COUNTER.count(call.name + call.arguments) for call in reply.calls)
    written = max(1, estimate_written_tokens(size))
    usage = Usage(input_tokens=estimate_request_tokens(request), output_tokens=written, estimated=True)
    return usage.with_price(model.cost_usd)
