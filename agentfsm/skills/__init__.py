"""Skills: folders with a `SKILL.md`, by the Agent Skills specification, which an agent reads when it needs them.

It needs the extra: `pip install agentfsm[skills]`.
"""

from agentfsm._lib.pins import MemoryPins, Pin, PinFile, Pins, PinsError
from agentfsm.skills.agent_skills import Skills
from agentfsm.skills.skill import Skill, SkillFinding

__all__ = ["MemoryPins", "Pin", "PinFile", "Pins", "PinsError", "Skill", "SkillFinding", "Skills"]
