"""Roll-outs of the agents of the server: their weights, targets and results, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import attrs
from pydantic import Field

from agentfsm.core.errors import MisuseError
from agentfsm.releases.arm_results import read_results
from agentfsm.releases.rollout_log import RolloutControl, list_rollouts
from agentfsm.serve.bodies import RequestBody
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.errors import ForbiddenError
from agentfsm.serve.run_documents import JSONDocument

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentfsm.releases import RolloutChange
    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway


class BackBody(RequestBody):
    """A roll-back."""

    reason: Annotated[str, Field(min_length=1, max_length=1_000)]
    """The reason, for the log."""

    arm: str | None = None
    """Arm whose weight goes to the base, and whose targets end. Default: return to the plan before."""

    number: int = Field(ge=1)
    """Number of the newest entry of the log that the caller has seen. Nothing is done if there is a newer one."""


async def get_rollouts(gateway: Gateway, _request: Request, caller: Caller, _body: object) -> Response:
    """List the roll-outs, each with its log and the results of its arms. Needs a key without a tenant."""
    _check_scope(caller)
    found = []
    for name in await list_rollouts(gateway.runs.store):
        control = RolloutControl(name, gateway.runs.store)
        log = await control.log()
        if _is_served(gateway, log[-1]):
            arms = [attrs.asdict(each) for each in await read_results(control)]
            found.append({"name": name, "log": [_build_document(each) for each in log], "arms": arms})
    return JSONDocument({"rollouts": found})


async def back(gateway: Gateway, request: Request, caller: Caller, body: BackBody) -> Response:
    """Return a roll-out to the plan before, or give the weight of one arm to the base. Needs a key without a tenant."""
    _check_scope(caller)
    name = request.path_params["name"]
    known = name in await list_rollouts(gateway.runs.store)
    control = RolloutControl(name, gateway.runs.store) if known else None
    newest = None if control is None else await control.newest()
    if control is None or newest is None or not _is_served(gateway, newest):
        raise MisuseError(f"there is no roll-out {name[:80]!r} of an agent of this server")
    change = await control.back(by=caller.user, reason=body.reason, arm=body.arm, number=body.number)
    return JSONDocument(_build_document(change))


def _check_scope(caller: Caller) -> None:
    if caller.tenant is not None:  # a roll-out is about the runs of all tenants
        raise ForbiddenError("this needs a key without a tenant")


def _is_served(gateway: Gateway, change: RolloutChange) -> bool:
    """Return whether a roll-out is one of an agent of the server, or an experiment without releases."""
    return not gateway.agents or change.plan.agent in {"", *gateway.agents}


def _build_document(change: RolloutChange) -> dict[str, Any]:
    plan = change.plan
    document = {name: value for name, value in change.to_dict().items() if name != "plan"}
    return document | {
        "agent": plan.agent,
        "unit": plan.unit,
        "base": plan.base,
        "weights": plan.weights,
        "targets": [str(each) for each in plan.targets],
        "holdout": plan.holdout,
        "rules": [str(each) for each in plan.rules],
    }


ROLLOUTS: Final = RouteGroup(
    name="roll-outs",
    endpoints=(
        Endpoint(method="GET", path="/v1/rollouts", handler=get_rollouts, scope="admin"),
        Endpoint(method="POST", path="/v1/rollouts/{name}/back", handler=back, scope="admin", body=BackBody),
    ),
)
