"""A rule about data of the user that leaves a run by the arguments of a call, after untrusted content."""

from __future__ import annotations

import codecs
import html
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import attrs

from agentfsm.core.guarding import GuardVerdict
from agentfsm.core.labels import Label, LabelSource
from agentfsm.core.text_safety import HIDDEN_CHARS
from agentfsm.core.validation import require_choice
from agentfsm.core.value import Value
from agentfsm.guards.encoded_text import iter_readings
from agentfsm.ports.guards import CallGuard, GuardDecision

if TYPE_CHECKING:
    from agentfsm.ports.guards import GuardedCall, ToolTraits

_VERDICT: Final = require_choice(*GuardVerdict)
# Labels of texts that are not for everybody.
_NOT_FOR_ALL: Final = frozenset({Label.PRIVATE, Label.CONFIDENTIAL, Label.RESTRICTED})
PRIVATE_LABELS: Final = _NOT_FOR_ALL | {Label.USER_DATA}
# Name of the tool that runs code of the model.
_RUN_PYTHON: Final = "run_python"
# Scripts that are written without spaces: Thai, Lao, Burmese, Khmer, Chinese and Japanese. Their words are groups of
# three characters, or two that stand alone.
_DENSE: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TOKEN: Final = re.compile(rf"[{_DENSE}]+|(?:(?![{_DENSE}])[^\W_])+")
_IS_DENSE: Final = re.compile(rf"[{_DENSE}]")
# A number that is written in groups, such as that of a card or a phone.
_GROUPED: Final = re.compile(r"\d(?:[ ()./-]{0,2}\d){5,}")
# Names of hosts, and all that stands where an address has its host.
_PLACE: Final = re.compile(r"(?<=//)[^/?#\s\"'\\]+|[\w-]+(?:\.[\w-]+)+")
_HOST_AT_START: Final = re.compile(r"\s*(?:https?:)?//([\w.-]+)(?=[/?#:]|\s*$)", re.IGNORECASE)
# Fewest characters of a word that is looked for: as a word of its own, within a word or an encoded text, and across
# words. Shorter ones would be found by chance.
_MIN_WORD: Final = 3
_MIN_ENCODED: Final = 5
_MIN_PART: Final = 6
_MIN_ACROSS: Final = 8
# How often an address may be escaped.
_ESCAPES: Final = 3
# Sources that a reason names at most.
_MAX_SOURCES: Final = 3
# Words that say nothing of a person.
_COMMON: Final = frozenset(
    """
    about above after again all also and any are ask because been before being below between both but call can check com
    could did does doing done down each example few file find first for from fetch get give had has have having help her
    here hers him his home how html http https index info into its just know last let like list look mail make many may
    me message more most much must name need net new next not now off once one only open org other our out over own page
    per please query read result same say search see send she should show site some such summarise summarize summary
    take tell text than thank thanks that the their them then there these they this those through time too two under
    until url use user using very via want was web website were what when where which while who whom why will with word
    work would write www yes you your yours
    """.split()  # noqa: SIM905  one list literal would be 170 lines
)


