// What a run waits for, and how it goes on if it stands still: on its own page, and in a conversation.
import { continueCard, standstillKey } from "./continue.js";
import { decisionCards, itemKey } from "./decide.js";
import { fill, h } from "./dom.js";
import { t } from "./i18n.js";

/** Return how many of the open runs wait for a person: the number that the navigation, the inbox and the overview have. */
export const countWaiting = ({ open }) => open.waiting + open.paused;

/** Return the element of the cards of a run, and a function that brings it up to date. A text that is being written stays. */
export function waitsBox(model) {
  const element = h("div", { class: "waits" });
  let shown = null;
  const update = () => {
    const { details } = model;
    if (!details) return;
    const posted = (item) => details.posted.find((each) => each.call_id === item.call_id && each.run_id === item.run_id);
    const keys = details.pending.map((item) => itemKey(item) + Boolean(posted(item)));
    const key = JSON.stringify([...keys, standstillKey(details)]);
    if (shown === key) return;
    shown = key;
    const done = () => model.loadDetails();
    const items = details.continuation ? details.pending.filter((item) => !["pause", "crash"].includes(item.kind)) : details.pending;
    fill(element,
      continueCard(details, done),
      items.length > 0 && h("h2", {}, t("Waits for you")),
      decisionCards(model.id, items, { done, posted, asker: details }));
  };
  return { element, update };
}
