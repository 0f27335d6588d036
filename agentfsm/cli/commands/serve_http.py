"""`agentfsm serve`, `studio` and `webhooks`: serve agents over HTTP, execute their runs, and show them in a browser."""

from __future__ import annotations

import argparse
import gc
import hmac
import os
import secrets
import webbrowser
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from anyio.abc import TaskStatus

from agentfsm.agents.agent import WORKER_PARALLEL, Agent
from agentfsm.cli.argument_types import DEFAULT_ADDRESS, parse_count, split_address
from agentfsm.cli.arguments import AddParser, add_address, add_command, add_deltas, add_drain, add_notifier
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_time
from agentfsm.cli.resolve.agent_target import is_target, load_target, split_target
from agentfsm.cli.resolve.command_hint import build_header_hint
from agentfsm.cli.resolve.run_lookup import attach_rollout_store, attach_store, load_run_agent
from agentfsm.cli.resolve.store_location import open_existing_store, resolve_location
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr, user_name
from agentfsm.core.errors import MisuseError
from agentfsm.core.text_safety import one_line
from agentfsm.core.value import Value
from agentfsm.releases import Rollout
from agentfsm.stores.loading import mask_password

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Store
    from agentfsm.serve import Caller, GatewayApp
    from agentfsm.serve.access import Authenticate
    from agentfsm.serve.continuation import Continuation
    from agentfsm.serve.endpoints import RouteGroup

# Only programs on this machine can reach these.
_STUDIO_ADDRESS: Final = "127.0.0.1:8787"


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    _add_serve(add)
    _add_webhooks(add)


def _add_serve(add: AddParser) -> None:
    serve_options = add_command(add, serve)
    serve_options.add_argument(
        "agents", metavar="module:agent", nargs="+", help="an Agent, or a function that returns one"
    )
    add_address(serve_options, DEFAULT_ADDRESS)
    serve_options.add_argument(
        "--keys", metavar="FILE", help="file of API keys; without it, only programs of this machine may connect"
    )
    serve_options.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[], help="another host name of the server"
    )
    serve_options.add_argument(
        "--parallel",
        metavar="N",
        type=parse_count,
        default=WORKER_PARALLEL,
        help="runs of each agent at a time (default: %(default)s)",
    )
    add_drain(serve_options)
    serve_options.add_argument("--no-worker", action="store_true", help="execute no runs: `agentfsm worker` does")
    serve_options.add_argument("--studio", action="store_true", help="also serve pages to see the runs and steer them")
    serve_options.add_argument(
        "--webhooks",
        metavar="FILE",
        type=Path,
        help="JSON file of webhooks, which start runs or are sent their ends and waits: see `agentfsm webhooks`",
    )
    serve_options.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="origin of pages that may call the server from a browser, for example https://app.example.org",
    )
    serve_options.add_argument(
        "--allow-header",
        metavar="NAME",
        action="append",
        default=[],
        help="a further header that these pages may send; those of the protocols and of tracing are allowed",
    )
    serve_options.add_argument(
        "--root-path",
        metavar="PATH",
        default="",
        help="path below which a proxy, which removes it, has the server, for example /agents",
    )
    serve_options.add_argument(
        "--four-eyes", action="store_true", help="no user may approve or settle a call that it has shaped"
    )
    serve_options.add_argument(
        "--max-queue",
        metavar="N",
        type=parse_count,
        default=1_000,
        help="runs of an agent that may wait for a worker before new ones are refused (default: %(default)s)",
    )
    add_deltas(serve_options)
    add_notifier(serve_options, "--alerts-to")
    _add_connections(serve_options)
    for who, name in (("each user", ""), ("all users of a tenant together", "tenant-")):
        limits = {
            "per-minute": "requests in a minute",
            "open-requests": "requests at once, such as event streams, in this process,",
            "tokens-per-minute": "tokens in a minute",
            "running": "runs",
        }
        for option, text in limits.items():
            serve_options.add_argument(f"--{name}{option}", metavar="N", type=parse_count, help=f"{text} of {who}")
    studio_options = add_command(add, studio)
    studio_options.add_argument(
        "subject",
        metavar="STORE|module:agent",
        nargs="?",
        help="a store, whose runs are shown; or an agent, whose runs are executed too (default: the default store)",
    )
    add_address(studio_options, _STUDIO_ADDRESS)
    studio_options.add_argument("--no-browser", action="store_true", help="open no browser, only print the URL")
    studio_options.set_defaults(
        allow_host=[], allow_origin=[], trust_proxy=[], connections=None, connections_per_address=None
    )


