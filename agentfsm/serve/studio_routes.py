"""The studio as a group of routes: its files under /studio/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Mount, Route

from agentfsm.serve.endpoints import RouteGroup
from agentfsm.studio import StudioFiles

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm.serve.access import Authenticate
    from agentfsm.serve.gateway import Gateway

# Path of the studio.
STUDIO_PATH: Final = "/studio/"


async def _redirect(request: Request) -> RedirectResponse:
    return RedirectResponse(request.scope.get("root_path", "") + STUDIO_PATH)


def _build_routes(_gateway: Gateway, _auth: Authenticate) -> Sequence[BaseRoute]:
    """Return the routes of the files, which need no credential: they are the same for all, and hold no data."""
    return [Route("/", _redirect), Mount(STUDIO_PATH.rstrip("/"), StudioFiles())]


STUDIO: Final = RouteGroup(name="studio", build_routes=_build_routes)
