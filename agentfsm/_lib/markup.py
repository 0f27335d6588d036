"""Markdown and HTML as the programs read them that show a text to a person, and the addresses in both.

A text is read as CommonMark with raw HTML, tables and bare links, then the HTML as a browser reads it. A text that
begins with a tag is also read as HTML at once, as it is shown where Markdown is unknown. Code is text: nothing in it is
an address. The parsers are loaded when they are first needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from typing import Any, Final, NamedTuple, TypeAlias

from agentfsm.core.json_text import map_json_texts

# Tags whose text no program turns into links.
_NO_LINKS: Final = frozenset({"a", "button", "code", "pre", "script", "style", "template", "textarea", "title"})
# Attributes that hold one address.
_ADDRESSES: Final = frozenset({
    "action", "background", "cite", "codebase", "data", "formaction", "href", "icon", "longdesc", "manifest", "poster",
    "profile", "src", "xlink:href",
})  # fmt: skip
# Attributes that are shown, or name things. In all others anything may be an address.
_WORDS: Final = frozenset({
    "abbr", "alt", "class", "colspan", "for", "headers", "height", "id", "label", "lang", "name", "placeholder", "rel",
    "role", "rowspan", "scope", "summary", "target", "title", "width",
})  # fmt: skip
# Between addresses in an attribute with several, such as `srcset`, or among other words, as in `content`.
_BETWEEN: Final = re.compile(r"[\s,;'\"()=]+")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_LOADING_SCHEMES: Final = frozenset({"data:", "ftp:", "http:", "https:", "javascript:", "vbscript:", "ws:", "wss:"})
_HOST_START: Final = re.compile(r"[/\\]{2}")
# As a browser reads an address: without these anywhere, and without controls and spaces around it.
_DROPPED: Final = str.maketrans("", "", "\t\n\r")
_AROUND: Final = "".join(map(chr, range(0x21)))
# An address in plain text. It ends at a space, a quotation mark, or a Chinese sign behind its host.
_BARE: Final = re.compile(
    r"(?:(?:https?|ftp|wss?):[/\\]{2}|(?<![\w.@-])www\.)"
    r"[^\s/\\?#<>\"'`\uff0c\u3001\uff1b\uff1a\uff01\uff1f\uff08\uff09\u3010\u3011\u300a\u300b\u300c-\u300f\u201c\u201d]+"
    r"[^\s<>\"`\uff0c\u3001\u3002\uff1b\uff1a\uff01\uff1f\uff08\uff09\u3010\u3011\u300a\u300b\u300c-\u300f\u201c\u201d]*",
    re.IGNORECASE,
)
_ENDS: Final = ".,;:!?*_~'|\u3002\uff0e\uff61"
_PAIRS: Final = (("(", ")"), ("[", "]"), ("{", "}"))
# Parts that one program shows, or loads ahead, and another skips: a template may be the shadow of an element; without
# scripts `noscript` is shown; a browser that looks ahead takes the contents of CDATA for tags.
_TEMPLATE: Final = re.compile(r"(?<=<)(/?)template\b", re.IGNORECASE)
_NOSCRIPT: Final = re.compile(r"(?<=<)(/?)noscript\b", re.IGNORECASE)
_CDATA: Final = re.compile(r"<!\[CDATA\[", re.IGNORECASE)
# Ends an attribute, a tag and a comment that a piece of HTML has left open.
_CLOSING: Final = "\"'>-->"
_NESTED: Final = 8
# Brackets in a text, whose number the parser's time goes with the square of: 0.3 s for these.
_MAX_BRACKETS: Final = 10_000
_PLACED: Final = frozenset({"link_open", "image", "html_inline", "code_inline"})


class Address(NamedTuple):
    """An address in a text that leads away from the page that shows it."""

    url: str
    """The address as a browser reads it; empty for a program of the page."""

    written: str
    """The address as it is written, which may lack the scheme."""

    is_loaded: bool
    """Whether it may be loaded without a click, or with what a person enters: pictures, frames, styles, forms."""

    @property
    def is_program(self) -> bool:
        """Whether it is a program, or a document within the address, which may load anything."""
        return not self.url or self.url.partition(":")[0].lower() in {"data", "javascript", "vbscript"}


Decider: TypeAlias = Callable[[Address], bool]


class _Change(NamedTuple):
    start: int
    end: int
    text: str


# Reading


def render_markdown(text: str) -> str:
    """Return the HTML of a text in Markdown, with the HTML that it contains as it is: it is not safe to show."""
    rendered: str = _markdown().render(text)
    return rendered


def list_addresses(text: str) -> list[Address]:
    """Return the addresses in a text that a program loads, or follows on a click, which shows it as Markdown or HTML.

    Addresses within the site of the page that shows the text, such as `#top` and `/a.png`, are not among them. A text
    that cannot be read in reasonable time counts as a program.
    """
    if text.count("[") > _MAX_BRACKETS:
        return [Address("", "", is_loaded=True)]
    found = list(_iter_html(render_markdown(text)))
    return [*found, *_iter_html(text, has_bare=False)] if text.lstrip().startswith("<") else found


@cache
def _markdown() -> Any:
    """Return the parser. It notes the place of each link, picture, tag and code within the text of its block."""
    parser = import_module("markdown_it").MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    # Addresses are judged here, and as they are written.
    parser.validateLink = lambda _url: True
    parser.normalizeLink = lambda url: url
    ruler = parser.inline.ruler
    for rule in ruler.__rules__:
        if rule.name in {"link", "image", "autolink", "html_inline", "backticks"}:
            ruler.at(rule.name, _note_place(rule.fn), {"alt": rule.alt})
    return parser


def _note_place(rule: Callable[[Any, bool], bool]) -> Callable[[Any, bool], bool]:
    """Return a rule that notes the source of its construct, and from where on it is cut to lose its address."""

    def noted(state: Any, silent: bool) -> bool:
        start, known = state.pos, len(state.tokens)
        if not rule(state, silent):
            return False
        token = None if silent else next((each for each in state.tokens[known:] if each.type in _PLACED), None)
        if token is not None:
            token.meta["source"] = source = state.src[start : state.pos]
            cut = 0 if token.info == "auto" or token.type == "html_inline" else -1
            if source[0] in "![":  # its text stays, unless the address is that of a definition
                label = start + (source[0] == "!")
                end = state.md.helpers.parseLinkLabel(state, label, source[0] == "[") + 1 - start
                cut = end if source[end : end + 1] == "(" else -1
            token.meta["cut"] = cut
        return True

    return noted


def _iter_html(html: str, *, has_bare: bool = True, depth: int = 0) -> Iterator[Address]:
    """Yield the addresses in HTML, as browsers with and without scripts read it, and those that look ahead."""
    shown = _TEMPLATE.sub(r"\1x-template", html)
    yield from _iter_tree(shown, has_bare=has_bare, depth=depth)
    # A tree leaves tags out, as behind a frameset, which are loaded ahead all the same.
    for other in dict.fromkeys([_NOSCRIPT.sub(r"\1xmp", shown), _CDATA.sub("", shown), *_list_tags(shown)]):
        if other != shown:
            yield from _iter_tree(other, has_bare=False, depth=depth)


def _iter_tree(html: str, *, has_bare: bool, depth: int) -> Iterator[Address]:
    root = import_module("selectolax.lexbor").LexborHTMLParser(html).root
    waiting = [] if root is None else [(root, has_bare)]
    while waiting:
        node, may_link = waiting.pop()
        tag = node.tag
        if tag == "-text":
            if may_link:
                yield from [Address(url, url_text, is_loaded=False) for url, url_text in _iter_bare(node.text_content)]
            continue
        if tag == "script":
            yield Address("", "", is_loaded=True)
        elif tag == "style":
            yield from _iter_css(node.text())
        for name, value in node.attributes.items():
            yield from _iter_attribute(tag, name, value or "", depth)
        waiting += [(child, may_link and tag not in _NO_LINKS) for child in node.iter(include_text=True)]


class _TagReader(HTMLParser):
    """Collects the sources of tags, wherever they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002  the source is all that counts
        self.sources.append(self.get_starttag_text() or "<")


