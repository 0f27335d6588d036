// Answers as Markdown: elements and text nodes, built from the tokens of markdown-it. The exit filter reads answers with
// its port to Python and the same rules (agentfsm/_lib/markup.py), so that no link is shown which it has not judged.
import { append, h } from "./dom.js";
import { t } from "./i18n.js";
import MarkdownIt from "./vendor/markdown-it.js";

// CommonMark with tables. HTML is recognised, so that what stands in it is no Markdown, and shown as text.
const parser = new MarkdownIt("commonmark", { html: true }).enable(["table", "strikethrough"]);
// Addresses are judged here, and as they are written.
parser.validateLink = () => true;
parser.normalizeLink = (url) => url;

// The parser's time goes with the square of the number of brackets: a text with more is shown as it is.
const MAX_BRACKETS = 10_000;
// Only what every program reads as an address of that host: browsers also take `https:host`, `//host` and `\\host`.
const OUTSIDE = /^(?:https?:\/\/[^/\\]|mailto:)/i;
// An address in plain text, and what around it is of the sentence: as the exit filter reads them.
const BARE = /https?:\/\/[^\s/\\?#<>"'`，、；：！？（）【】《》「-』“”]+[^\s<>"`，、。；：！？（）【】《》「-』“”]*/gi;
const ENDS = ".,;:!?*_~'|。．｡";
const PAIRS = [["(", ")"], ["[", "]"], ["{", "}"]];
const DATA_IMAGE = /^data:(image\/(?:png|jpeg|gif|webp));base64,(.*)$/i;
const TAGS = {
  paragraph_open: "p", heading_open: "p", bullet_list_open: "ul", ordered_list_open: "ol", list_item_open: "li",
  blockquote_open: "blockquote", table_open: "table", thead_open: "thead", tbody_open: "tbody", tr_open: "tr",
  th_open: "th", td_open: "td", em_open: "em", strong_open: "strong", s_open: "s",
};

/** Return the element of a text in Markdown. It has no HTML of the text, and loads nothing. */
export function markdown(text) {
  if (text.split("[").length > MAX_BRACKETS) return h("div", { class: "markdown" }, h("p", { class: "text" }, text));
  return build(h("div", { class: "markdown" }), parser.parse(text, {}));
}

/** A link that opens beside the studio, and tells the other server nothing about it; only its text for other addresses. */
export function outsideLink(address, ...content) {
  if (!OUTSIDE.test(address) || !URL.canParse(address)) return h("span", {}, content);
  return h("a", { href: new URL(address).href, target: "_blank", rel: "noopener noreferrer" }, content);
}

/** A link, and behind it the place to which it leads, unless it begins with that: letters of other scripts look alike. */
function told(link) {
  const address = link.getAttribute("href");
  if (!address) return link;
  const { protocol, host, pathname } = new URL(address);
  const place = protocol === "mailto:" ? pathname : host;
  const begin = protocol === "mailto:" ? place : `${protocol}//${host}`;
  const text = link.textContent.replace(/^mailto:/, "");
  return text === begin || ["/", "?", "#"].some((next) => text.startsWith(begin + next)) ? link : [link, h("span", { class: "soft" }, ` (${place})`)];
}

/** A picture that is shown when it is asked for: one within its address here, all others beside the studio. */
export function picture(address, name) {
  const title = t("Picture: {name}", { name: name || t("without a name") });
  const [, type, data] = DATA_IMAGE.exec(address) ?? [];
  if (!data) return told(outsideLink(address, title));
  const host = h("span", { class: "picture" });
  const show = async () => {
    const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
    const bitmap = await createImageBitmap(new Blob([bytes], { type }));
    const canvas = h("canvas", { role: "img", "aria-label": name || title, width: bitmap.width, height: bitmap.height });
    canvas.getContext("2d")?.drawImage(bitmap, 0, 0);
    host.replaceChildren(canvas);
  };
  host.append(h("button", { type: "button", class: "quiet", onclick: () => show().catch((error) => append(host, [" ", error.message])) }, title));
  return host;
}

function build(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting < 0) {
      open.pop();
      if (token.type === "link_close") append(/** @type {Element} */ (open.at(-1)), [told(parent)]);
    } else if (token.nesting > 0) {
      const element = token.hidden ? parent : begin(token); // a paragraph of a tight list has no element
      if (element !== parent) parent.append(element.localName === "table" ? h("div", { class: "scroll-x", tabindex: 0 }, element) : element);
      open.push(element);
    } else if (token.type === "inline") build(parent, token.children);
    else if (token.type === "image" && parent.closest("a")) append(parent, [token.content]);
    else if (token.type === "text" && !parent.closest("a")) append(parent, linkBare(token.content));
    else append(parent, [leaf(token)]);
  }
  return root;
}

/** Return a text with its addresses as links. */
function linkBare(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(BARE)) {
    const address = trim(found[0]);
    parts.push(text.slice(end, found.index), told(outsideLink(address, address)));
    end = found.index + address.length;
  }
  return [...parts, text.slice(end)];
}

function trim(address) {
  const times = (sign) => address.split(sign).length;
  while (ENDS.includes(address.at(-1)) || PAIRS.some(([begin, end]) => address.endsWith(end) && times(end) > times(begin))) {
    address = address.slice(0, -1);
  }
  return address;
}

function begin(token) {
  if (token.type === "link_open") return outsideLink(token.attrGet("href"));
  const align = /right|center/.exec(token.attrGet("style"))?.[0];
  const level = token.type === "heading_open" && `heading ${token.tag}`;
  return h(TAGS[token.type] ?? "span", { class: level || align, start: token.attrGet("start") });
}

function leaf(token) {
  switch (token.type) {
    case "softbreak": return "\n";
    case "hardbreak": return h("br");
    case "hr": return h("hr");
    case "code_inline": return h("code", {}, token.content);
    case "fence":
    case "code_block": return h("pre", {}, token.content);
    case "html_block": return h("p", { class: "text" }, token.content);
    case "image": return picture(token.attrGet("src"), token.content);
    default: return token.content;
  }
}
