"""The API reference: `make reference` covers every exported name, and each has a docstring."""

import importlib.util
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

import agentfsm

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def reference():
    """Return the generator, which is a script."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_exported_name_has_a_section(reference, tmp_path):
    """Of each module of the package with an `__all__`, also of names that are imported on first use."""
    names = ["agentfsm", *[f"agentfsm.{each.name}" for each in pkgutil.iter_modules(agentfsm.__path__)]]
    modules = [import_module(name) for name in names if not name.startswith("agentfsm._")]
    exported = {module.__name__: sorted(module.__all__) for module in modules if getattr(module, "__all__", ())}
    assert {path: sorted(objects) for path, objects in reference.load().items()} == exported
    reference.write(tmp_path)
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    pages = reference.list_pages()
    assert next(iter(pages)) == "Agent"
    for title in reference.SUBJECTS:
        exported["agentfsm"] = [name for name in exported["agentfsm"] if name not in pages[title]]
    assert exported.pop("agentfsm") == []
    assert {title: sorted(pages[title]) for title in exported} == exported
    for title, objects in pages.items():
        file = reference.name_file(title)
        page = (tmp_path / file).read_text(encoding="utf-8")
        assert len(page) < 80_000, f"{title} is too long to be read: split it"
        for name in objects:
            assert f"\n## `{name}` {{#{name}}}\n" in page
            assert f"[`{name}`]({file}#{name})" in index


def test_every_exported_object_has_a_summary(reference):
    """Classes, functions, constants and type aliases."""
    objects = [each for exported in reference.load().values() for each in exported.values()]
    assert [each.path for each in objects if not reference.summarise(each)] == []


def test_every_shown_field_and_method_has_a_docstring(reference):
    """Fields without an annotation, such as members of an enum, may do without."""
    objects = {each.path: each for exported in reference.load().values() for each in exported.values()}
    shown = [each for kind in objects.values() if kind.is_class for each in reference.list_members(kind)]
    assert len(shown) > 500
    missing = [each.path for each in shown if (each.is_function or each.annotation) and not each.docstring]
    assert missing == []


def test_the_page_of_a_class_shows_fields_and_methods(reference):
    """With type, default and docstring; without `self`."""
    page = reference.link("\n".join(reference.render("Agent", reference.load()["agentfsm"]["Agent"])), "Agent")
    assert '- `model: Model`: A [`Model`](agentfsm.ports.md#Model), or a string such as "openai:gpt-5.4-mini".' in page
    assert "- `limits: Limits = Limits()`: Limits of each run." in page
    assert "### `Agent.resume` {#Agent.resume}\n```python\nasync def resume(run_id: str, *, deps: Any = None," in page
    assert "Raises:\n\n- [`RunNotFoundError`](errors.md#RunNotFoundError): when" in page


def test_a_class_shows_its_own_methods_before_those_of_private_bases(reference):
    """What a public base shows is not repeated."""
    agent, flow = reference.load()["agentfsm"]["Agent"], reference.load()["agentfsm.flow"]["Flow"]
    parts = "\n".join(reference.render("Agent", agent))
    places = [parts.index(f"### `Agent.{name}`") for name in ("run", "with_", "start", "fork", "load", "approve")]
    assert places == sorted(places)
    assert not {"limits", "resume", "approve"} & {each.name for each in reference.list_members(flow)}
