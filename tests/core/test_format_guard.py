"""The hash of each format of the journal is recorded here, so that a change of the format cannot go unnoticed.

A hash covers all that records may hold: the types of headers, events and inbox items, their fields, which of these have
a default, and the words of the closed sets. The hash of a released format never changes.
"""

import json
from enum import StrEnum
from hashlib import sha256
from typing import Union, get_args

import attrs
import pytest

from agentfsm.core.codec import decode_event
from agentfsm.core.errors import TooNewError
from agentfsm.core.events import EVENTS
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import InboxItem
from agentfsm.core.limits import StopReason
from tests.support.format_1 import FORMAT_1
from tests.support.format_2 import FORMAT_2
from tests.support.format_3 import FORMAT_3
from tests.support.format_4 import FORMAT_4
from tests.support.format_5 import FORMAT_5

FORMATS = (FORMAT_1, FORMAT_2, FORMAT_3, FORMAT_4, FORMAT_5)
# The formats up to this one are released. Raise it with the release.
RELEASED = 4
HASHES = {
    1: "e13142fe2c1fd055",
    2: "c703d6abe2ecc954",
    3: "34af94d19d7d12b1",
    4: "3d7effc3e500cbed",
