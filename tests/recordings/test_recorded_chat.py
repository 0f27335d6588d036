"""Chat completions as they were recorded: we read in them what the openai package reads in them."""

import json
from functools import partial

import openai
import pytest

from agentfsm import ModelError, ModelReplyError
from agentfsm.models import OpenAIChat
from agentfsm.models.openai.chat_wire import ChatStreamAssembler, decode
from agentfsm.ports import FinishReason
from tests.support import sdk_readings
from tests.support.cassettes import OK, Wire, named, of, recordings
from tests.support.recording_checks import PORTIONS, asked, check_dead, check_hostile, compare, fed, others_than
from tests.support.sdk_readings import Reading, ours

OTEL = "opentelemetry-instrumentation-openai"
AZURE = f"{OTEL}: test_azure/"
FILTERED = [f"{AZURE}test_chat_content_filtering{each}" for each in ("", "_with_events_with_content")]
REFUSED = [f"{AZURE}test_prompt_content_filtering{each}" for each in ("", "_with_events_with_content")]
NO_EVENTS = "_with_events_with_no_content"
# Azure leaves out the message of a reply that it filters, and the openai package has none to give.
FILTERED_NAMES = {f"{each} #0" for each in (*FILTERED, f"{AZURE}test_chat_content_filtering{NO_EVENTS}")}
# Azure's error in place of a reply, with status 200.
REFUSED_NAMES = {f"{each} #0" for each in (*REFUSED, f"{AZURE}test_prompt_content_filtering{NO_EVENTS}")}


def read(recording, portion=1 << 20):
    """Read a recording with our own reader."""
    if not recording.is_streamed:
        return ours(decode(recording.body))
    return ours(fed(ChatStreamAssembler(), recording.body, portion))


def test_whole_replies_are_read_as_the_vendor_reads_them():
    """Text, calls, reason and usage of each recorded reply are those that the openai package reads."""
    unreadable = FILTERED_NAMES | REFUSED_NAMES
    readable = [each for each in of(Wire.CHAT, streamed=False) if each.name not in unreadable]
    compare(readable, sdk_readings.chat, read).check(at_least=250)


def test_streams_are_read_as_the_vendor_reads_them():
    """However the network cuts a recorded stream, we read what the openai package puts together."""
    ways = [partial(read, portion=portion) for portion in PORTIONS]
    compare(of(Wire.CHAT, streamed=True), sdk_readings.chat, *ways).check(at_least=95)


def test_streams_that_come_byte_by_byte_are_read_alike():
    """A stream in pieces of one byte, or of a few, says the same."""
    streams = of(Wire.CHAT, streamed=True)[::10]
    compare(streams, sdk_readings.chat, *[partial(read, portion=few) for few in (1, 7)]).check(at_least=9)


# By hand, so that both readers cannot be wrong alike


def call(call_id, arguments, name="get_current_weather"):
    return call_id, name, arguments


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        (
            "langchain-openai: test_schema_parsing_failures #2",
            Reading(
                text='{"response":"good"}',
                calls=(),
                finish_reason=FinishReason.STOP,
                usage={"input_tokens": 44, "output_tokens": 402, "reasoning_tokens": 384},
            ),
        ),
        (
            f"{OTEL}: test_functions/test_open_ai_function_calls_tools_parallel #0",
            Reading(
                text="",
                calls=(
                    call("call_3JNWJ9wdfRsmkhKWql4HqJhR", '{"location": "San Francisco"}'),
                    call("call_8jQ7TzSBlLV4tzrMRpq5Tg98", '{"location": "Boston"}'),
                ),
                finish_reason=FinishReason.TOOL_CALLS,
                usage={"input_tokens": 70, "output_tokens": 46},
            ),
        ),
        (
            f"{OTEL}: test_functions/test_open_ai_function_calls_tools_streaming_parallel #0",
            Reading(
                text="",
                calls=(
                    call("call_cCPjAyfwTzboEKjVlqFrArNF", '{"location": "San Francisco"}'),
                    call("call_Zi4He1Ns0mozwT6f85nW1BOW", '{"location": "Boston"}'),
                ),
                finish_reason=FinishReason.TOOL_CALLS,
                usage=None,
            ),
        ),
        (
            f"{OTEL}: test_functions/test_open_ai_function_calls #0",
            Reading(
                text="",
                calls=(call("", '{\n  "location": "Boston"\n}'),),
                finish_reason=FinishReason.TOOL_CALLS,
                usage={"input_tokens": 82, "output_tokens": 16},
            ),
        ),
        (
            f"{OTEL}: test_chat_parse/test_async_parsed_refused_completion #0",
            Reading(
                text="I'm very sorry, but I can't assist with that request.",
                calls=(),
                finish_reason=FinishReason.REFUSAL,
                usage={"input_tokens": 65, "output_tokens": 13},
            ),
        ),
        (
            f"{OTEL}: test_vision/test_vision #0",
            Reading(
                text="This image depicts a series of smooth, undulating shapes that resemble dunes or",
                calls=(),
                finish_reason=FinishReason.LENGTH,
                usage={"input_tokens": 438, "output_tokens": 16},
            ),
        ),
    ],
)
def test_what_a_reader_of_the_recording_sees(name, reading):
    """Reasoning, parallel calls, a call of the old form, a refusal and a length stop are read as they stand."""
    assert read(named(name)) == reading