def _list_tags(html: str) -> list[str]:
    reader = _TagReader()
    reader.feed(html)
    return reader.sources


def _iter_attribute(tag: str, name: str, value: str, depth: int) -> Iterator[Address]:
    if name in _WORDS or name.startswith(("aria-", "xmlns")):
        return
    if name.startswith("on"):
        yield Address("", "", is_loaded=True)
    elif name == "srcdoc":
        # Real pages do not nest frames this deeply: treat the frame as one that loads an unknown address.
        yield from _iter_html(value, depth=depth + 1) if depth < _NESTED else [Address("", "", is_loaded=True)]
    elif name in _ADDRESSES:
        yield from _iter_url(value, is_loaded=tag not in {"a", "area"} or name not in {"href", "xlink:href"}, tag=tag)
    else:
        yield from _iter_among(value)
        if "(" in value or "\\" in value:
            yield from _iter_css(value)


def _iter_url(value: str, *, is_loaded: bool, tag: str = "") -> Iterator[Address]:
    """Yield an address if it leads away from the page. A picture within its address loads nothing."""
    url = value.translate(_DROPPED).strip(_AROUND)
    if (_HOST_START.match(url) or _SCHEME.match(url)) and not (tag == "img" and url[:11].lower() == "data:image/"):
        yield Address(url, url, is_loaded=is_loaded)


