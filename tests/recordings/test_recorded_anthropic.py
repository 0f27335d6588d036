"""Messages of Anthropic as they were recorded: we read in them what the anthropic package reads in them."""

from functools import partial

import pytest

from agentfsm import ModelError, ModelReplyError
from agentfsm.models import Anthropic
from agentfsm.models.anthropic.wire import AnthropicStreamAssembler, decode
from agentfsm.ports import FinishReason
from tests.support import sdk_readings
from tests.support.cassettes import Wire, named, of
from tests.support.recording_checks import PORTIONS, asked, check_dead, check_hostile, compare, fed, others_than
from tests.support.sdk_readings import Reading, ours, with_parsed_arguments

LANGCHAIN = "langchain-anthropic"
OTEL = "opentelemetry-instrumentation-anthropic"


def read(recording, portion=1 << 20):
    """Read a recording with our own reader."""
    if not recording.is_streamed:
        return with_parsed_arguments(ours(decode(recording.body)))
    return with_parsed_arguments(ours(fed(AnthropicStreamAssembler(), recording.body, portion)))


def test_whole_replies_are_read_as_the_vendor_reads_them():
    """Text, calls, reason and usage of each recorded reply are those that the anthropic package reads."""
    compare(of(Wire.MESSAGES, streamed=False), sdk_readings.messages, read).check(at_least=90)


def test_streams_are_read_as_the_vendor_reads_them():
    """However the network cuts a recorded stream, we read what the anthropic package puts together."""
    ways = [partial(read, portion=portion) for portion in PORTIONS]
    compare(of(Wire.MESSAGES, streamed=True), sdk_readings.messages, *ways).check(at_least=58)


def test_streams_that_come_byte_by_byte_are_read_alike():
    """A stream in pieces of one byte, or of a few, says the same."""
    streams = of(Wire.MESSAGES, streamed=True)[::5]
    compare(streams, sdk_readings.messages, *[partial(read, portion=few) for few in (1, 7)]).check(at_least=11)


# By hand, so that both readers cannot be wrong alike


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        (
            f"{LANGCHAIN}: test_agent_loop #1",
            Reading(
                text="The weather in San Francisco, CA is currently **sunny**! 🌞",
                calls=(),
                finish_reason=FinishReason.STOP,
                usage={"input_tokens": 639, "output_tokens": 20},
            ),
        ),
        (
            f"{LANGCHAIN}: test_agent_loop_streaming #0",
            Reading(
                text="",
                calls=(("toolu_01DoxA6XXQEf12XZeM869dvZ", "get_weather", '{"location": "San Francisco, CA"}'),),
                finish_reason=FinishReason.TOOL_CALLS,
                usage={"input_tokens": 567, "output_tokens": 57},
            ),
        ),
        (
            f"{LANGCHAIN}: test_system_tool_addition #0",
            Reading(
                text="",
                calls=(("toolu_013fQMr21G6g8bbJSTGZM8Xi", "get_time", "{}"),),
                finish_reason=FinishReason.TOOL_CALLS,
                usage={"input_tokens": 379, "output_tokens": 26},
            ),
        ),
    ],
)
def test_what_a_reader_of_the_recording_sees(name, reading):
    """A text, a call in a stream and empty arguments are read as they stand."""
    assert read(named(name)) == reading


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        (
            "test_anthropic_tools_legacy",
            (
                (
                    "toolu_012r6TBCWjRHG71j6zruYyUL",
                    "get_weather",
                    '{"location": "New York, NY", "unit": "fahrenheit"}',
                ),
                ("toolu_01SkeBKkLCNYWNuivqFerGDd", "get_time", '{"timezone": "America/New_York"}'),
            ),
        ),
        (
            "test_anthropic_tools_streaming_legacy",
            (
                (
                    "toolu_014x5X91kx3fvdhpLvwXZWE2",
                    "get_weather",
                    '{"location": "San Francisco, CA", "unit": "celsius"}',
                ),
                ("toolu_0121kXsENLvoDZ72LCuAnCCz", "get_time", '{"timezone": "America/Los_Angeles"}'),
            ),
        ),
    ],
)
def test_parallel_calls_are_read_in_order(name, calls):
    """Two calls behind a text come in the order in which the model wrote them."""
    reading = read(named(f"{OTEL}: test_messages/{name} #0"))
    assert (reading.calls, reading.finish_reason) == (calls, FinishReason.TOOL_CALLS)
    assert reading.text.startswith("Certainly!")


@pytest.mark.parametrize("way", ["async", "async_stream"])
def test_the_cache_is_read_and_written(way):
    """Anthropic counts what is cached beside the input, and we count it as a share of the input."""
    written, cached = (
        read(named(f"{OTEL}: test_prompt_caching/test_anthropic_prompt_caching_{way}_legacy #{number}")).usage
        for number in (0, 1)
    )
    assert written["cache_write_tokens"] == cached["cached_tokens"] == {"async": 1_165, "async_stream": 1_167}[way]
    assert written["input_tokens"] == cached["input_tokens"] == {"async": 1_169, "async_stream": 1_171}[way]


# What dies, and what is odd


def test_streams_that_die_are_never_taken_for_whole():
    """Wherever a recorded stream is cut off, it is not whole, or only its bill is missing."""
    assert check_dead(AnthropicStreamAssembler, of(Wire.MESSAGES, streamed=True)) >= 300


def test_odd_values_are_read_or_refused():
    """Whatever stands in place of any value of a recorded reply, it is read, or refused as a reply that is none."""
    failures = (*Anthropic.translations, ModelError)
    whole = [each.body for each in of(Wire.MESSAGES, streamed=False)[::8]]
    assert check_hostile(decode, whole, failures) >= 500
    stream = of(Wire.MESSAGES, streamed=True)[3].body

    def feed(event):
        assembly = AnthropicStreamAssembler()
        assembly.feed(stream)
        assembly.is_done = False
        assembly.feed(b"data: %b\n\n" % event)

    events = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: ")]
    assert check_hostile(feed, events[:20], failures) >= 200


# Errors


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_was_recorded_of_other_wires_is_no_message(streamed):
    """Embeddings, images, assistants, completions and the other wires are garbled replies, and nothing else."""
    others = others_than(Wire.MESSAGES)
    for recording in others:
        told = await asked(Anthropic, recording, streamed=streamed)
        assert isinstance(told, ModelError), (recording.name, told)
        # Azure puts errors where a reply belongs.
        assert type(told) is ModelReplyError or b'"error"' in recording.body[:20], (recording.name, told)
    assert len(others) >= 90
