"""Mutations of programs: each takes a description and returns a changed one, or None if it does not apply."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import attrs

from tests.changed.programs import JOINS, Names, Program, Unit, throw_undo, throw_unit, walk

# How likely a change is aimed at a call that is open.
AIMED: Final = 0.7
UnitChange = Callable[[Names, Unit], Unit | None]
ProgramChange = Callable[[Names, Program], Program | None]


def mutate(names: Names, program: Program, aims: Collection[str]) -> tuple[Program, list[str]]:
    """Return a program that one or a few changes made of another one, and the names of the changes.

    Args:
        names: Gives ids to what is new.
        program: The program.
        aims: Ids of the units that are changed rather than others.
    """
    changes: list[str] = []
    wanted = names.dice.choice((1, 1, 2, 3))
    while len(changes) < wanted:
        change = names.dice.choice(UNIT_CHANGES) if names.dice.random() < 0.55 else names.dice.choice(PROGRAM_CHANGES)
        changed = _apply(names, program, change, aims)
        if changed is not None and changed != program:
            program, changes = changed, [*changes, change.__name__]
    return program, changes


def _apply(names: Names, program: Program, change: Any, aims: Collection[str]) -> Program | None:
    """Apply a change to a unit or a program at a random place of a program."""
    programs = [program, *[unit.inner for unit in walk(program.units) if unit.inner is not None]]
    if change in PROGRAM_CHANGES:
        old: Any = names.dice.choice((program, *programs))
    else:
        units = list(walk(program.units))
        old = names.dice.choice([each for each in units if each.id in aims and names.dice.random() < AIMED] or units)
    new = change(names, old)
    return None if new is None else _replace(program, old, new)


def _replace(owner: Any, old: Any, new: Any) -> Any:
    """Return a program or unit with a part replaced, at any depth."""
    if owner is old:
        return new
    if owner is None or isinstance(owner, str):
        return owner
    if isinstance(owner, Program):
        return attrs.evolve(owner, units=tuple(_replace(unit, old, new) for unit in owner.units))
    parts = {name: _replace(getattr(owner, name), old, new) for name in ("inner", "item", "undo")}
    return attrs.evolve(owner, **parts)


# Changes of a tool or a step


def renamed(_names: Names, unit: Unit) -> Unit | None:
    """Another name, for the same effect; of every other unit, it is declared."""
    replaces = (unit.name, *unit.replaces) if int(unit.id[1:]) % 2 else unit.replaces
    return attrs.evolve(unit, name=f"{unit.name}r", replaces=replaces)


def retyped(_names: Names, unit: Unit) -> Unit | None:
    """Another parameter."""
    return attrs.evolve(unit, parameter="m") if unit.body == "function" else None


def redeclared(names: Names, unit: Unit) -> Unit | None:
    """Another declaration of what may be done with its calls."""
    new: dict[str, tuple[Any, ...]] = {
        "idempotent": (not unit.idempotent,),
        "read_only": (not unit.read_only,),
        "on_unknown": ("", "rerun", "fail", "ask"),
        "description": ("Act otherwise.",),
    }
    field = names.dice.choice(list(new))
    if unit.body != "function" and field != "description":
        return None
    changed = attrs.evolve(unit, **{field: names.dice.choice(new[field])})
    return None if changed.read_only and changed.undo else changed


def gated(names: Names, unit: Unit) -> Unit | None:
    """Something that refuses a call, or asks about it, or does so no more."""
    field = names.dice.choice(("asks", "asks", "enabled", "valid", "priced", "is_down", "denied", "rule"))
    if field == "rule":
        return attrs.evolve(unit, rule=names.dice.choice([each for each in ("", "ask", "refuse") if each != unit.rule]))
    return attrs.evolve(unit, **{field: not getattr(unit, field)})


def condition_changed(names: Names, unit: Unit) -> Unit | None:
    """Another `when`."""
    return attrs.evolve(unit, when=names.dice.choice((None, True, False, False)))


def key_changed(names: Names, unit: Unit) -> Unit | None:
    """Another `key=`."""
    return attrs.evolve(unit, key=names.dice.choice(("", "k2"))) if unit.body == "function" else None


def undo_changed(names: Names, unit: Unit) -> Unit | None:
    """A compensation is added, removed or renamed."""
    if unit.id.startswith("x") or unit.read_only or unit.body == "each":
        return None
    if unit.undo is None:
        return attrs.evolve(unit, undo=throw_undo(names))
    return attrs.evolve(unit, undo=names.dice.choice((None, attrs.evolve(unit.undo, name=f"{unit.undo.name}r"))))


def fewer_items(_names: Names, unit: Unit) -> Unit | None:
    """A list may not be as long as it was, or a loop may not be repeated as often."""
    return attrs.evolve(unit, max_items=1) if unit.body in ("each", "until") else None


def failing(_names: Names, unit: Unit) -> Unit | None:
    """It raises, or does so no more."""
    return attrs.evolve(unit, fails=not unit.fails) if unit.body == "function" else None


UNIT_CHANGES: Final[tuple[UnitChange, ...]] = (
    renamed,
    retyped,
    redeclared,
    redeclared,
    gated,
    gated,
    gated,
    condition_changed,
    key_changed,
    undo_changed,
    fewer_items,
    fewer_items,
    fewer_items,
    failing,
)


# Changes of an agent or a flow


def unit_added(names: Names, program: Program) -> Program | None:
    """A new tool or step, anywhere."""
    new = throw_unit(names, depth=2, is_step=program.is_flow)
    at = names.dice.randint(0, len(program.units))
    if at and program.is_flow and names.dice.random() < 0.5:
        new = attrs.evolve(new, after=(names.dice.choice(program.units[:at]).id,))
    return attrs.evolve(program, units=(*program.units[:at], new, *program.units[at:]))


def unit_removed(names: Names, program: Program) -> Program | None:
    """A tool or step less."""
    if len(program.units) < 2:
        return None
    gone = names.dice.choice(program.units)
    left = [each for each in program.units if each is not gone]
    return attrs.evolve(
        program,
        units=tuple(attrs.evolve(each, after=tuple(i for i in each.after if i != gone.id)) for each in left),
    )


def reordered(_names: Names, program: Program) -> Program | None:
    """The other order, as far as dependencies allow."""
    return attrs.evolve(program, units=program.units[::-1]) if not program.is_flow else _in_another_order(program)


def _in_another_order(program: Program) -> Program:
    return attrs.evolve(program, units=tuple(attrs.evolve(each, after=()) for each in program.units[::-1]))


def rewired(names: Names, program: Program) -> Program | None:
    """A step takes the results of other steps, or waits for them otherwise."""
    if not program.is_flow or len(program.units) < 2:
        return None
    at = names.dice.randrange(1, len(program.units))
    unit, before = program.units[at], [each.id for each in program.units[:at]]
    after = tuple(sorted(names.dice.sample(before, names.dice.randint(0, len(before)))))
    changed = attrs.evolve(unit, after=after, join=names.dice.choice(JOINS) if after else JOINS[0])
    return attrs.evolve(program, units=(*program.units[:at], changed, *program.units[at + 1 :]))


def of_another_kind(names: Names, program: Program) -> Program | None:
    """A function becomes an agent, a list, a loop or a flow that has its effect within, or the other way round."""
    unit = names.dice.choice(program.units)
    if unit.body != "function":
        return _replace(program, unit, attrs.evolve(unit, body="function", inner=None, item=None))
    kept = {name: getattr(unit, name) for name in ("asks", "when", "after", "join")}
    own = {"asks": False, "when": None, "undo": None, "after": (), "join": JOINS[0], "key": "", "name": f"{unit.name}i"}
    within = attrs.evolve(unit, **own)
    body = names.dice.choice(("agent", "each", "until", "flow") if program.is_flow else ("agent",))
    changed = Unit(id=unit.id, name=unit.name, body=body, **kept)
    if body in ("each", "until"):
        return _replace(program, unit, attrs.evolve(changed, item=within))
    made = names.new("p")
    inner = Program(id=made, name=f"{made}n", is_flow=body == "flow", units=(within,))
    return _replace(program, unit, attrs.evolve(changed, inner=inner, undo=unit.undo))


def planner_changed(names: Names, program: Program) -> Program | None:
    """A planner is added or removed, or its plans are reviewed from now on."""
    return None if program.is_flow else attrs.evolve(program, plans=names.dice.choice(("", "plans", "reviewed")))


def limited(_names: Names, program: Program) -> Program | None:
    """Fewer calls are allowed."""
    return attrs.evolve(program, tool_calls=2)


PROGRAM_CHANGES: Final[tuple[ProgramChange, ...]] = (
    unit_added,
    unit_added,
    unit_removed,
    reordered,
    rewired,
    of_another_kind,
    of_another_kind,
    planner_changed,
    planner_changed,
    limited,
)
