"""Targets of a roll-out: whose runs get an arm, whatever its weight is, such as those of testers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import NAME
from agentfsm.core.value import Value

_FORM: Final = "write a target as ARM:CONDITION, ..., such as 'new:role=tester' or 'new:tenant=acme,user=ann|bob'"
# Characters that separate the parts of a target as text.
_SEPARATORS: Final = ",|="


def _as_texts(values: Iterable[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)


def _as_lists(values: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    return {name: _as_texts(each) for name, each in values.items()}


@attrs.frozen(kw_only=True)
class Target(Value):
    """Runs that get an arm: `Target(arm="new", roles="tester")`. All conditions hold, each by one of its values.

    Raises:
        MisuseError: if there is no condition, or a name or value is empty or has one of the characters , | and =.
    """

    arm: str
    """Name of the arm."""

    users: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)
    """Users on whose behalf the run works; empty for any."""

    tenants: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)
    """Tenants of the run; empty for any."""

    roles: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)
    """Roles of which the run has one; empty for any."""

    metadata: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_as_lists)
    """Values of fields of the metadata, as text; empty for any."""

    def __attrs_post_init__(self) -> None:
        NAME.check("Target", "arm", self.arm)
        conditions = self._list_conditions()
        if not conditions:
            raise MisuseError(f"a target of arm {self.arm!r} has no condition, and would get all runs: use its weight")
        for name, values in conditions.items():
            for text in (name.removeprefix("metadata."), *values):
                if not text or not text.isprintable() or any(each in text for each in _SEPARATORS):
                    raise MisuseError(f"a target cannot have {text!r}: {_FORM}")

    def matches(
        self, *, user: str | None, tenant: str | None, roles: Iterable[str], metadata: Mapping[str, Any]
    ) -> bool:
        """Return whether a new run gets the arm."""
        return (
            (not self.users or user in self.users)
            and (not self.tenants or tenant in self.tenants)
            and (not self.roles or not {*self.roles}.isdisjoint(roles))
            and all(name in metadata and str(metadata[name]) in values for name, values in self.metadata.items())
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the target that `str` has written: the arm, a colon, and conditions separated by commas.

        A condition is `user`, `tenant`, `role` or `metadata.NAME`, "=", and values separated by "|".

        Raises:
            MisuseError: if the text is no target.
        """
        arm, colon, rest = text.partition(":")
        found: dict[str, tuple[str, ...]] = {}
        for each in rest.split(","):
            name, is_given, values = each.strip().partition("=")
            if not (colon and is_given) or name in found:
                raise MisuseError(f"target {text[:80]!r}: {_FORM}")
            found[name] = tuple(values.split("|"))
        metadata = {
            name.removeprefix("metadata."): found.pop(name) for name in [*found] if name.startswith("metadata.")
        }
        if unknown := found.keys() - {"user", "tenant", "role"}:
            raise MisuseError(f"target {text[:80]!r}: there is no condition {min(unknown)!r}; {_FORM}")
        fields: dict[str, Any] = {f"{name}s": values for name, values in found.items()}
        return cls(arm=arm.strip(), metadata=metadata, **fields)

    def __str__(self) -> str:
        conditions = [f"{name}={'|'.join(values)}" for name, values in self._list_conditions().items()]
        return f"{self.arm}:{','.join(conditions)}"

    def _list_conditions(self) -> dict[str, tuple[str, ...]]:
        given = {"user": self.users, "tenant": self.tenants, "role": self.roles}
        return {name: values for name, values in given.items() if values} | {
            f"metadata.{name}": values for name, values in self.metadata.items()
        }


def read_targets(targets: Iterable[Target | str], arms: Iterable[str], owner: str) -> tuple[Target, ...]:
    """Return targets, some of them as text.

    Args:
        targets: The targets.
        arms: Names of the arms that they may have.
        owner: Text that names the roll-out, for errors.

    Raises:
        MisuseError: if a text is no target, or names another arm.
    """
    found = tuple([each if isinstance(each, Target) else Target.parse(each) for each in targets])
    if unknown := {each.arm for each in found} - {*arms}:
        raise MisuseError(f"{owner} has no arm {min(unknown)!r}: {', '.join(arms)}")
    return found
