"""Requests of chat front ends for themselves, such as a title of the conversation: answered without a model or a tool.

Open WebUI and LibreChat send them like messages of the user. A run for them could have unwanted effects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

# Words of a title.
TITLE_WORDS: Final = 6
_TITLE: Final = "title"
_EMPTY_ANSWERS: Final[Mapping[str, object]] = {
    "tags": {"tags": []},
    "follow": {"follow_ups": []},
    "queries": {"queries": []},
}
# Beginnings of Open WebUI's tasks, after "### Task:", and the key of the answer.
_WEBUI_TASKS: Final = (
    (re.compile(r"Generate a concise\b.*\btitle\b", re.IGNORECASE), _TITLE),
    (re.compile(r"Generate \d+-\d+ broad tags", re.IGNORECASE), "tags"),
    (re.compile(r"Suggest \d+-\d+ relevant follow-up questions", re.IGNORECASE), "follow"),
    (re.compile(r"Analyze the chat history to determine the necessity of generating search", re.IGNORECASE), "queries"),
    (re.compile(r"You are an autocompletion system", re.IGNORECASE), "text"),
    (re.compile(r"Generate a detailed prompt for a\w? image generation task", re.IGNORECASE), "prompt"),
)
_WEBUI_TASK: Final = re.compile(r"\s*### Task:\s*(?P<task>[^\n]*)")
_EMOJI_TASK: Final = re.compile(r"\s*Your task is to reflect the speaker's likely facial expression")
# LibreChat's prompts for a title.
_LIBRECHAT_TITLE: Final = re.compile(
    r"(Please generate|Provide|Write|Analyze this conversation and provide)\b.{0,80}"
    r"(5-word-or-less title|5 words or less|concise title)",
    re.IGNORECASE | re.DOTALL,
)
_HISTORY: Final = re.compile(r"<chat_history>(?P<history>.*?)</chat_history>", re.DOTALL)
_FIRST_WORDS: Final = re.compile(r"^\s*(?:USER|User|Human|\|\|>User)\s*:\s*(?P<text>[^\n]+)", re.MULTILINE)


def answer_task(messages: Sequence[tuple[str, str]]) -> str | None:
    """Return the answer to a front end's own request; None if this is a message of the user.

    Args:
        messages: Role and text of each message.
    """
    text = messages[-1][1]
    if (task := _WEBUI_TASK.match(text)) is not None:
        key = next((key for pattern, key in _WEBUI_TASKS if pattern.match(task["task"])), None)
        if key == _TITLE:
            found = _HISTORY.search(text)
            return json.dumps({"title": _make_title(found["history"] if found else "")}, ensure_ascii=False)
        if key is not None:
            return json.dumps(_EMPTY_ANSWERS.get(key, {key: ""}))
        return None
    if _EMOJI_TASK.match(text) is not None:
        return "💬"
    if any(_LIBRECHAT_TITLE.match(each.lstrip()) for role, each in messages if role in {"user", "system"}):
        return _make_title(text if _FIRST_WORDS.search(text) else messages[0][1])
    return None


def _make_title(history: str) -> str:
    """Return the first words of the user."""
    found = _FIRST_WORDS.search(history)
    words = (found["text"] if found else "").split()
    return " ".join(words[:TITLE_WORDS]) or "Conversation"
