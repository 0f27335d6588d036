// A page for the modules of the studio, before they are imported: its elements, language and address.
import { createRequire } from "node:module";

const { parseHTML } = createRequire(process.env.PACKAGES + "/")("linkedom");
const { document, Node, SVGElement } = parseHTML("<!doctype html><html><body></body></html>");
const location = { hash: "" };
const history = { replaceState: (_state, _title, address) => (location.hash = address) };
Object.assign(globalThis, { document, Node, SVGElement, location, history });
Object.defineProperty(globalThis, "localStorage", { value: { getItem: () => null } });
Object.defineProperty(globalThis, "navigator", { value: { language: "en-GB" } });

/** Import a module of the studio. */
export const load = (name) => import(new URL(`../../../agentfsm/studio/static/${name}`, import.meta.url));
