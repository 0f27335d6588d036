"""Prompts in a folder: versions, activations and roll-back."""

import json
import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import MisuseError
from agentfsm.prompts import PromptReport, Prompts, PromptTestResult
from agentfsm.prompts.template import is_version, version_key

WHO = {"by": "ann", "why": "test"}


@pytest.fixture
def folder(tmp_path):
    """A folder with three versions of a prompt, and files that are none."""
    for version in ("1.0", "2.0", "10.0"):
        write(tmp_path, version)
    (tmp_path / "billing" / "changelog.md").write_text("# Changes")
    (tmp_path / "README.md").write_text("# Prompts")
    return tmp_path


def write(folder, version, text=None, front="", name="billing"):
    (folder / name).mkdir(exist_ok=True)
    path = folder / name / f"{version}.md"
    path.write_text(f"+++\n{front}\n+++\n{text or f'Version {version}.'}\n", encoding="utf-8")
    return path


def test_versions_are_numbers_and_not_text(folder):
    """10.0 is newer than 2.0."""
    prompts = Prompts(folder)
    assert [each.version for each in prompts.versions("billing")] == ["1.0", "2.0", "10.0"]
    assert prompts["billing"].version == "10.0"
    assert prompts["billing", "v2.0.0"].version == "2.0"
    assert prompts.names == ("billing",)


def test_the_order_of_semantic_versioning():
    """The example of semver.org, section 11."""
    order = ["1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0-beta.2", "1.0.0-beta.11"]
    order += ["1.0.0-rc.1", "1.0.0", "2.0.0", "2.1.0", "2.1.1"]
    assert sorted(sorted(order), key=version_key) == order


@given(st.text(max_size=20))
def test_any_text_is_a_version_or_refused(text):
    """Never another error."""
    if is_version(text):
        version_key(text)
    else:
        with pytest.raises(MisuseError, match="give one such as"):
            version_key(text)


def test_a_release_is_newer_than_what_precedes_the_next(folder):
    """Without an activation a pre-release is used only if there is nothing else."""
    write(folder, "11.0.0-rc.1")
    assert Prompts(folder)["billing"].version == "10.0"


def test_activation_and_roll_back(folder):
    """Roll-back returns to what was active before, not to the number before."""
    prompts = Prompts(folder)
    followed = prompts["billing"]
    for version in ("10.0", "1.0", "2.0"):
        prompts.activate("billing", version, **WHO)
    assert prompts["billing"].version == followed.current().version == "2.0"
    assert prompts["billing", "10.0"].current().version == "10.0"
    assert prompts.roll_back("billing", **WHO).version == "1.0"
    assert prompts.roll_back("billing", **WHO).version == "10.0"
    with pytest.raises(MisuseError, match="no version that was active before"):
        prompts.roll_back("billing", **WHO)
    prompts.activate("billing", "2.0", **WHO)
    assert prompts.roll_back("billing", **WHO).version == "10.0"
    log = [(each.action, each.version, each.by, each.why) for each in prompts.history("billing")]
    assert log == [
        ("activate", "10.0", "ann", "test"),
        ("activate", "1.0", "ann", "test"),
        ("activate", "2.0", "ann", "test"),
        ("roll_back", "1.0", "ann", "test"),
        ("roll_back", "10.0", "ann", "test"),
        ("activate", "2.0", "ann", "test"),
        ("roll_back", "10.0", "ann", "test"),
    ]


@given(st.lists(st.sampled_from(["1.0", "2.0", "10.0", None]), max_size=12))
def test_the_log_agrees_with_a_stack(tmp_path_factory, moves):
    """Activation pushes, roll-back pops; a reader who comes later sees the same."""
    folder = tmp_path_factory.mktemp("prompts")
    for version in ("1.0", "2.0", "10.0"):
        write(folder, version)
    prompts, stack = Prompts(folder), []
    for move in moves:
        if move is not None:
            prompts.activate("billing", move, **WHO)
            stack += [move] if stack[-1:] != [move] else []
        elif len(stack) > 1:
            prompts.roll_back("billing", **WHO)
            stack.pop()
        active = Prompts(folder).active("billing")
        assert (active and active.version) == (stack[-1] if stack else None)


def test_what_is_active_already_is_not_written_again(folder):
    """So a deployment may say it each time."""
    prompts = Prompts(folder)
    assert prompts.activate("billing", "1.0", **WHO) == prompts.activate("billing", "v1.0.0", by="bob", why="again")
    assert len(prompts.history()) == 1