def _iter_css(text: str) -> Iterator[Address]:
    """Yield the addresses in CSS: those of `url()`, and all texts, which other functions and rules take for one."""
    yield from _iter_among(text)  # Chromium looks ahead without reading the escapes
    parse = import_module("tinycss2").parse_component_value_list
    waiting = list(parse(text, skip_comments=True))
    while waiting:
        token = waiting.pop()
        if token.type in {"url", "string"}:
            yield from _iter_among(token.value)
        waiting += getattr(token, "arguments", None) or getattr(token, "content", None) or ()


def _iter_among(text: str) -> Iterator[Address]:
    """Yield the addresses in a text in which other words may stand."""
    for each in dict.fromkeys([text, *_BETWEEN.split(text), *_BETWEEN.split(text.translate(_DROPPED))]):
        url = each.translate(_DROPPED).strip(_AROUND)
        scheme = _SCHEME.match(url)
        if _HOST_START.match(url) or (scheme is not None and scheme[0].lower() in _LOADING_SCHEMES):
            yield Address(url, url, is_loaded=True)


@cache
def _linkifier() -> Any:
    return import_module("linkify_it").LinkifyIt({}, {"fuzzy_email": False})


def _iter_bare(text: str) -> Iterator[tuple[str, str]]:
    """Yield addresses in plain text that programs make links of, each with its scheme and as it is written.

    A host of two parts alone, such as README.md, says nothing to its owner, and is none.
    """
    for found in _BARE.finditer(text):
        written = _trim(found[0])
        yield (f"http://{written}" if written[:4].lower() == "www." else written), written
    for match in _linkifier().match(_BARE.sub(" ", text)) or ():
        is_name = not match.schema and "/" not in match.text and "?" not in match.text and match.text.count(".") == 1
        if not is_name:
            yield match.url, _trim(match.text)


def _trim(address: str) -> str:
    """Return an address without the signs of the sentence around it."""
    while address:
        last = address[-1]
        if last in _ENDS or any(last == end and address.count(end) > address.count(begin) for begin, end in _PAIRS):
            address = address[:-1]
        else:
            break
    return address


# Replacing


def replace_addresses(text: str, is_allowed: Decider, mark: str) -> tuple[str, int]:
    """Return a text in which no program finds an address that is not allowed, and the number of replaced places.

    Links lose their address and keep their text, bare addresses and tags are replaced. A block is replaced whole if the
    place of the address in it is not found, for instance because of character references, and the text whole if no
    block alone has it. The texts in a JSON document are read one by one.

    Args:
        text: A text in Markdown, HTML or JSON.
        is_allowed: Returns whether an address may stay.
        mark: Text that takes the place of another; neither Markdown nor HTML.
    """
    count = 0

    def replace(each: str) -> str:
        nonlocal count
        if each.count("[") > _MAX_BRACKETS:
            count += 1
            return mark
        if all(map(is_allowed, list_addresses(each))):
            return each
        each = each.replace("\r\n", "\n").replace("\r", "\n")
        for find in (
            _find_places,
            _find_places,
            _find_places,
            _find_blocks,
        ):  # the text of a link may be an address too
            changes = find(each, is_allowed, mark)
            for change in reversed(changes):
                each = each[: change.start] + change.text + each[change.end :]
            count += len(changes)
            if changes and all(map(is_allowed, list_addresses(each))):
                return each
        count += 1
        return mark

    return replace(map_json_texts(text, replace)), count


