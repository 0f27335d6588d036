// Numbers, times and durations as text, in the language of the page.
import { language, t } from "./i18n.js";

const locale = () => (language() === "zh" ? "zh-CN" : "en-GB");

/** @param {number} value */
export const count = (value) => new Intl.NumberFormat(locale()).format(value);

/** @param {number} value */
export function compact(value) {
  return value < 10_000 ? count(value) : new Intl.NumberFormat(locale(), { notation: "compact", maximumFractionDigits: 1 }).format(value);
}

/**
 * An amount of US dollars, as `format_usd` of the package writes it: what is estimated or has no price is said.
 *
 * @param {number | null | undefined} usd
 */
export function money(usd, { estimated = false, unpriced = false } = {}) {
  if (usd === null || usd === undefined || (unpriced && !usd)) return t("unknown price");
  const [whole, cents] = (usd > 0 && usd < 1 ? usd.toFixed(2 - Math.floor(Math.log10(usd))).replace(/0+$/, "") : usd.toFixed(2)).split(".");
  const amount = `$${whole.replace(/\B(?=(\d{3})+$)/g, ",")}.${cents.padEnd(2, "0")}`;
  const text = estimated && usd ? t("about {usd}", { usd: amount }) : amount;
  return unpriced ? t("{usd} and unknown prices", { usd: text }) : text;
}

/**
 * The cost of a usage; a dash if it has no tokens and no cost.
 *
 * @param {any} usage
 */
export const costOf = (usage) => (usage.cost_usd || usage.input_tokens || usage.output_tokens ? money(usage.cost_usd, usage) : "–");

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const [size, name, part, partName] = seconds < 3600 ? [60, "min", 1, "s"] : seconds < 86400 ? [3600, "h", 60, "min"] : [86400, "d", 3600, "h"];
  const rest = Math.floor((seconds % size) / part);
  return `${Math.floor(seconds / size)} ${name}${rest ? ` ${rest} ${partName}` : ""}`;
}

/** @param {number} at */
export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString(locale(), { hour12: false });
}

/**
 * @param {number} at
 * @param {string} [timeZone] that of the browser if none is given
 */
export function date(at, timeZone) {
  return new Date(at * 1000).toLocaleString(locale(), { dateStyle: "medium", timeStyle: "medium", hour12: false, timeZone });
}

/** @param {number} at */
export const day = (at) => new Date(at * 1000).toLocaleDateString(locale(), { day: "numeric", month: "short", timeZone: "UTC" });

/** @param {number} at */
export const hour = (at) => new Date(at * 1000).toLocaleTimeString(locale(), { hour: "2-digit", minute: "2-digit", hour12: false });

/**
 * Return how long ago a time is: "3 min ago".
 *
 * @param {number} at
 */
export function ago(at) {
  const seconds = Date.now() / 1000 - at;
  if (seconds < 2) return t("just now");
  const time = seconds < 60 ? `${Math.floor(seconds)} s` : duration(seconds).split(" ").slice(0, 2).join(" ");
  return t("{time} ago", { time });
}

/** @param {number} at */
export function until(at) {
  const seconds = at - Date.now() / 1000;
  return seconds <= 0 ? t("expired") : t("expires in {time}", { time: duration(seconds) });
}

/** @param {unknown} value */
export function json(value) {
  return JSON.stringify(value, null, 2);
}

/**
 * Return a call as one line: `pay(cents=500)`.
 *
 * @param {{name: string, arguments: Record<string, any>}} call
 */
export function callTitle(call, width = 120) {
  const given = Object.entries(call.arguments).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");
  return `${call.name}(${given.length > width ? `${given.slice(0, width)}…` : given})`;
}
