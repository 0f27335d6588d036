"""A rule about data of the user that a call would send out, once the run has read untrusted content."""

from __future__ import annotations

import codecs
import html
import json
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import attrs

from agentfsm.core.events import GuardVerdict
from agentfsm.core.json_text import list_leaves
from agentfsm.core.labels import DATA_LEVELS, Label, LabelSource, find_owner
from agentfsm.core.text_safety import HIDDEN_CHARS
from agentfsm.core.value import Value
from agentfsm.guards.call_rules import is_ordered, parse_verdict
from agentfsm.guards.encoded_text import TooLongToReadError, iter_readings
from agentfsm.ports.guards import CallGuard, GuardDecision

if TYPE_CHECKING:
    from agentfsm.ports.guards import GuardedCall, KnownText, ToolTraits

# Labels of texts that are not for everybody.
_PRIVATE: Final = frozenset({Label.USER_DATA, Label.PRIVATE, *DATA_LEVELS[2:]})
# Fewest characters of a word that is looked for: plain, encoded, and as a part of a longer one. Shorter ones are found
# by chance.
_MIN_WORD: Final = 3
_MIN_ENCODED: Final = 5
_PART: Final = 8
# Words to look for times characters to look at, about 20 ms; a call that needs more is asked about. To prepare a
# character of a text, of one not in ASCII, and to read one of the arguments, costs as much as this number of words.
_MAX_WORK: Final = 20_000_000
_PREPARING: Final = 5
_FOLDING: Final = 25
_READING: Final = 4_000
_TOO_LONG: Final = "its arguments and the data to compare them with are too long"
# How often an address may be escaped.
_ESCAPES: Final = 3
# Thai, Lao, Burmese, Khmer, Chinese and Japanese are written without spaces: groups of three characters are words.
_DENSE: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_GROUP: Final = 3
_MIN_DENSE: Final = 2
_WORD: Final = re.compile(rf"[{_DENSE}]+|(?:(?![{_DENSE}])[^\W_])+")
_IS_DENSE: Final = re.compile(rf"[{_DENSE}]")
_SIGNS: Final = re.compile(r"[\W_]+")
# A word with the same sign between its letters, a number in groups; several words so; and an address.
_SPELT: Final = re.compile(
    r"(?<![^\W_])[^\W_]{1,2}([\W_]{1,3})[^\W_]{1,2}(?:\1[^\W_]{1,2}){3,}(?![^\W_])|\d(?:[ ()./-]{0,3}\d){5,}"
)
_SPELT_WORDS: Final = re.compile(r"(?<![^\W_])[^\W_](?:[\W_]{1,3}[^\W_]){7,}(?![^\W_])")
_DOTTED: Final = re.compile(r"[^\W_]+(?:[.@_+-][^\W_]+)+")
# An address up to the end of its host, and names of hosts and all that stands where an address has its host.
_ADDRESS: Final = re.compile(r"\s*https?://([\w.:-]+)(?=[/?#]|\s*$)", re.IGNORECASE)
_DOMAIN: Final = re.compile(r"(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?")
_PLACE: Final = re.compile(r"(?<=//)[^/?#\s]+|[\w-]+(?:\.[\w-]+)+")
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f]+")
_TO_SPACES: Final = bytes([code if chr(code).isalnum() and code < 128 else 32 for code in range(256)])
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

    The words and numbers of the arguments are looked for in the texts that are the user's: prompts and inputs, the
    history, recalled items, and results with a label `user_data`, `private`, `confidential` or `restricted`. See
    `no_leaks`.
    """

    verdict: GuardVerdict = attrs.field(converter=parse_verdict)
    """Verdict on a call whose arguments contain such data."""

    def __str__(self) -> str:
        return "no_leaks()"

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether calls of the tool send something out."""
        return tool.gives_away

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the verdict if the run has read untrusted content, and the arguments contain data of the user."""
        untrusted = call.labels.get(Label.UNTRUSTED)
        if untrusted is None or not self.concerns(call.tool) or is_ordered(call):
            return None
        found = _find_leak(call, untrusted)
        if found is None:
            return None
        reason, sources = found
        return GuardDecision(
            verdict=self.verdict,
            rule=str(self),
            reason=f"the rule {self}: {call.tool.name} sends data out, {reason}, and the run has untrusted content "
            f"from {untrusted.describe()}",
            labels=(untrusted, *sources),
        )


def no_leaks(*, verdict: GuardVerdict | str = GuardVerdict.ASK) -> LeakRule:
    """Return a rule that asks about calls that would send data of the user out, after untrusted content.

    A call that sends out is asked about if its arguments share a word or a number with the user's data: the words of
    the user, recalled items, and results with the label `user_data` or `private`, or the level `confidential` or
    `restricted`. Also found are words that are escaped, backwards, spaced, joined, or in ROT13, base64, base32,
    hexadecimal and the like. Not counted are common words, those with fewer than 3 letters or digits, those that
    untrusted content has brought first, the host of an address that the user's data names, and words that a
    read-only tool has got for the same hosts before the run had read untrusted content. A call that the user has
    ordered in his own words is exempt. Arguments and data that are too long to be compared in about 20 ms count as a
    leak.

    Args:
        verdict: Verdict on such a call; `"refuse"` refuses it.

    Raises:
        MisuseError: if the verdict is unknown.
    """
    return LeakRule(verdict=verdict)


@attrs.define(eq=False)
class _Text:
    """A text that the run knows, in the forms in which words are looked for."""

    known: KnownText

    @property
    def is_private(self) -> bool:
        return not self.known.is_written and not _PRIVATE.isdisjoint(self.known.labels)

    @cached_property
    def folded(self) -> str:
        return _fold(self.known.text)

    @cached_property
    def spaced(self) -> bytes:
        return b" %b " % _NOT_ASCII.sub(" ", self.folded).encode().translate(_TO_SPACES)

    @cached_property
    def joined(self) -> bytes:
        return self.folded.encode("ascii", "ignore").translate(_TO_SPACES).replace(b" ", b"")

    def names(self, host: str) -> bool:
        """Return whether an address in the text has this host, as a whole. The user may leave out its `https://`."""
        if host not in self.folded:
            return False
        is_said = self.known.name in {"prompt", "input"} and _DOMAIN.fullmatch(host) is not None
        before = r"(?:https?://|(?<![\w.@:/?#=&%+-]))" if is_said else r"https?://"
        return re.search(rf"{before}{re.escape(host)}(?![\w@%+]|[.:-]+[\w@%+])", self.folded) is not None

    def lists(self, places: Collection[str], defaults: Mapping[str, object]) -> bool:
        """Return whether the text is the arguments of a call with all of these hosts and values."""
        try:
            given = json.loads(self.known.text)
        except (ValueError, RecursionError):
            return False
        leaves = [_fold(str(each)) for each in list_leaves({**defaults, **given} if isinstance(given, dict) else given)]
        return {*leaves, *[place for leaf in leaves for place in _PLACE.findall(leaf)]}.issuperset(places)

    def has(self, word: str) -> bool:
        """Return whether a word is in the text: within others if it is long, or in a script without spaces."""
        if not word.isascii():
            return word in self.folded
        return word.encode() in self.joined if len(word) >= _PART else b" %b " % word.encode() in self.spaced


def _find_leak(call: GuardedCall, untrusted: LabelSource) -> tuple[str, tuple[LabelSource, ...]] | None:
    """Return a reason against the arguments of a call, and the source of the data in them; None if there is none."""
    texts = [_Text(each) for each in call.list_texts()]
    private = [each for each in texts if each.is_private]
    size = sum([len(each.known.text) for each in private])
    size_of_all = sum([len(each.known.text) for each in texts])
    not_ascii = sum([len(each.known.text) for each in texts if not each.known.text.isascii()])
    leaves = [str(each) for each in list_leaves(call.arguments)]
    work = size_of_all * _PREPARING + not_ascii * _FOLDING + sum(map(len, leaves)) * _READING
    if work > _MAX_WORK:
        return _TOO_LONG, ()
    places = {place for leaf in leaves for place in _PLACE.findall(_fold(leaf))}
    folded = {_fold(leaf) for leaf in leaves}
    for leaf in dict.fromkeys(leaves):
        address = _ADDRESS.match(leaf)
        is_named = address is not None and any(each.names(_fold(address[1])) for each in private)
        try:
            words = _list_words(leaf[address.end() :] if address is not None and is_named else leaf)
        except TooLongToReadError:
            return _TOO_LONG, ()
        work += size * sum(map(len, words.values()))
        for word, parts in words.items():
            if work > _MAX_WORK:
                return _TOO_LONG, ()
            found = next((each for each in private if any(map(each.has, parts))), None)
            if found is None:
                continue
            work += size_of_all * 2
            sought = [word] if address is None else [word, leaf]
            kept = places.union([each for each in folded if word not in each])  # a search may change, and not its place
            if not any(_is_known_outside(each, call, texts, kept, untrusted) for each in sought):
                source = LabelSource(
                    label=Label.USER_DATA,
                    run_id=call.header.id,
                    call_id=found.known.call_id,
                    name=found.known.name,
                    owner=find_owner(Label.USER_DATA, call.header.user),
                )
                owner = f" of {source.owner}" if source.owner else ""
                return f"its arguments have words or numbers of the data{owner} from {source.describe()}", (source,)
    return None


def _is_known_outside(
    sought: str, call: GuardedCall, texts: Sequence[_Text], places: Collection[str], untrusted: LabelSource
) -> bool:
    """Return whether a word of the user's data, or an address with one, is known where the call sends it.

    Untrusted content makes its words known, unless the run has written that before: a result may repeat arguments. A
    read-only tool has made those known that it got for the same places before the run had read anything untrusted.
    """
    is_written, is_tainted = False, untrusted.run_id != call.header.id or not untrusted.call_id
    for text in texts:
        known = text.known
        has = sought in known.text if _ADDRESS.match(sought) else text.has(sought)
        if known.is_written:
            is_search = call.tool.read_only and known.name == call.tool.name and not is_tainted
            if has and is_search and text.lists(places, call.defaults):
                return True
            is_written = is_written or has
        elif Label.UNTRUSTED in known.labels:
            is_tainted = True
            if has and not is_written and not text.is_private:
                return True
    return False


def _list_words(text: str) -> dict[str, tuple[str, ...]]:
    """Return the words and numbers of a text, as it is and decoded, each with the parts of it to look for."""
    plain = [text]
    while len(plain) <= _ESCAPES and (bare := html.unescape(unquote(plain[-1]))) != plain[-1]:
        plain.append(bare)
    readings = [(reading, _MIN_WORD) for reading in plain]
    for reading in plain:
        turned = (reading[::-1], codecs.encode(reading, "rot13"))
        readings += [(other, _MIN_ENCODED) for other in (*turned, *iter_readings(reading)) if other != reading]
    words: dict[str, tuple[str, ...]] = {}
    for reading, least in readings:
        folded = _fold(reading)
        forms = (_SPELT, _SPELT_WORDS) if least == _MIN_WORD else (_SPELT, _SPELT_WORDS, _DOTTED)
        spelt = {_SIGNS.sub("", found[0]) for form in forms for found in form.finditer(folded)}
        for word in sorted({*_WORD.findall(folded), *spelt} - words.keys() - _COMMON):
            is_dense = not word.isascii() and _IS_DENSE.match(word) is not None
            if len(word) >= (_MIN_DENSE if is_dense else least):
                has_parts = word.isascii() and (least == _MIN_WORD or word in spelt)
                size = _GROUP if is_dense else _PART if has_parts else len(word)
                words[word] = tuple([word[at : at + size] for at in range(max(len(word) - size, 0) + 1)])
    return words


def _fold(text: str) -> str:
    """Return a text in small letters and their plain forms, without hidden characters."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", HIDDEN_CHARS.sub("", text)).lower()
