// Messages of a history as text.

/**
 * Return the text of a message, with its calls, its outcome and names of its media.
 *
 * @param {any} message
 */
export function messageText(message) {
  const parts = [message.text, message.content, ...(message.parts ?? []).map((/** @type {any} */ part) => part.text ?? `[${part.media_type ?? "media"}]`)];
  if (message.is === "ToolResult") parts.unshift(`[${message.tool}: ${message.outcome}]`);
  for (const call of message.calls ?? []) parts.push(`${call.name}(${call.arguments})`);
  return parts.filter(Boolean).join("\n");
}