def test_cached_tokens_are_read():
    """A prompt that was asked a second time is billed as cached."""
    reading = read(named(f"{OTEL}: test_prompt_caching/test_openai_prompt_caching #1"))
    assert reading.usage == {"input_tokens": 1149, "output_tokens": 353, "cached_tokens": 1024}


@pytest.mark.parametrize("name", sorted(FILTERED_NAMES))
def test_a_filtered_reply_has_no_message(name):
    """Azure says that it filtered the reply, and sends nothing of it but the bill."""
    reading = read(named(name))
    assert (reading.text, reading.calls, reading.finish_reason) == ("", (), FinishReason.CONTENT_FILTER)
    assert reading.usage == {
        f"{side}put_tokens": json.loads(named(name).body)["usage"][f"{word}_tokens"]
        for side, word in (("in", "prompt"), ("out", "completion"))
    }


# What dies, and what is odd


def test_streams_that_die_are_never_taken_for_whole():
    """Wherever a recorded stream is cut off, it is not whole, or only its bill is missing."""
    assert check_dead(ChatStreamAssembler, of(Wire.CHAT, streamed=True)) >= 500


def test_odd_values_are_read_or_refused():
    """Whatever stands in place of any value of a recorded reply, it is read, or refused as a reply that is none."""
    failures = tuple(OpenAIChat.translations)
    whole = [each.body for each in of(Wire.CHAT, streamed=False)[::20] if each.name not in FILTERED_NAMES]
    assert check_hostile(decode, whole, failures) >= 1_000
    chunks = [each.body.split(b"\n\n")[1].removeprefix(b"data: ") for each in of(Wire.CHAT, streamed=True)[::8]]
    assert check_hostile(lambda chunk: ChatStreamAssembler().feed(b"data: %b\n\n" % chunk), chunks, failures) >= 500


# Errors


@pytest.mark.parametrize("name", sorted(REFUSED_NAMES))
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_with_status_200_goes_by_what_it_says(name, streamed):
    """Azure refuses a prompt with status 200 and puts the true one into the error: it is not asked again.

    Nor is it where a stream was asked for and plain JSON came: the error's words were lost there.
    """
    error = await asked(OpenAIChat, named(name), streamed=streamed)
    assert type(error) is ModelError
    assert "(400: The response was filtered" in str(error)


@pytest.mark.parametrize("streamed", [False, True])
async def test_recorded_errors_are_told_as_the_vendor_tells_them(streamed):
    """What the openai package takes for refused for good is refused for good, in the server's own words."""
    failed = [each for each in recordings() if each.wire is Wire.CHAT and each.status != OK]
    for recording in failed:
        with pytest.raises(openai.APIStatusError) as theirs:
            sdk_readings.chat(recording)
        mine = await asked(OpenAIChat, recording, streamed=streamed)
        assert theirs.value.status_code in {400, 404}, recording.name
        assert type(mine) is ModelError, recording.name
        assert theirs.value.body["message"][:80] in str(mine), recording.name
    assert len(failed) >= 11


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_was_recorded_of_other_wires_is_no_chat_completion(streamed):
    """Embeddings, images, assistants, old completions and the other wires are garbled replies, and nothing else."""
    others = others_than(Wire.CHAT)
    for recording in others:
        told = await asked(OpenAIChat, recording, streamed=streamed)
        assert type(told) is ModelReplyError, (recording.name, told)
    assert len(others) >= 100