def _find_places(text: str, is_allowed: Decider, mark: str) -> list[_Change]:
    """Return the changes that replace addresses that are not allowed, in order, where their place is found."""
    parser = _markdown()
    environment: dict[str, Any] = {}
    starts = _find_lines(text)
    changes: list[_Change] = []
    pictures = set[str]()
    if text.lstrip().startswith("<"):
        changes += _find_sources(text, 0, len(text), _judge_tags(text, is_allowed), mark)
    cursor = 0
    for token in parser.parse(text, environment):
        if token.map is None or token.type not in {"inline", "html_block"}:
            continue
        cursor, end = max(cursor, starts[token.map[0]]), starts[token.map[1]]
        if token.type == "html_block":
            pieces: Iterable[tuple[str, int]] = _judge_tags(token.content, is_allowed)
        else:
            pieces = _list_constructs(token, is_allowed)
            pictures.update([each.attrs["src"] for each in token.children if each.type == "image"])
        found = _find_sources(text, cursor, end, pieces, mark)
        cursor = found[-1].end if found else cursor
        changes += found
    for each in (*environment.get("references", {}).values(), *environment.get("duplicate_refs", ())):
        if not all(map(is_allowed, _iter_url(each["href"], is_loaded=each["href"] in pictures))):
            changes.append(_Change(starts[each["map"][0]], starts[each["map"][1]], f"{mark}\n"))
    kept: list[_Change] = []
    for change in sorted(changes, key=lambda each: (each.start, -each.end)):
        if not kept or change.start >= kept[-1].end:
            kept.append(change)
    return kept


def _find_sources(text: str, start: int, end: int, pieces: Iterable[tuple[str, int]], mark: str) -> list[_Change]:
    """Return the changes that cut the constructs of a block, given the source of each and its cut; -1: it stays."""
    changes: list[_Change] = []
    for source, cut in pieces:
        place = text.find(source, start, end)
        if place < 0:
            continue  # it is spread over lines of a quotation, or escaped in a table
        start = place + (1 if source[0] in "![" else len(source))  # a link may contain pictures
        if cut >= 0:
            changes.append(_Change(place + cut, place + len(source), f" {mark}" if cut else mark))
    return changes


def _list_constructs(token: Any, is_allowed: Decider) -> Iterator[tuple[str, int]]:
    """Yield the source of each construct of a block in Markdown, in order, and where it is cut; -1 if it stays."""
    links = 0
    for child in token.children:
        links += child.nesting if child.type in {"link_open", "link_close"} else 0
        source, cut = child.meta.get("source", ""), child.meta.get("cut", -1)
        if child.type == "text" and not links:
            for url, written in _iter_bare(child.content):
                yield written, -1 if is_allowed(Address(url, written, is_loaded=False)) else 0
        elif source:
            addresses: Iterable[Address] = ()
            if child.type == "html_inline":
                addresses = _iter_html(source + _CLOSING)
            elif child.type == "link_open":
                addresses = _iter_url(child.attrs["href"], is_loaded=False)
            elif child.type == "image":
                addresses = _iter_url(child.attrs["src"], is_loaded=True, tag="img")
            yield source, -1 if all(map(is_allowed, addresses)) else cut


def _judge_tags(html: str, is_allowed: Decider) -> list[tuple[str, int]]:
    """Return the source of each tag, in order, with 0 if it has an address that is not allowed, else -1."""
    tags = _list_tags(html)
    return [(tag, -1 if all(map(is_allowed, _iter_html(tag, has_bare=False))) else 0) for tag in tags]


def _find_blocks(text: str, is_allowed: Decider, mark: str) -> list[_Change]:
    """Return the changes that replace blocks with an address that is not allowed."""
    parser = _markdown()
    environment: dict[str, Any] = {}
    starts = _find_lines(text)
    changes: list[_Change] = []
    for token in parser.parse(text, environment):
        if token.map is not None and token.type in {"inline", "html_block"}:
            html = parser.renderer.render([token], parser.options, environment) + _CLOSING
            if not all(map(is_allowed, _iter_html(html))):
                start, end = starts[token.map[0]], starts[token.map[1]]
                if not changes or start >= changes[-1].end:  # the cells of a table share a line
                    changes.append(_Change(start, end, f"{mark}\n" if text[start:end].endswith("\n") else mark))
    return changes


def _find_lines(text: str) -> list[int]:
    """Return the place of each line, and the end of the text behind the last."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(min(starts[-1] + len(line) + 1, len(text)))
    return starts