def _add_webhooks(add: AddParser) -> None:
    hooks = add_command(add, webhooks, has_store=False)
    hooks.add_argument("file", metavar="FILE", type=Path, help='JSON file with "incoming" and "outgoing" webhooks')


def _add_connections(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--connections", metavar="N", type=parse_count, help="connections of all clients at once (default: 512)"
    )
    serve.add_argument(
        "--connections-per-address",
        metavar="N",
        type=parse_count,
        help="connections of one client address at once (default: half of --connections)",
    )
    serve.add_argument(
        "--trust-proxy",
        metavar="CIDR",
        action="append",
        default=[],
        help="network of proxies whose Forwarded or X-Forwarded-For names the client; may be given several times",
    )


def serve(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Serve until a signal arrives."""
    agents = _load_agents(args.agents, args.store)
    gateway: Any = import_module("agentfsm.serve")  # loading it takes a second
    app = gateway.serve(
        agents,
        auth=_build_auth(args, gateway),
        parallel=0 if args.no_worker else args.parallel,
        drain_s=args.drain,
        groups=(
            *_list_groups(with_studio=args.studio),
            *_read_webhooks(args),
            *_list_notifiers(args, _find_base(agents[0]).store),
        ),
        limits=_read_limits(gateway, args, ""),
        tenant_limits=_read_limits(gateway, args, "tenant_"),
        max_queue=args.max_queue,
        four_eyes=args.four_eyes,
        origins=args.allow_origin,
        allow_headers=args.allow_header,
        root_path=args.root_path,
        deltas=args.deltas,
    )
    notice = ServeNotice(
        terminal=terminal,
        name=", ".join(_find_base(each).name for each in agents),
        path=STUDIO_PATH if args.studio else "",
    )
    return _run_server(app, agents, args, notice)


# Path of the studio's first page.
STUDIO_PATH: Final = "/studio/"


def studio(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show runs in a browser until a signal arrives. Only this user may: the printed URL has the key.

    Raises:
        MisuseError: if other machines could connect.
    """
    host, _ = split_address(args.http)
    guard: Any = import_module("agentfsm._lib.web.http_guard")
    if not guard.is_loopback(host.strip("[]")):
        raise MisuseError(
            f"{host!r} can be reached from other machines: use `agentfsm serve module:agent --studio --keys keys.json`"
        )
    gateway: Any = import_module("agentfsm.serve")
    agents = [] if args.subject is None or not is_target(args.subject) else _load_agents([args.subject], args.store)
    store = None if agents else open_existing_store(args.subject or args.store)
    key = secrets.token_urlsafe(KEY_BYTES)
    local = gateway.Caller(user=user_name(), scopes={"admin"})
    location = resolve_location(args.subject or args.store)
    app = gateway.serve(
        agents,
        store=store,
        auth=KeyCheck(key=key, caller=local),
        groups=_list_groups(with_studio=True),
        continuation=None if store is None else _build_continuation(store, location, agents),
    )
    name = _find_base(agents[0]).name if agents else mask_password(location)
    notice = ServeNotice(
        terminal=terminal,
        name=f"the studio of {name}",
        path=f"{STUDIO_PATH}#key={key}",
        opens_browser=not args.no_browser and terminal.can_ask,
    )
    return _run_server(app, agents, args, notice, store)


def _build_continuation(store: Store, location: str, opened: list[Agent | Rollout]) -> Continuation:
    """Return how the studio over a store continues a run: with the agent that the run names, if a person asks for it.

    Args:
        store: The store.
        location: Its path or URL.
        opened: Receives the agents that are imported, which are closed with the server.
    """
    continuation: Any = import_module("agentfsm.serve.continuation")

    def build_command(root: Header) -> str:
        return build_header_hint(root, location).build_resume(root.id)

    def open_agent(run: Run, root: Header) -> Agent:
        if split_target(root.target)[1]:
            raise MisuseError(f"the agent of the run has MCP servers: continue it with {build_command(root)}")
        found = load_run_agent(run, root)
        if found is None:
            raise MisuseError(f"the agent {root.target} has no sub-agent {run.header.agent!r}")
        agent = found.with_(store=store, target=run.header.target)
        opened.append(agent)
        return agent

    made: Continuation = continuation.Continuation(
        store=mask_password(location), build_command=build_command, open_agent=open_agent
    )
    return made


# Random bytes of the key in the URL of the studio.
KEY_BYTES: Final = 24


@attrs.frozen(kw_only=True)
class KeyCheck(Value):
    """Authenticates requests that have one key, as one caller."""

    key: str = attrs.field(repr=False)
    caller: Caller

    def __call__(self, request: Any) -> Caller | None:
        """Return the caller of a request; None if it has not exactly the key."""
        sent = request.headers.get("authorization", "").encode()
        return self.caller if hmac.compare_digest(sent, f"Bearer {self.key}".encode()) else None


@attrs.frozen(kw_only=True)
class ServeNotice(TaskStatus[str]):
    """Reports the address of the server once it accepts connections, and opens the studio if asked to."""

    terminal: Terminal
    name: str
    path: str = ""
    """Path of the page to look at; empty if there is none."""

    opens_browser: bool = False

    def started(self, value: str | None = None) -> None:
        """Write the address to stderr."""
        url = f"{value}{self.path}"
        self.terminal.err(f"serving {self.name!r} at {value}; stop with Ctrl-C")
        if self.path:
            self.terminal.err(f"studio: {url}")
        if self.opens_browser:
            webbrowser.open(url)


def _run_server(
    app: GatewayApp,
    agents: list[Agent | Rollout],
    args: argparse.Namespace,
    notice: ServeNotice,
    store: Store | None = None,
) -> ExitCode:
    """Serve until a signal arrives, and close the agents and the store."""
    with InterruptibleRunner() as runner:
        try:
            with stdout_to_stderr():  # stdout is reserved for results
                runner.run(_serve_app, app, args, notice)
        except KeyboardInterrupt:
            notice.terminal.err("stopped: the next server continues the open runs")
        finally:
            for each in agents:
                runner.run(_find_base(each).aclose)
            if store is not None:
                runner.run(store.aclose)
    return ExitCode.DONE


def _list_groups(*, with_studio: bool) -> tuple[RouteGroup, ...]:
    if not with_studio:
        return ()
    routes: Any = import_module("agentfsm.serve.studio_routes")
    return (routes.STUDIO,)


def _read_webhooks(args: argparse.Namespace) -> tuple[RouteGroup, ...]:
    if args.webhooks is None:
        return ()
    reader: Any = import_module("agentfsm.serve.dialects.webhook_file")
    return (reader.read_webhook_file(args.webhooks).build_routes(os.environ),)


def _list_notifiers(args: argparse.Namespace, store: Store) -> tuple[RouteGroup, ...]:
    if args.alerts_to is None:
        return ()
    commands: Any = import_module("agentfsm.cli.commands.alert_rules")
    endpoints: Any = import_module("agentfsm.serve.endpoints")
    notifier = commands.build_notifier(args, store, args.alerts_to)
    return (endpoints.RouteGroup(name="alerts", background=lambda _: notifier.follow()),)


def _load_agents(targets: list[str], store: str | None) -> list[Agent | Rollout]:
    """Return the agents and roll-outs, with one store."""
    first, *others = [(load_target(each, Agent, Rollout), each) for each in targets]
    attach: Any = attach_rollout_store if isinstance(first[0], Rollout) else attach_store
    agent, _ = attach(*first, store)
    return [agent, *(each.with_(store=_find_base(agent).store, target=target) for each, target in others)]


def _find_base(served: Agent | Rollout) -> Agent:
    return served.base if isinstance(served, Rollout) else served


def _build_auth(args: argparse.Namespace, gateway: Any) -> Authenticate:
    """Return the function that authenticates requests.

    Raises:
        MisuseError: if other machines could connect without a key, or the file of keys cannot be read.
    """
    guard: Any = import_module("agentfsm._lib.web.http_guard")
    host, _ = split_address(args.http)
    if args.keys is not None:
        keys: Authenticate = gateway.APIKeys(args.keys)
        return keys
    if guard.is_loopback(host.strip("[]")):
        local = gateway.Caller(user=user_name(), scopes={"admin"})
        return lambda _request: local
    raise MisuseError(
        f"{host!r} can be reached from other machines, so clients need keys: create one with `agentfsm keys add "
        "keys.json USER`, and give --keys keys.json; or listen on 127.0.0.1"
    )


def _read_limits(gateway: Any, args: argparse.Namespace, prefix: str) -> Any:
    names = {
        "requests": "per_minute",
        "open_requests": "open_requests",
        "tokens": "tokens_per_minute",
        "runs": "running",
    }
    return gateway.RateLimits(**{field: getattr(args, f"{prefix}{name}") for field, name in names.items()})


async def _serve_app(app: GatewayApp, args: argparse.Namespace, notice: ServeNotice) -> None:
    guard: Any = import_module("agentfsm._lib.web.http_guard")
    server: Any = import_module("agentfsm._lib.web.http_server")
    host, port = split_address(args.http)
    host = host.strip("[]")
    connections: Any = import_module("agentfsm._lib.web.http_connections")
    paths: Any = import_module("agentfsm.serve.app")
    checks = frozenset({paths.HEALTH_PATH, paths.READY_PATH})
    guarded = guard.HTTPGuard(
        app, guard.build_allowed_hosts(host, args.allow_host), None, frozenset(args.allow_origin), checks
    )
    given = {"total": args.connections, "per_address": args.connections_per_address}
    limits = connections.ConnectionLimits(
        **{name: limit for name, limit in given.items() if limit is not None},
        trusted_proxies=[connections.parse_network(each) for each in args.trust_proxy],
        always_answered=checks,
    )
    gc.freeze()  # what is loaded by now stays: a full collection would look at it each time, with all requests waiting
    with server.bind_socket(host, int(port)) as bound:
        await server.serve(
            guarded,
            bound,
            server.format_url(host, bound),
            notice,
            app.close_streams,
            limits=limits,
            drain_s=app.gateway.drain_s,
            end_drain=app.gateway.end_drain,
        )


# Characters of a line about an event.
MAX_LINE_CHARS: Final = 300


def webhooks(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the webhooks of a file, and the events that were given up.

    Raises:
        MisuseError: if the file cannot be read, or is not valid.
    """
    reader: Any = import_module("agentfsm.serve.dialects.webhook_file")  # loading it takes a second
    file = reader.read_webhook_file(args.file)
    letters = reader.read_dead_letters(file.dead_letters)
    entries = {
        section: {
            name: {**entry.model_dump(exclude_none=True), "secret_is_set": entry.secret[2:-1] in os.environ}
            for name, entry in of_section.items()
        }
        for section, of_section in (("incoming", file.incoming), ("outgoing", file.outgoing))
    }
    if terminal.json:
        given_up = [attrs.asdict(each) for each in letters]
        terminal.document({**entries, "dead_letters": str(file.dead_letters), "given_up": given_up})
        return ExitCode.DONE
    for section, by_name in entries.items():
        for name, entry in by_name.items():
            where = f"/v1/hooks/{name}, user {entry['user']}" if section == "incoming" else entry["url"]
            tenant = f", tenant {entry['tenant']}" if "tenant" in entry else ""
            secret = "" if entry["secret_is_set"] else f"; {entry['secret']} is not set here"
            terminal.out(one_line(f"{section} {name}: {where}{tenant}{secret}", MAX_LINE_CHARS))
    terminal.out(f"{format_count(len(letters), 'event')} given up: {file.dead_letters}")
    for each in letters:
        line = f"{format_time(each.at)} {each.webhook} run {each.run_id}, version {each.version}: {each.error}"
        terminal.out(one_line(line, MAX_LINE_CHARS))
    return ExitCode.DONE
