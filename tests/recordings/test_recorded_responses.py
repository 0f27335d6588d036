"""Responses as they were recorded: we read in them what the openai package reads in them."""

from functools import partial

import openai
import pytest

from agentfsm import ModelError, ModelReplyError
from agentfsm.models import OpenAIResponses
from agentfsm.models.openai.responses_wire import ResponsesStreamAssembler, decode
from agentfsm.ports import FinishReason
from tests.support import sdk_readings
from tests.support.cassettes import OK, Wire, named, of, recordings
from tests.support.recording_checks import PORTIONS, asked, check_dead, check_hostile, compare, fed, others_than
from tests.support.sdk_readings import Reading, ours

LANGCHAIN = "langchain-openai"
OTEL = "opentelemetry-instrumentation-openai"


def read(recording, portion=1 << 20):
    """Read a recording with our own reader."""
    if not recording.is_streamed:
        return ours(decode(recording.body))
    return ours(fed(ResponsesStreamAssembler(), recording.body, portion))


def readable(*, streamed):
    """Return the recordings that hold nothing but what a run can go on with."""
    return [each for each in of(Wire.RESPONSES, streamed=streamed) if not sdk_readings.wants_the_caller(each)]


def test_whole_replies_are_read_as_the_vendor_reads_them():
    """Text, calls, reason and usage of each recorded reply are those that the openai package reads."""
    compare(readable(streamed=False), sdk_readings.responses, read).check(at_least=60)


def test_streams_are_read_as_the_vendor_reads_them():
    """However the network cuts a recorded stream, we read what the openai package puts together."""
    ways = [partial(read, portion=portion) for portion in PORTIONS]
    compare(readable(streamed=True), sdk_readings.responses, *ways).check(at_least=135)


def test_streams_that_come_byte_by_byte_are_read_alike():
    """A stream in pieces of one byte, or of a few, says the same."""
    compare(
        readable(streamed=True)[::10], sdk_readings.responses, *[partial(read, portion=few) for few in (1, 7)]
    ).check(at_least=13)


@pytest.mark.parametrize("streamed", [False, True])
def test_what_only_the_caller_can_carry_out_is_said(streamed):
    """A patch or a tool of free text waits for an answer that no run can give, and the reply says so."""
    recorded = [each for each in of(Wire.RESPONSES, streamed=streamed) if sdk_readings.wants_the_caller(each)]
    for recording in recorded:
        whole = fed(ResponsesStreamAssembler(), recording.body, 1 << 20) if streamed else decode(recording.body)
        assert "which the caller has to execute" in whole.unanswered
    assert len(recorded) >= 2


# By hand, so that both readers cannot be wrong alike


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        (
            f"{LANGCHAIN}: test_code_interpreter #0",
            Reading(
                text="The result of 3³ is 27.",
                calls=(),
                finish_reason=FinishReason.STOP,
                usage={"input_tokens": 762, "output_tokens": 242, "reasoning_tokens": 192},
            ),
        ),
        (
            f"{LANGCHAIN}: test_system_additional_tools #0",
            Reading(
                text="",
                calls=(("call_vjzHNCqMpYWWL5lwhUNl17nC", "get_time", "{}"),),
                finish_reason=FinishReason.TOOL_CALLS,
                usage={"input_tokens": 122, "output_tokens": 14},
            ),
        ),
        (
            f"{OTEL}: test_responses/test_responses_tool_calls #0",
            Reading(
                text="",
                calls=(
                    ("call_tYDv1bhtioyX33juEGDY4D6H", "get_weather", '{"location":"London"}'),
                    ("call_lC079UhGnLJngBlPQO0FS6sv", "get_weather", '{"location":"London"}'),
                ),
                finish_reason=FinishReason.TOOL_CALLS,
                usage={"input_tokens": 58, "output_tokens": 44},
            ),
        ),
        (
            f"{LANGCHAIN}: test_incomplete_response #0",
            Reading(
                text="In the heart of the ancient forest, a bear named Bramble wandered beneath the",
                calls=(),
                finish_reason=FinishReason.LENGTH,
                usage={"input_tokens": 18, "output_tokens": 16},
            ),
        ),
        (
            f"{LANGCHAIN}: test_incomplete_response #1",
            Reading(
                text="In a lush, green valley, a bear named Benny roamed. Every morning",
                calls=(),
                finish_reason=FinishReason.LENGTH,
                usage={"input_tokens": 18, "output_tokens": 16},
            ),
        ),
        (
            f"{LANGCHAIN}: TestChatOpenAICodexStandard.test_image_inputs #3",
            Reading(
                text="Flowchart of query-answer workflow.",
                calls=(),
                finish_reason=FinishReason.STOP,
                usage={"input_tokens": 2089, "output_tokens": 11, "cached_tokens": 1280},
            ),
        ),
        (
            f"{LANGCHAIN}: TestChatOpenAICodexStandard.test_tool_calling_with_no_arguments #0",
            Reading(
                text="",
                calls=(("call_sPgYHM5GQv3qa71vH1aZpTAK", "magic_function_no_args", "{}"),),
                finish_reason=FinishReason.TOOL_CALLS,
                usage={"input_tokens": 66, "output_tokens": 16},
            ),
        ),
    ],
)
def test_what_a_reader_of_the_recording_sees(name, reading):
    """Reasoning, parallel calls, empty arguments, a length stop and cached tokens are read as they stand."""
    assert read(named(name)) == reading


# What dies, and what is odd


def test_streams_that_die_are_never_taken_for_whole():
    """Wherever a recorded stream is cut off, it is not whole, or only its bill is missing."""
    assert check_dead(ResponsesStreamAssembler, readable(streamed=True)) >= 300


def test_odd_values_are_read_or_refused():
    """Whatever stands in place of any value of a recorded reply, it is read, or refused as a reply that is none."""
    failures = (*OpenAIResponses.translations, ModelError)
    whole = [each.body for each in readable(streamed=False)[::8]]
    assert check_hostile(decode, whole, failures) >= 500
    stream = readable(streamed=True)[3].body

    def feed(event):
        assembly = ResponsesStreamAssembler()
        assembly.feed(stream)
        assembly.is_done = False
        assembly.feed(b"data: %b\n\n" % event)

    events = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: ")]
    assert check_hostile(feed, events[:20], failures) >= 200


# Errors


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_recorded_error_is_told_as_the_vendor_tells_it(streamed):
    """What the openai package takes for refused for good is refused for good, in the server's own words."""
    (recording,) = [each for each in recordings() if each.wire is Wire.RESPONSES and each.status != OK]
    with pytest.raises(openai.AuthenticationError):
        sdk_readings.responses(recording)
    mine = await asked(OpenAIResponses, recording, streamed=streamed)
    assert type(mine) is ModelError
    assert "Could not parse your authentication token" in str(mine)


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_was_recorded_of_other_wires_is_no_response(streamed):
    """Embeddings, images, assistants, completions and the other wires are garbled replies, and nothing else."""
    others = others_than(Wire.RESPONSES)
    for recording in others:
        told = await asked(OpenAIResponses, recording, streamed=streamed)
        assert isinstance(told, ModelError), (recording.name, told)
        # Azure puts errors where a reply belongs.
        assert type(told) is ModelReplyError or b'"error"' in recording.body[:20], (recording.name, told)
    assert len(others) >= 90
