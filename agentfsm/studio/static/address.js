// The address of a page: what is chosen on it stands in its query, so that a refresh and a link show the same.

/**
 * Return a part of an address as it is meant; as it is written, if it is no valid encoding.
 *
 * @param {string} text
 */
export function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Return the path of the page in the address, as "runs/ID", and its query. */
export function readAddress() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  return { path, parameters: new URLSearchParams(search) };
}

/**
 * Keep what is chosen in the query. Another page's address, to which the reader has gone by now, is left alone.
 *
 * @param {string} path
 * @param {Record<string, string>} chosen
 */
export function keepAddress(path, chosen) {
  if (readAddress().path !== path) return;
  const query = new URLSearchParams(Object.entries(chosen).filter(([, value]) => value)).toString();
  const address = `#/${path}${query ? `?${query}` : ""}`;
  if (location.hash !== address) history.replaceState(null, "", address);
}
