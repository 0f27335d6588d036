"""Each page and each panel shows the values of `agentfsm show --json`."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.support.browser import check_access


def open_panel(open_page, studio, run, panel, **options):
    page = open_page(f"#/runs/{studio.runs[run]}?panel={panel}", **options)
    page.wait_for_selector(f'.panel[data-panel="{panel}"] *')
    return page


def numbers(text):
    """Return the numbers in a text, without separators of thousands."""
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\.?\d*", text)]


def read_facts(page):
    facts = page.locator(".run-main dl.facts > div").all()
    return {each.locator("dt").text_content(): each.locator("dd").text_content() for each in facts}


def test_the_list_of_runs(open_page, studio, show):
    """Each row has the values of `agentfsm runs --json`, and what the run waits for."""
    page = open_page()
    page.wait_for_selector(f'tr[data-run="{studio.runs["waiting"]}"] .waits')
    rows = {each["id"]: each for each in show("runs", "--limit", "100")["runs"]}
    for run_id, row in rows.items():
        cells = page.locator(f'tr[data-run="{run_id}"] td').all_text_contents()
        assert cells[2] == row["agent"]
        assert numbers(cells[4]) == [row["turn"]]
        if row["tokens"] < 10_000:
            assert numbers(cells[5]) == [row["tokens"]]
    cost = show("show", studio.runs["done"])["usage"]["cost_usd"]
    cells = page.locator(f'tr[data-run="{studio.runs["done"]}"] td')
    assert float(cells.nth(6).text_content()[1:]) == pytest.approx(cost, abs=0.0005)
    assert page.locator(f'tr[data-run="{studio.runs["waiting"]}"] .waits').text_content() == "approval of pay"


def test_search_and_filters(open_page, studio, show):
    """The server searches prompts and answers of all runs; counts agree, and the address has what is chosen."""
    page = open_page(viewport={"width": 390, "height": 844})
    number = page.locator("header.page [role=status]")
    rows = page.locator("tr[data-run]")
    expect(number).to_have_text(re.compile(rf"^{len(show('runs', '--limit', '100')['runs'])} runs"))
    page.get_by_role("searchbox").fill("then TELL")
    expect(rows).to_have_count(1)
    expect(number).to_have_text("1 run")
    assert page.url.endswith("#/runs?text=then+TELL")
    answer = show("show", studio.runs["done"])["output"]
    page.get_by_role("searchbox").fill(f"{answer} invoice")
    expect(page.locator(f'tr[data-run="{studio.runs["done"]}"]')).to_have_count(1)
    held = []

    def hold(route):
        held.append(route)

    page.route("**/v1/runs?text=nosuchword*", hold, times=1)
    page.get_by_role("searchbox").fill("nosuchword")
    expect(page.locator('.runs[aria-busy="true"]')).to_have_count(1)
    held.pop().continue_()
    expect(page.locator(".runs[aria-busy]")).to_have_count(0)
    expect(page.locator(".empty")).to_contain_text("Nothing found")
    page.get_by_role("searchbox").fill("")
    page.get_by_label("Order").select_option("cost")
    expect(number).to_contain_text("only runs that are over")
    page.get_by_text("More filters").click()
    page.get_by_label("Reason of the end").select_option("completed")
    dearest = [row["id"] for row in show("runs", "--sort", "cost", "--stop-reason", "completed")["runs"]]
    expect(rows).to_have_count(len(dearest))
    assert [row.get_attribute("data-run") for row in rows.all()] == dearest
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    check_access(page)
    page.reload()
    expect(rows).to_have_count(len(dearest))
    assert page.get_by_label("Reason of the end").input_value() == "completed"
    assert (page.get_by_label("Order").input_value(), page.url.endswith("order=cost&stop_reason=completed")) == (
        "cost",
        True,
    )


def test_the_facts_and_the_machine(open_page, studio, show):
    """The head of a run has its numbers, and the machine its state and its path."""
    page = open_page(f"#/runs/{studio.runs['done']}")
    run = show("show", studio.runs["done"], "--events")
    page.wait_for_selector('.state.present[data-state="done"]')
    facts = read_facts(page)
    assert numbers(facts["turns"]) == [run["turns"], 20]
    assert numbers(facts["tokens"])[0] == run["usage"]["tokens"]
    assert numbers(facts["cost"])[0] == pytest.approx(run["usage"]["cost_usd"], abs=0.0005)
    assert facts["version"] == f"v{run['version']}"
    drawn = page.locator(".arrow.taken").evaluate_all(
        "(all) => all.map((each) => [each.dataset.arrow, each.dataset.times])"
    )
    taken = dict(drawn)
    kinds = [each["is"] for each in run["events"]]
    assert int(taken["observe>think"]) == kinds.count("Observed")
    assert int(taken["think>act"]) == kinds.count("ToolsChosen")
    assert int(taken["reflect>observe"]) == kinds.count("Continued")
    assert taken["think>done"] == "1"
    assert page.locator(".result-card").text_content() == f"Answer{run['output']}"


def test_the_transcript(open_page, studio, show):
    """It has the prompt, the text of each turn, its calls, and their results."""
    page = open_panel(open_page, studio, "done", "transcript")
    run = show("show", studio.runs["done"])
    text = page.locator(".transcript").text_content()
    assert run["prompt"] in text
    for turn in run["tree"]:
        assert turn["text"] in text
        for call in turn["calls"]:
            assert f"{call['name']}(" in text
            assert call["content"] in text
    assert "approved by" in text


def test_an_answer_that_says_what_was_not_done(open_page, show):
    """It stands at the answer and in the transcript, at any width and in both themes."""
    page = open_page("#/runs/evaluated?panel=transcript", viewport={"width": 390, "height": 800})
    [claim] = show("show", "evaluated")["not_done"]
    for place in (page.locator(".result-card"), page.locator(".transcript .is-undone")):
        expect(place).to_contain_text('pay({"to":"<script>alert(1)</script>')  # as text
        expect(place).to_contain_text(claim["fault"])
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    check_access(page, ".result-card")
    check_access(page, ".transcript")


def test_the_trace(open_page, studio, show):
    """Turns have their calls within them, a call the run that it began; Enter goes to the details of the chosen one."""
    page = open_panel(open_page, studio, "nested", "trace")
    events = show("show", studio.runs["nested"], "--events")["events"]
    _, asked = next(each for each in events if each["is"] == "ToolsChosen")["message"]["calls"]
    rows = page.get_by_role("treeitem")
    expect(rows).to_have_count(4)
    rows.filter(has_text="accountant").click()
    page.keyboard.press("ArrowRight")
    names = ["turn 1", "read_invoice", "accountant", "turn 1", "search", "turn 2", "turn 2"]
    expect(page.locator(".trace .row .summary")).to_have_text(names)
    assert [each.get_attribute("aria-level") for each in rows.all()] == ["1", "2", "2", "3", "4", "3", "1"]
    page.keyboard.press("Enter")
    details = page.locator(".trace .record")
    expect(details).to_be_focused()
    for text in ("What is paid?", "Two are paid.", asked["key"]):
        expect(details).to_contain_text(text)
    rows.filter(has_text="search").click()
    expect(details.get_by_role("link")).to_have_attribute("href", re.compile(r"\.t1\.1\?v=2$"))
    page.locator(".trace .virtual").press("ArrowLeft")  # to the turn
    page.keyboard.press("ArrowLeft")
    expect(rows).to_have_count(len(names) - 1)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_events(open_page, studio, show):
    """Each event is listed with its version, and its record is that of the journal."""
    page = open_panel(open_page, studio, "done", "events")
    events = show("show", studio.runs["done"], "--events")["events"]
    listed = page.locator(".virtual .row")
    assert f"{len(events)} of {len(events)}" in page.locator(".panel .toolbar").text_content()
    page.locator(".virtual").press("Home")
    for number in (0, 1, 2):
        assert listed.nth(number).locator("b").text_content() == events[number]["is"]
        listed.nth(number).click()
        record = json.loads(page.locator(".record pre").text_content())
        wanted = {name: value for name, value in events[number].items() if name not in ("version", "date")}
        assert record == wanted
    page.locator(".virtual").press("ArrowDown")
    assert page.locator(".record strong").text_content().startswith("4 ")
    page.get_by_label("Kind of event").select_option("ApprovalAsked")
    assert "1 of" in page.locator(".panel .toolbar").text_content()


def test_the_calls(open_page, studio, show):
    """Each call has its arguments, its status and its decision."""
    page = open_panel(open_page, studio, "done", "calls")
    run = show("show", studio.runs["done"])
    for call in run["calls"]:
        cells = page.locator(f'tr[data-call="{call["call_id"]}"] td').all_text_contents()
        arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in call["arguments"].items())
        assert cells[1] == f"{call['name']}({arguments})"
        assert cells[2] == call["outcome"]
    assert "approved by" in page.locator('tr[data-call="t2.0"]').text_content()


def test_the_request_of_a_turn(open_page, studio, show):
    """The panel shows all parts that the model was sent, what is new in them, and which of them cost the most."""
    page = open_panel(open_page, studio, "done", "shown")
    messages = show("export", studio.runs["done"])["messages"]
    page.locator(".panel select").select_option("1")
    expect(page.locator(".message")).to_have_count(1)
    assert page.locator(".message pre").text_content() == messages[0]["parts"][0]["text"]
    page.locator(".panel select").select_option("3")
    expect(page.locator(".message")).to_have_count(len(messages) - 1)
    assert messages[2]["content"] in page.locator(".shown").text_content()
    sent = studio.request("GET", f"/v1/runs/{studio.runs['done']}/request?turn=3")
    shares = {each["kind"]: f"{round(each['share'] * 100)} %" for each in sent["shares"]}
    assert page.locator(".sent-kinds strong").all_text_contents() == list(shares.values())
    expect(page.locator(".sent-changes .is-added")).to_have_count(sum(part["is_new"] for part in sent["parts"]))
    largest = page.locator(".sent-largest button").first
    assert f"{sent['parts'][sent['largest'][0]]['tokens']:,} tokens" in largest.text_content()
    largest.focus()
    page.keyboard.press("Enter")
    expect(page.locator("details.sent-part[open] summary:focus")).to_have_count(1)


def test_the_plan(open_page, studio, show):
    """The panel lists the steps with what they wait for and how they ended."""
    page = open_panel(open_page, studio, "planned", "plan")
    run = show("show", studio.runs["planned"])
    expect(page.locator(".plan li .chip.done")).to_have_count(3)
    steps = page.locator(".plan li").all_text_contents()
    done = [call for call in run["calls"] if call["call_id"] != "p1"]
    assert len(steps) == len(done) == 3
    assert "after 1, 2" in steps[2]
    assert "The last one." in steps[2]
    expect(page.locator(".plan-graph .step.done")).to_have_count(3)
    expect(page.locator(".plan-graph .arrow")).to_have_count(2)


def test_the_cost(open_page, studio, show):
    """Each purpose has its tokens and its cost, and they add up to those of the run."""
    for name in ("done", "planned", "tiered"):
        page = open_panel(open_page, studio, name, "cost")
        run = show("show", studio.runs[name])
        wanted = run["usage_by_purpose"] | {"all": run["usage"]}
        rows = {row.get_attribute("data-purpose"): row for row in page.locator("tr[data-purpose]").all()}
        assert rows.keys() == wanted.keys()
        for purpose, usage in wanted.items():
            cells = [numbers(cell) for cell in rows[purpose].locator("td").all_text_contents()]
            assert cells[:3] == [[usage["input_tokens"]], [usage["cached_tokens"]], [usage["output_tokens"]]]
            assert cells[3][0] == pytest.approx(usage["cost_usd"], abs=0.0005)
        missed = page.locator("li[data-missed]").all_text_contents()
        assert missed == (["turn 2: tools_changed, 9,000 tokens"] if name == "done" else [])


def test_the_tier_and_the_source_of_an_answer(open_page, studio):
    """The trace names the model and its tier; a repeated answer links to the run that gave it."""
    page = open_panel(open_page, studio, "tiered", "trace")
    expect(page.get_by_role("treeitem")).to_contain_text("max · large")
    page = open_page(f"#/runs/{studio.runs['repeated']}")
    page.get_by_text("answer of").first.wait_for()
    assert page.locator("a[href*='tiered']").count()


def test_the_labels(open_page, studio, show):
    """Each label has the call that brought it first."""
    page = open_panel(open_page, studio, "done", "labels")
    labels = show("show", studio.runs["done"])["labels"]
    assert [each["label"] for each in labels] == ["private", "irreversible"]
    for each in labels:
        row = page.locator(f'tr[data-label="{each["label"]}"]')
        expect(row).to_contain_text(f"{each['name']} ({each['call_id']})")
        expect(row.get_by_role("button")).to_have_text(f"v{each['version']}")


def test_comparison_and_replay(open_page, studio):
    """Two versions and two runs are compared, these side by side, and a replay finds no request that would differ."""
    page = open_panel(open_page, studio, "done", "changes")
    page.get_by_label("First version").fill("1")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_selector(".diff")
    found = studio.request("GET", f"/v1/runs/{studio.runs['done']}/diff?at=1")
    text = page.locator(".diff").text_content()
    assert all(name in text for name in found["changed"])
    assert page.locator(".diff .added").count() == len(found["added"])
    page.get_by_label("Other run").fill(studio.runs["nested"])
    page.get_by_role("button", name="Compare", exact=True).click()
    for name, tool in (("done", "pay"), ("nested", "accountant")):
        trace = page.get_by_role("region", name=studio.runs[name])
        trace.get_by_role("treeitem", name=tool).click()
        expect(trace.locator(".record strong").first).to_have_text(tool)
    check_access(page, ".panel")
    page.get_by_role("button", name="Replay", exact=True).click()
    assert page.locator(".panel .sent").text_content() == "3 requests compared, 0 would differ."


def test_an_agent(open_page, studio):
    """The page has the tools with their declarations, the findings, the limits and the machine."""
    page = open_page("#/agents/shop")
    page.wait_for_selector("tr[data-tool]")
    agent = studio.request("GET", "/v1/agents/shop")
    for tool in agent["tools"]:
        row = page.locator(f'tr[data-tool="{tool["name"]}"]').text_content()
        assert tool["description"] in row
        assert all(word in row for word in tool["declarations"])
    assert "requires_approval" in page.locator('tr[data-tool="pay"]').text_content()
    assert page.locator(".findings li").count() == len(agent["findings"]) > 0
    assert "200,000" in page.locator("dl.facts").text_content()
    assert page.locator(".machine .state").count() == 6


def test_the_list_of_agents(open_page):
    """Each agent is listed, and its name leads to it."""
    page = open_page("#/agents")
    page.get_by_role("link", name="courier").click()
    page.wait_for_selector('tr[data-tool="deliver"]')
    assert page.locator("h1").text_content() == "courier"


def test_the_sessions(open_page, studio, show):
    """Each session has its newest run, and leads to its runs."""
    page = open_page("#/sessions")
    row = page.locator('tr[data-session="invoices of ann"]')
    run = show("show", studio.runs["done"])
    expect(row).to_contain_text(run["prompt"].replace("\n", " ").split(",")[0])
    assert row.locator("td").nth(2).text_content() == run["agent"]
    assert row.locator("td").nth(4).text_content() == "1"
    row.get_by_role("link").first.click()
    expect(page.locator("tr[data-run]")).to_have_count(1)
    expect(page.locator("tr[data-run]")).to_have_attribute("data-run", studio.runs["done"])


def test_the_workers(open_page, studio, show):
    """A run that is executed is listed with its worker, and leaves the list when it is over."""
    run_id = studio.start("courier", "Bring it", wait_s=0)
    page = open_page("#/workers")
    row = page.locator(f'tr[data-run="{run_id}"]')
    expect(row).to_contain_text("its worker executes it")
    expect(row.locator("td").nth(2)).to_have_text("ACT")
    assert show("show", run_id)["state"] == "act"
    (studio.folder / "go.txt").touch()
    expect(row).to_have_count(0)
    assert studio.request("GET", f"/v1/runs/{run_id}?wait_s=30")["status"] == "done"


def test_the_costs(open_page, studio, show):
    """The rows, the spending limit and the forecast are those of `agentfsm costs --json`, for each meaning of a row."""
    page = open_page("#/costs?days=all")
    for by in ("agent", "purpose"):
        page.get_by_label("Rows").select_option(by)
        found = show("costs", "--by", by)
        for row in [*found["rows"], found["total"] | {"name": "all"}]:
            cells = page.locator(f'tr[data-row="{row["name"]}"] td')
            expect(cells.nth(2)).to_have_text(f"{row['runs']:,}")
            assert numbers(cells.first.text_content())[0] == pytest.approx(row["usd"], abs=0.005)
    [window] = found["windows"]
    cells = page.locator(f'tr[data-window="{window["name"]}"] td')
    assert numbers(cells.nth(0).text_content()) == [pytest.approx(window["spent_usd"], abs=0.001)]
    assert cells.nth(3).text_content() == "$500.00"
    month = numbers(page.locator("[data-forecast]").text_content())[-1]
    assert month == pytest.approx(found["forecast"]["month_usd"], rel=0.05)


def test_the_memory_and_the_guards(open_page, studio, show):
    """The items that a run recalled, and the decisions on its calls, are those of its journal."""
    events = {each["is"]: each for each in show("show", "hostile", "--events")["events"]}
    [item] = events["Recalled"]["items"]
    page = open_panel(open_page, studio, "hostile", "memory")
    row = page.locator(f'.panel tr[data-item="{item["id"]}"]')
    assert row.locator("td").first.text_content() == item["text"]
    assert numbers(row.locator("td").nth(2).text_content()) == [item["score"]]
    page = open_panel(open_page, studio, "hostile", "guards")
    cells = page.locator('.panel tr[data-decision="t1.0"] td').all_text_contents()
    decision = events["Guarded"]
    assert cells[1:4] == [decision["verdict"], decision["rule"], decision["reason"]]
