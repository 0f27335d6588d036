"""Parts of a conversation, of which chats and editors are sent streams: each text once, and corrections marked."""

from agentfsm.core import events as e
from agentfsm.core.messages import AssistantMessage
from agentfsm.serve.dialects.turn_parts import TextEnd, TextPiece, TurnParts
from agentfsm.streaming.stream import TextDelta, ThinkingDelta
from tests.support.sample_runs import thinking


def read(parts, text, *pieces):
    """Return the parts of a reply with this text, of which the pieces came before: attempt, offset and text."""
    run, found = parts.run, []
    for attempt, offset, piece in pieces:
        found += parts.read_delta(TextDelta(run_id=run.id, turn=run.turn + 1, attempt=attempt, text=piece), offset)
    event = e.AnswerGiven(message=AssistantMessage(text=text))
    return [*found, *parts.read_event(event, run.apply(event))]


def show(found):
    """Return the texts that hold, and those that were retracted."""
    texts, retracted = {}, []
    for part in found:
        if isinstance(part, TextPiece):
            texts[part.id] = texts.get(part.id, "") + part.text
        elif isinstance(part, TextEnd) and part.is_retracted:
            retracted.append(texts.pop(part.id))
    assert [part.id for part in found if isinstance(part, TextEnd)] == list(dict.fromkeys(p.id for p in found))
    return list(texts.values()), retracted


def test_a_reply_is_sent_once():
    """Whole, in pieces, or the rest of what came in pieces."""
    assert show(read(TurnParts(thinking()), "one two")) == (["one two"], [])
    assert show(read(TurnParts(thinking()), "one two", (1, 0, "one"), (1, 3, " two"))) == (["one two"], [])
    assert show(read(TurnParts(thinking()), "one two", (1, 0, "one"))) == (["one two"], [])
    assert show(read(TurnParts(thinking()), "one two", (1, 3, " two"))) == (["one two"], [])


def test_what_does_not_hold_is_marked():
    """The text of an attempt that broke off, or one that a filter has replaced."""
    broken = (1, 0, "on")
    assert show(read(TurnParts(thinking()), "two", broken, (2, 0, "tw"), (2, 2, "o"))) == (["two"], ["on"])
    assert show(read(TurnParts(thinking()), "two", broken)) == (["two"], ["on"])
    assert show(read(TurnParts(thinking()), "[redacted]", (1, 0, "secret"))) == (["[redacted]"], ["secret"])


def test_thinking_is_apart():
    """It ends where the text begins, and is sent whole if no piece of it came."""
    run = thinking()
    parts = TurnParts(run)
    found = list(parts.read_delta(ThinkingDelta(run_id=run.id, turn=run.turn + 1, attempt=1, text="hm"), 0))
    found += read(parts, "yes", (1, 0, "yes"))
    assert [(type(part), part.is_thinking) for part in found] == [
        (TextPiece, True),
        (TextEnd, True),
        (TextPiece, False),
        (TextEnd, False),
    ]
    event = e.AnswerGiven(message=AssistantMessage(text="yes", thinking="hm"))
    whole = list(TurnParts(run).read_event(event, run.apply(event)))
    assert [part.text for part in whole if isinstance(part, TextPiece)] == ["hm", "yes"]
