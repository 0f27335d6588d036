"""Kinds of plans."""

from __future__ import annotations

from enum import StrEnum


class PlanKind(StrEnum):
    """Purpose of a plan."""

    FORWARD = "forward"
    """It works towards the goal of the run: a first plan, or one that continues a finished one."""

    REPLAN = "replan"
    """It replaces a plan that could not be carried out, or whose results a judge refused."""

    COMPENSATION = "compensation"
    """It undoes the steps of a plan that have succeeded."""
