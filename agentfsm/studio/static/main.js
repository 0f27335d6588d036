// The frame of the studio: navigation, theme, language, sign-in, and the page that the address names.
import { decode, readAddress } from "./address.js";
import { api, credentials } from "./api.js";
import { permits, readCaller } from "./caller.js";
import { every, fill, h } from "./dom.js";
import { language, setLanguage, t } from "./i18n.js";
import { showKeys, useKeys } from "./keyboard.js";
import { PAGES } from "./pages/index.js";
import { run } from "./pages/run.js";
import { empty, failure } from "./parts.js";

const THEME = "agentfsm.theme";
const COUNT_MS = 5000;
const LINK = /^#key=(.+)$/;

let closePage = null;
let shown = 0;
const main = h("main", { id: "main", tabindex: -1 });
const links = PAGES.map((page) => h("a", { href: `#/${page.path}`, "data-path": page.path }, t(page.title)));

function readRoute() {
  const { path, parameters } = readAddress();
  const [name, ...rest] = path.split("/");
  return { name, rest: rest.map(decode), parameters };
}

// Where no page is, and where one is that the caller may not read.
const missing = {
  title: "There is no such page",
  mount: (main) => drawEnd(main, t("There is no such page"), t("The address names no page of the studio: it may be mistyped, or of another version.")),
};
const forbidden = {
  mount: (main) => drawEnd(main, t("You may not see this page"), t("Your key lacks the scope that it needs, or has a tenant while the page is about all of them.")),
};

function drawEnd(main, title, text) {
  fill(main, h("header", { class: "page" }, h("h1", {}, title)), empty(text, h("a", { href: "#/runs" }, t("To the runs"))));
}

async function mayOpen(page) {
  return !page.needs || permits(await readCaller(), page.needs);
}

async function show() {
  const { name, rest, parameters } = readRoute();
  const number = ++shown;
  if (!name) {
    const { agents } = await api.agents().catch(() => ({ agents: [] }));
    if (number !== shown || readRoute().name) return; // the reader has gone to a page, which is shown next
    history.replaceState(null, "", agents.length ? "#/talk" : "#/runs");
    return void await show();
  }
  closePage?.();
  closePage = null;
  /** @type {any} */
  const page = name === "runs" && rest.length ? run : PAGES.find((each) => each.path === name) ?? missing;
  for (const link of links) {
    if (link.dataset.path === name) {
      link.setAttribute("aria-current", "page");
      requestAnimationFrame(() => showLink(link));
    } else link.removeAttribute("aria-current");
  }
  document.title = `${page.title ? t(page.title) : rest[0]} · agentfsm studio`;
  const host = h("div", { class: "page" });
  fill(main, host);
  try {
    const close = await (await mayOpen(page) ? page : forbidden).mount(host, parameters, ...rest);
    if (number === shown) closePage = close ?? null;
    else close?.();
  } catch (error) {
    fill(host, failure(error));
  }
}

/**
 * Bring a link into the middle of the navigation, which is a row on a phone.
 *
 * @param {HTMLElement} link
 */
function showLink(link) {
  const row = link.parentElement;
  row?.scrollTo({ left: link.offsetLeft - (row.clientWidth - link.offsetWidth) / 2 });
}

function showSignIn() {
  if (document.querySelector(".sign-in")) return;
  closePage?.();
  const key = h("input", { type: "password", autocomplete: "off", "aria-label": t("Key") });
  const enter = (event) => {
    event.preventDefault();
    credentials.set(key.value.trim());
    location.reload();
  };
  fill(document.body, h("main", { class: "sign-in" },
    h("h1", {}, "agentfsm studio"),
    h("p", {}, t("Open the URL that `agentfsm studio` printed: it has a new key after each start. Or enter an API key of the server.")),
    h("form", { onsubmit: enter }, h("label", { class: "field" }, h("span", {}, t("Key")), key), h("button", { class: "primary" }, t("Sign in")))));
  key.focus();
  credentials.onSet(() => location.reload()); // in another window
}

function setTheme(name) {
  if (name === "auto") localStorage.removeItem(THEME);
  else localStorage.setItem(THEME, name);
  document.documentElement.dataset.theme = name;
}

function buildFrame() {
  const theme = h("select", { "aria-label": t("Theme"), onchange: () => setTheme(theme.value) },
    ["auto", "light", "dark"].map((name) => h("option", { value: name }, t(`theme ${name}`))));
  theme.value = localStorage.getItem(THEME) ?? "auto";
  setTheme(theme.value);
  const chosen = h("select", { "aria-label": "Language / 语言", onchange: () => setLanguage(chosen.value) },
    h("option", { value: "en" }, "English"), h("option", { value: "zh" }, "中文"));
  chosen.value = language();
  document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
  const signOut = credentials.get() && h("button", { type: "button", class: "quiet", onclick: () => { credentials.clear(); location.reload(); } }, t("Sign out"));
  const keys = h("button", { type: "button", class: "quiet keyboard", onclick: showKeys }, t("Keyboard"));
  document.body.replaceChildren(
    h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); } }, t("Skip to the content")),
    h("nav", { "aria-label": t("Studio") },
      h("a", { class: "brand", href: "#/" }, h("img", { src: "icon.svg", alt: "", width: 22, height: 22 }), h("span", {}, "agentfsm", h("small", {}, "studio"))),
      h("div", { class: "links" }, links),
      h("div", { class: "settings" }, theme, chosen, keys, signOut)),
    main);
}

/** Leave out the links to pages that the caller may not read. */
async function hideLinks() {
  const caller = await readCaller().catch(() => null);
  if (caller === null) return;
  for (const link of links) link.hidden = !permits(caller, PAGES.find((each) => each.path === link.dataset.path)?.needs);
}

/** Show beside each link how many things its page counts, such as runs that wait. */
async function updateCounts() {
  for (const page of PAGES.filter((each) => each.count)) {
    const link = links.find((each) => each.dataset.path === page.path);
    const number = await page.count().catch(() => null);
    if (!link || number === null) continue;
    fill(link, t(page.title), number !== 0 && h("span", { class: "count" }, number));
  }
}

/** Whether the server takes the stored key. A server that is started anew has another one. */
async function isAccepted() {
  return api.caller().then(() => true, (error) => error.status !== 401);
}

/** Ask whether the key of a link replaces the stored one: with the key of another user, decisions are made under that name. */
function askToReplace(key) {
  const choose = (chosen) => {
    if (chosen) credentials.set(chosen);
    location.reload();
  };
  const keep = h("button", { type: "button", class: "primary", onclick: () => choose(null) }, t("Keep my key"));
  fill(document.body, h("main", { class: "sign-in" },
    h("h1", {}, "agentfsm studio"),
    h("p", {}, t("This link has another key than the one with which you are signed in. Use it only if you opened it yourself, as after a start of `agentfsm studio`.")),
    h("div", { class: "buttons" }, keep, h("button", { type: "button", onclick: () => choose(key) }, t("Use the key of the link")))));
  keep.focus();
}

function start() {
  buildFrame();
  window.addEventListener("signed-out", showSignIn);
  window.addEventListener("hashchange", () => (LINK.test(location.hash) ? location.reload() : show()));
  show().then(updateCounts); // the page comes first
  hideLinks();
  useKeys();
  every(COUNT_MS, main, updateCounts);
}

const given = LINK.exec(location.hash)?.[1];
const key = given && decode(given);
if (key) history.replaceState(null, "", `${location.pathname}#/`);
if (key && credentials.get() && credentials.get() !== key && (await isAccepted())) askToReplace(key);
else {
  if (key) credentials.set(key);
  start();
}