def test_another_process_activates(folder):
    """The log is read again when it has changed, and files that came with it."""
    mine, theirs = Prompts(folder), Prompts(folder)
    followed = mine["billing"]
    theirs.activate("billing", "1.0", **WHO)
    assert followed.current().version == mine["billing"].version == "1.0"
    write(folder, "12.0")
    Prompts(folder).activate("billing", "12.0", **WHO)
    assert followed.current().version == "12.0"


def test_two_roll_backs_at_once_are_one(folder):
    """Both say where they return to."""
    prompts = Prompts(folder)
    for version in ("1.0", "2.0", "10.0"):
        prompts.activate("billing", version, **WHO)
    prompts.roll_back("billing", **WHO)
    log = folder / "activations.jsonl"
    log.write_text(log.read_text() + log.read_text().splitlines()[-1] + "\n")
    assert prompts["billing"].version == "2.0"
    assert prompts.roll_back("billing", **WHO).version == "1.0"


def _activate_often(folder, version):
    prompts = Prompts(folder)
    for number in range(20):
        prompts.activate("billing", version, by=f"process {version}", why=str(number))
        prompts.activate("billing", "1.0", by=f"process {version}", why="x" * 500)


def test_lines_of_two_processes_do_not_mix(folder):
    """Each is one write at the end of the file. An empty line, which a half-visible write can cause, is no record."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=_activate_often, args=(folder, version))
        for version in ("2.0", "10.0")
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    lines = [line for line in (folder / "activations.jsonl").read_text().splitlines() if line]
    assert len(lines) >= 20
    assert len(Prompts(folder).history()) == len([json.loads(line) for line in lines])


def test_a_line_that_a_crash_cut_short_is_left_behind(folder):
    """It was never acknowledged; the next line begins anew."""
    prompts = Prompts(folder)
    prompts.activate("billing", "1.0", **WHO)
    log = folder / "activations.jsonl"
    log.write_text(log.read_text() + '{"name": "billing", "vers')
    assert prompts["billing"].version == "1.0"
    prompts.activate("billing", "2.0", **WHO)
    assert Prompts(folder)["billing"].version == "2.0"
    log.write_text(log.read_text() + '{"name": "billing"}\n')
    with pytest.raises(MisuseError, match=r"activations.jsonl, line 4: .*restore the line"):
        prompts.history()


def test_a_version_that_was_activated_does_not_change(folder):
    """Neither at start nor with a new activation; another version may be activated."""
    Prompts(folder).activate("billing", "1.0", **WHO)
    write(folder, "1.0", "Other words.")
    prompts = Prompts(folder)
    for act in (lambda: prompts["billing"], lambda: prompts.activate("billing", "1.0", **WHO)):
        with pytest.raises(MisuseError, match=r"billing 1.0 has changed since ann activated it.*restore its file"):
            act()
    prompts.activate("billing", "2.0", **WHO)
    assert prompts["billing"].version == "2.0"
    with pytest.raises(MisuseError, match="has changed since"):
        prompts.roll_back("billing", **WHO)


def test_a_version_in_use_is_gone(folder):
    """The error names those that are there."""
    Prompts(folder).activate("billing", "1.0", **WHO)
    (folder / "billing" / "1.0.md").unlink()
    with pytest.raises(MisuseError, match=r"no version 1.0: it has 2.0, 10.0"):
        Prompts(folder)["billing"]


def test_two_files_of_one_version(folder):
    """Versions are equal as numbers."""
    write(folder, "v2.0.0")
    with pytest.raises(MisuseError, match=r"v2.0.0.md: version .* has another file"):
        Prompts(folder)["billing"]


def test_a_plain_folder_is_read(tmp_path):
    """As in document F: `vX.Y.txt` without front matter, whose variables are data from outside."""
    (tmp_path / "router").mkdir()
    for version in ("v1.0", "v1.1", "v2.0"):
        text = f'Version {version}. {{{{tools}}}} Answer {{"tool": "x"}}. {{{{question}}}}'
        (tmp_path / "router" / f"{version}.txt").write_text(text)
    (tmp_path / "router" / "changelog.md").write_text("# Changes")
    prompts = Prompts(tmp_path)
    assert [each.version for each in prompts.versions("router")] == ["1.0", "1.1", "2.0"]
    rendered = prompts["router"].render(tools="search", question="{{tools}}")
    assert rendered.startswith("Version v2.0. (data from outside")
    assert '{"tool": "x"}' in rendered
    assert rendered.count("search") == 1
    prompts.activate("router", "1.1", **WHO)
    assert prompts["router"].version == "1.1"


@pytest.mark.parametrize(
    ("front", "message"),
    [
        ('nmae = "x"', "unknown keys nmae"),
        ("x = ", "the front matter is not TOML"),
        ('name = "other"', "the folder is 'billing'"),
        ('version = "4.0"', "the file is '3.0.md'"),
        ('layer = "top"', "layer"),
        ('priority = "high"', "give a whole number"),
        ('[[tests]]\nname = "x"\nchecks = ["is_nice"]', "the check 'is_nice': give 'json_valid'"),
        ('[[tests]]\nname = "x"\nchecks = [{field_in = "a"}]', "one field with the values"),
        ('[[tests]]\nnam = "x"\nchecks = []', "nam"),
        ('[[tests]]\nname = "x"', "has neither checks nor a rubric"),
        ('[[tests]]\nname = "x"\nchecks = [{function = "os:nope"}]', "cannot be loaded"),
        ('text = "x"', "unknown keys text"),
    ],
)
def test_front_matter_is_checked(folder, front, message):
    """All faults of a prompt at once, each with its file. The other prompts of the folder are not affected."""
    write(folder, "3.0", front=front)
    (folder / "billing" / "3.1.md").write_text("no front matter")
    (folder / "greeting").mkdir()
    (folder / "greeting" / "1.0.md").write_text("+++\n+++\nHello.")
    prompts = Prompts(folder)
    assert prompts["greeting"].text == "Hello."
    with pytest.raises(MisuseError, match=message) as caught:
        prompts["billing"]
    assert prompts.names == ("billing", "greeting")
    assert "\n".join(prompts.faults["billing"]) == str(caught.value)
    assert "3.0.md" in str(caught.value)
    assert "3.1.md: it has no front matter" in str(caught.value)


def test_all_keys_of_the_front_matter(folder):
    """A file as the documentation shows it."""
    front = """name = "billing"
