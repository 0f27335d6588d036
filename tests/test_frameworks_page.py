"""docs/frameworks.md: its programs in Django, in Celery, and in the cells of a notebook."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import pytest

from agentfsm import ConflictError, RunNotFoundError
from agentfsm.testing import LocalServer, call, say

PAGE = (Path(__file__).parents[1] / "docs" / "frameworks.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
CELLS = re.findall(r"```ipython\n(.*?)```", PAGE, re.DOTALL)


def _clerk(body):
    """Play the model: call the tool that it has, then report."""
    if body["messages"][-1]["role"] == "tool":
        return say("It is done.")
    number = int(re.search(r"\d+", body["messages"][0]["content"])[0])
    name = body["tools"][0]["function"]["name"]
    return say("", call(name, **({"number": number} | ({"cents": 1990} if name == "refund" else {}))))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the page, where a server plays the model."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with LocalServer(_clerk) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_django(folder):
    """A form that is sent twice starts one run; its user approves a call, and another user does not see it."""
    import django  # noqa: PLC0415
    from django.conf import settings  # noqa: PLC0415

    settings.configure(
        ROOT_URLCONF="urls",
        SECRET_KEY="none",  # noqa: S106
        ALLOWED_HOSTS=["testserver"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "site.db")}},
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
        MIGRATION_MODULES=dict.fromkeys(("auth", "contenttypes", "sessions")),  # tables without their history
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
    )
    django.setup()
    routes = "from django.urls import path\nimport views\nurlpatterns = [path('runs', views.start), "
    routes += "path('runs/<run_id>', views.read), path('runs/<run_id>/approve', views.approve)]"
    (folder / "urls.py").write_text(routes, encoding="utf-8")
    from django.contrib.auth.models import User  # noqa: PLC0415
    from django.core.management import call_command  # noqa: PLC0415
    from django.test import Client  # noqa: PLC0415

    call_command("migrate", run_syncdb=True, verbosity=0)
    ann, eve = Client(), Client()
    for name, client in (("ann", ann), ("eve", eve)):
        client.force_login(User.objects.create_user(name))
    form = {"prompt": "Refund order 17", "form_id": "7"}
    assert [ann.post("/runs", form).json()["id"] for _ in range(2)] == ["form-7", "form-7"]
    anyio.run(partial(importlib.import_module("agents").agent.worker, until_idle=True))
    [wait] = ann.get("/runs/form-7").json()["waits"]
    assert eve.get("/runs/form-7").status_code == ann.get("/runs/none").status_code == 404
    assert eve.post("/runs/form-7/approve", {"call_id": wait["call_id"]}).status_code == 404
    assert ann.post("/runs/form-7/approve", {"call_id": wait["call_id"]}).json() == {"status": "queued"}
    anyio.run(partial(importlib.import_module("agents").agent.worker, until_idle=True))
    assert ann.get("/runs/form-7").json() == {"status": "done", "waits": []}


@pytest.mark.soak
def test_the_command_of_django(folder):
    """It executes a run, and ends in order at SIGTERM."""
    process = subprocess.Popen([sys.executable, "-c", "import execute_runs; execute_runs.Command().handle()"])
    agent = importlib.import_module("agents").agent

    async def submit():
        async with agent:
            return await agent.wait((await agent.submit("Refund order 17")).id)

    assert [item.tool for item in anyio.run(submit).pending] == ["refund"]
    process.terminate()
    assert process.wait(60) == 0


def test_celery(folder, monkeypatch):
    """Messages that come twice, and a task that is retried after its work was done, have one effect."""
    monkeypatch.setenv("BROKER", "memory://")
    tasks = importlib.import_module("tasks")
    from celery.contrib.testing.worker import start_worker  # noqa: PLC0415

    with start_worker(tasks.app, pool="solo", perform_ping_check=False, shutdown_timeout=60):
        tasks.invoice.delay(17)
        tasks.invoice.delay(17)
        assert anyio.run(wait_for_end, tasks.build_agent, "invoice-17") == "It is done."
    attempts = []

    async def execute(run_id):
        attempts.append(await tasks_execute(run_id))
        if len(attempts) == 1:
            raise ConflictError("the connection was lost after the work was done")
        return attempts[-1]

    tasks_execute = tasks.execute
    monkeypatch.setattr(tasks, "execute", execute)
    run_id = anyio.run(tasks.submit, 18)
    assert tasks.drive.apply([run_id]).get() == "done"
    assert attempts == ["done", "done"]
    assert (folder / "sent.txt").read_text(encoding="utf-8").split() == ["17", "18"]


@pytest.mark.soak
def test_the_processes_of_celery(folder, monkeypatch, redis_url):
    """The command of the page, with processes and a Redis: a message that comes twice has one effect."""
    monkeypatch.setenv("BROKER", redis_url)
    tasks = importlib.import_module("tasks")
    process = subprocess.Popen([sys.executable, "-m", "celery", "--app", "tasks", "worker", "--concurrency", "2"])
    try:
        tasks.invoice.delay(17)
        tasks.invoice.delay(17)
        assert anyio.run(wait_for_end, tasks.build_agent, "invoice-17") == "It is done."
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert (folder / "sent.txt").read_text(encoding="utf-8").split() == ["17"]


async def wait_for_end(build_agent, run_id):
    """Return the answer of a run that another thread creates and executes."""
    async with build_agent() as agent:
        while True:
            try:
                return (await agent.wait(run_id)).output
            except RunNotFoundError:
                await anyio.sleep(0.01)


async def test_the_cells_of_a_notebook(folder, capsys):
    """They run as a kernel runs them, in one event loop, with `await` outside of functions."""
    names = {}
    for cell in CELLS:
        body = ast.parse(cell)
        result = eval(compile(body, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)  # noqa: S307
        if inspect.iscoroutine(result):
            await result
    assert [item.tool for item in names["run"].pending] == ["refund"]
    assert capsys.readouterr().out == "It is done."
    await names["agent"].aclose()