@attrs.frozen(kw_only=True)
class LeakRule(CallGuard, Value):
    """A rule about calls that would send data of the user out, after the run has read untrusted content.

    The words and numbers of the arguments are compared with the texts that are the user's: the prompts and inputs, the
    history, recalled items, and results with a label `user_data`, `private`, `confidential` or `restricted`. See
    `no_leaks`.
    """

    verdict: GuardVerdict
    """Verdict on a call whose arguments contain such data."""

    def __str__(self) -> str:
        return "no_leaks()"

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether calls of the tool send something out."""
        return Label.SENDS_OUT in tool.effects

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the verdict if the run has read untrusted content, and the arguments contain data of the user."""
        if not self.concerns(call.tool):
            return None
        if call.tool.name == _RUN_PYTHON:  # the arguments do not show which data it sends
            return self._decide_on_code(call)
        if Label.UNTRUSTED not in call.labels:
            return None
        leaves = list(_iter_leaves(vars(call.arguments)))
        private, excused, places = _sort_words(call, _list_places(leaves))
        secret = {word: source for word, source in private.items() if word not in excused}
        if not secret:
            return None
        text = "\n".join([_without_known_host(leaf, places) for leaf in leaves])
        found = _find_words(text, secret, excused)
        if not found:
            return None
        sources = tuple({secret[word].describe(): secret[word] for word in sorted(found)}.values())[:_MAX_SOURCES]
        owner = f" of {sources[0].owner}" if sources[0].owner else ""
        reason = (
            f"the rule {self}: {call.tool.name} sends data out, its arguments have data{owner} from "
            f"{', '.join([each.describe() for each in sources])} (words and numbers in common: {len(found)}), and the "
            f"run has untrusted content from {call.labels[Label.UNTRUSTED].describe()}"
        )
        return GuardDecision(
            verdict=self.verdict, rule=str(self), reason=reason, labels=(call.labels[Label.UNTRUSTED], *sources)
        )

    def _decide_on_code(self, call: GuardedCall) -> GuardDecision | None:
        """Return the verdict on code with hosts if it may have private data, since it can read a stranger's text."""
        sources = tuple([call.labels[label] for label in call.labels if label in _NOT_FOR_ALL])
        if not sources and not _NOT_FOR_ALL.intersection(call.tool.labels):
            return None
        read = f"the run has private data from {sources[0].describe()}" if sources else "it reads private data"
        reason = f"the rule {self}: {call.tool.name} runs code that can send data out, and {read}"
        return GuardDecision(verdict=self.verdict, rule=str(self), reason=reason, labels=sources)


def no_leaks(*, verdict: GuardVerdict | str = GuardVerdict.ASK) -> LeakRule:
    """Return a rule that asks about calls that would send data of the user out, after untrusted content.

    A call that sends out is asked about if its arguments share a word or a number with the user's data: the words of
    the user, recalled items, and results with the label `user_data` or `private`, or the level `confidential` or
    `restricted`. Also found are words that are escaped, backwards, spaced, joined, or in ROT13, base64, base32,
    hexadecimal and the like. Not counted are common words, words with fewer than 3 letters or digits, those that
    untrusted content has brought, unless an earlier call could have made it repeat them, a host that was named before,
    and those that a read-only tool got for the same hosts before the run had read untrusted content. A call of
    `run_python` with hosts is asked about once the run or its code can have private data, whatever its arguments are.

    Args:
        verdict: Verdict on such a call; `"refuse"` refuses it.

    Raises:
        MisuseError: if the verdict is unknown.
    """
    _VERDICT.check("no_leaks", "verdict", verdict)
    return LeakRule(verdict=GuardVerdict(verdict))


def _sort_words(
    call: GuardedCall, wanted_places: Collection[str]
) -> tuple[Mapping[str, LabelSource], Collection[str], Collection[str]]:
    """Return the words of the user's data with their sources, the words that may be sent, and the hosts known."""
    private: dict[str, LabelSource] = {}
    excused, places = set[str](), set[str]()
    # A result may repeat the arguments of a call, so the words of both are not a stranger's.
    written, written_places = set[str](), set[str]()
    is_tainted = False
    for known in call.list_texts():
        words, named = _list_words(known.text), _list_places([known.text])
        if known.is_written:
            written.update(words)
            written_places.update(named)
            if not is_tainted:  # by a model that no stranger had talked to
                places.update(named)
                if call.tool.read_only and known.source.name == call.tool.name and named.issuperset(wanted_places):
                    excused.update(words)
        elif PRIVATE_LABELS.intersection(known.labels):
            places.update(named)
            for word in words:
                private.setdefault(word, known.source)
        elif Label.UNTRUSTED in known.labels:
            excused.update(words - written)
            places.update(named - written_places)
        is_tainted = is_tainted or Label.UNTRUSTED in known.labels
    return private, excused, places