version = "3.0"
author = "ann"
changes = "asks before it pays"
layer = "context"
priority = 2
max_tokens = 500
min_tokens = 50
[variables]
question = "untrusted"
tone = {kind = "text", default = "plain"}
[[tests]]
name = "asks"
values = {question = "Pay it"}
input = "Pay"
checks = ["json_valid", {has_field = "action"}, {field_in = {action = ["clarify"]}}, {no_field = "x"}, {max_tokens = 9}]
"""
    path = write(folder, "3.0", "Hello {{question}} {{tone}}", front)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))  # as an editor on Windows
    prompt = Prompts(folder)["billing", "3.0"]
    assert (prompt.layer, prompt.priority, prompt.max_tokens, prompt.min_tokens) == ("context", 2, 500, 50)
    assert prompt.text == "Hello {{question}} {{tone}}"
    assert len(prompt.tests[0].checks) == 5


@pytest.mark.parametrize("key", ["other", ("billing", "7.0"), ("billing", "new")])
def test_what_is_not_there(folder, key):
    """The error says what there is."""
    with pytest.raises(MisuseError, match=r"billing|give one such as"):
        Prompts(folder)[key]


def test_no_folder(tmp_path):
    """Nor does it make one."""
    with pytest.raises(MisuseError, match="there is no folder"):
        Prompts(tmp_path / "prompts")
    with pytest.raises(MisuseError, match=r"Prompts\(3\): give the folder"):
        Prompts(3)


def test_an_activation_is_signed(folder):
    """Who and why."""
    with pytest.raises(MisuseError, match="by="):
        Prompts(folder).activate("billing", "1.0", by="", why="x")
    with pytest.raises(MisuseError, match="why="):
        Prompts(folder).activate("billing", "1.0", by="ann", why=" ")
    assert not (folder / "activations.jsonl").exists()


def test_results_count_for_the_text_that_was_tested(folder):
    """Stored with the digest."""
    prompts = Prompts(folder)
    prompt = prompts["billing", "1.0"]
    tests = (PromptTestResult(name="a", runs=5, passed=4, failures={"json_valid: not JSON": 1}),)
    report = PromptReport(name="billing", version="1.0", digest=prompt.digest, model="m", at="now", tests=tests)
    assert prompts.results(prompt) == ()
    prompts.record(report)
    assert prompts.results(prompt) == (report,)
    assert prompts.results(prompts["billing", "2.0"]) == ()
    assert not report.passed
    write(folder, "1.0", "Other words.")
    assert prompts.results(Prompts(folder)["billing", "1.0"]) == ()
