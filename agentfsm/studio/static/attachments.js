// Files that go with a prompt: what the gateway takes, and the parts that it is sent.
import { fill, h } from "./dom.js";
import { count } from "./format.js";
import { t } from "./i18n.js";

// As in agentfsm/tools/queue/media.py and agentfsm/agents/admission.py. Browsers give some of these files another type, or none.
const TYPES = {
  png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", gif: "image/gif", webp: "image/webp", wav: "audio/wav", mp3: "audio/mpeg",
  pdf: "application/pdf", txt: "text/plain", csv: "text/csv", md: "text/markdown", json: "application/json",
};
const MAX_FILES = 19; // of 20 parts, one is the text
const MAX_BODY_CHARS = 4 * 1024 * 1024 - 100_000; // of a request, less the text

/** Return the button that chooses files, the list of those chosen, and functions that read and empty it. */
export function attachmentList(complain) {
  let files = [];
  const list = h("ul", { class: "attachments", "aria-label": t("Attachments"), hidden: true });
  const chooser = h("input", { type: "file", multiple: true, hidden: true, accept: Object.keys(TYPES).map((each) => `.${each}`).join(), onchange: () => {
    add(chooser.files);
    chooser.value = "";
  } });
  const button = h("button", { type: "button", onclick: () => chooser.click() }, t("Attach…"));

  async function add(chosen) {
    for (const file of [...chosen]) {
      const ending = file.name.split(".").at(-1).toLowerCase();
      const type = TYPES[ending] ?? (Object.values(TYPES).includes(file.type) ? file.type : null);
      if (!type) complain(t("{name} is not of a type that models take: {types}", { name: file.name, types: Object.keys(TYPES).join(", ") }));
      else if (!file.size) complain(t("{name} is empty.", { name: file.name }));
      else if (files.length === MAX_FILES) complain(t("A message has {n} files at most.", { n: MAX_FILES }));
      else {
        const url = `data:${type};base64,${await readBase64(file)}`;
        const size = files.reduce((sum, each) => sum + each.part.url.length, url.length);
        if (size > MAX_BODY_CHARS) complain(t("{name} is too large: the files of a message have 3 MB at most.", { name: file.name }));
        else files.push({ name: file.name, size: file.size, part: buildPart(type, url, file.name) });
      }
    }
    draw();
  }

  function draw() {
    list.hidden = !files.length;
    fill(list, files.map((each) => h("li", {}, each.name, " ", h("small", { class: "soft" }, `${count(Math.ceil(each.size / 1000))} kB`),
      h("button", { type: "button", class: "quiet", "aria-label": t("Remove {name}", { name: each.name }), onclick: () => {
        files = files.filter((other) => other !== each);
        draw();
      } }, "✕"))));
  }
  const clear = () => {
    files = [];
    draw();
  };
  return { button, chooser, list, add, clear, parts: () => files.map((each) => each.part) };
}

function buildPart(type, url, name) {
  const [kind] = type.split("/");
  return kind === "image" || kind === "audio" ? { type: kind, url } : { type: "file", url, name };
}

function readBase64(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(String(reader.result).replace(/^[^,]*,/, ""));
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(file);
  });
}