def _iter_leaves(value: Any, *, has_keys: bool = False) -> Iterator[str]:
    """Yield the texts and numbers in arguments, and the keys of the objects in them, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if has_keys:
                yield str(key)
            yield from _iter_leaves(each, has_keys=True)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _iter_leaves(each, has_keys=True)
    elif hasattr(value, "__dict__"):
        yield from _iter_leaves(vars(value), has_keys=True)
    elif value is not None:
        yield str(value)


def _fold(text: str) -> str:
    """Return a text in small letters and their plain forms, without hidden characters."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", HIDDEN_CHARS.sub("", text)).casefold()


def _list_places(texts: Iterable[str]) -> set[str]:
    return {found.rstrip(".") for text in texts for found in _PLACE.findall(_fold(text))}


def _without_known_host(leaf: str, places: Collection[str]) -> str:
    """Return an address without its host if that was named before, since the host knows its name."""
    found = _HOST_AT_START.match(leaf)
    return leaf if found is None or _fold(found[1]).rstrip(".") not in places else leaf[found.end() :]


def _list_words(text: str) -> set[str]:
    """Return the words and numbers of a text that may identify a person or a matter."""
    plain = _fold(text)
    words: set[str] = set()
    for token in _TOKEN.findall(plain):
        if token.isascii() or not _IS_DENSE.match(token):
            words.add(token)
        else:
            words.update(token[start : start + size] for size in (2, 3) for start in range(len(token) - size + 1))
    words.update(re.sub(r"\D", "", found) for found in _GROUPED.findall(plain))
    return {word for word in words if _counts(word)}


def _counts(word: str) -> bool:
    return (len(word) >= _MIN_WORD or not word.isascii()) and word not in _COMMON


def _find_words(text: str, secret: Collection[str], excused: Collection[str]) -> set[str]:
    """Return the words of the user's data that a text contains, plain or encoded."""
    parts: dict[str, list[str]] = {}
    for word in secret:
        if len(word) >= _MIN_PART:
            parts.setdefault(word[:_MIN_PART], []).append(word)
    plain = [text]
    while len(plain) <= _ESCAPES and (bare := html.unescape(unquote(plain[-1]))) != plain[-1]:
        plain.append(bare)
    found: set[str] = set()
    for reading in plain:
        found |= _find_in_reading(_fold(reading), secret, excused, parts, least=1)
    if found:
        return found
    for reading in plain:
        turned = (reading[::-1], codecs.encode(reading, "rot13"))
        for other in (*turned, *iter_readings(reading)):
            found |= _find_in_reading(_fold(other), secret, excused, parts, least=_MIN_ENCODED)
    return found


def _find_in_reading(
    text: str, secret: Collection[str], excused: Collection[str], parts: Mapping[str, list[str]], *, least: int
) -> set[str]:
    found: set[str] = set()
    tokens = _TOKEN.findall(text)
    starts: list[int] = []
    place = 0
    spelt = ""  # words of one or two characters in a row: letters with spaces in between
    for token in (*tokens, ""):
        starts.append(place)
        place += len(token)
        if token.isascii() and len(token) <= 2 and token:  # noqa: PLR2004
            spelt += token
            continue
        if len(spelt) >= _MIN_ENCODED:
            found.update([word for word in secret if len(word) >= _MIN_ENCODED and word in spelt])
        spelt = ""
        if len(token) < least or token in excused:
            continue
        if token in secret:
            found.add(token)
        elif not token.isascii() and _IS_DENSE.match(token):
            size = min(len(token), 3)
            grams = {token[start : start + size] for start in range(len(token) - size + 1)}
            found.update(grams.intersection(secret))
    joined = "".join(tokens)
    for start in range(len(joined) - _MIN_PART + 1):
        for word in parts.get(joined[start : start + _MIN_PART], ()):
            if not joined.startswith(word, start):
                continue
            index = bisect_right(starts, start) - 1
            is_within = index < len(tokens) and start + len(word) <= starts[index] + len(tokens[index])
            is_long = len(word) >= _MIN_ACROSS or (is_within and least == 1)  # encoded text is random letters
            if is_long and not (is_within and tokens[index] in excused):
                found.add(word)
    return found
