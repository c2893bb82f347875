"""Numbers of pictures and tables in a real Chromium, read back and held against the file, or against another count."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reports.html.browser import DATA, Opened, needs_browser, started, written
from reports.saved_results import Net, every, explanation, fitted, planned

import memplan
from memplan import Trace
from memplan._bytes import format_bytes
from memplan.explanation.explain import explain_trace
from memplan.explanation.model import Explanation
from memplan.planning import study
from memplan.reports.html.page import page_of
from memplan.reports.html.saved_results import read_results

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from started()


def opened(browser: Browser, folder: Path, *texts: str, **settings: Any) -> Opened:
    return Opened(browser, written(folder / "page.html", *texts), **settings)


def closed(page: Opened) -> None:
    assert page.wrong == []
    page.context.close()


def live(trace: Trace, tick: int, cause: str | None = None) -> int:
    """Bytes of the storages that live after a tick, one by one; of a card, in blocks of 512."""
    there = [one for one in trace.counted if one.born <= tick and (one.died is None or one.died > tick)]
    return sum(one.bytes for one in there if cause in (None, one.cause))


def test_before_and_after_of_a_plan_are_what_lives_at_each_moment(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator does not count here: what is born and dies is added up for each moment of the picture."""
    traces: list[Trace] = []
    memory_timeline_of = study.memory_timeline_of
    monkeypatch.setattr(
        study,
        "memory_timeline_of",
        lambda trace, *rest, **more: traces.append(trace) or memory_timeline_of(trace, *rest, **more),
    )
    plan = memplan.plan(Net, "8x3x32x32", budget=planned().budget, costs="roofline")
    assert not plan.changes_nothing
    page = opened(browser, tmp_path, plan.to_json())
    drawn = {meta: y for meta, _, y in page.ask(page.plot("time"), DATA)}
    after = next(one for one in traces if one.end == traces[-1].end)
    before = next(one for one in traces if len(one.steps) > 1)
    assert plan.course is not None
    assert plan.eager_course is not None
    assert drawn.pop("allocated") == [live(after, tick) for tick in plan.course.ticks]
    ticks = plan.eager_course.ticks[-len(drawn["before"]) :]
    assert drawn.pop("before") == [live(before, tick) for tick in ticks]
    assert min(op.start for op in before.ops if op.step == 1) < ticks[0]
    assert plan.eager_course.ticks[-len(ticks) - 1] <= min(op.start for op in before.ops if op.step == 1)
    assert {"weight", "saved"} < set(drawn)
    for cause, column in drawn.items():
        assert column == [live(after, tick, cause) for tick in plan.course.ticks], cause
    closed(page)


def test_the_frontier_has_every_plan_with_its_peak_and_time(browser: Browser, tmp_path: Path) -> None:
    data, page = json.loads(fitted()), opened(browser, tmp_path, fitted())
    drawn = {meta: list(zip(x, y, strict=True)) for meta, x, y in page.ask(page.plot("frontier"), DATA)}
    assert drawn == {
        "planned": [(row["peak"], row["seconds"]) for row in data["frontier"]["points"]],
        "without a plan": [(data["frontier"]["eager_peak"], 0)],
        "this plan": [(planned().peak, data["plan"]["seconds"])],
    }
    closed(page)


@pytest.mark.slow
def test_both_sides_of_a_comparison_are_drawn_by_cause(browser: Browser, tmp_path: Path) -> None:
    data, page = json.loads(every()["comparison"]), opened(browser, tmp_path, every()["comparison"])
    bars = {meta: x for meta, x, _ in page.ask(page.plot("beside"), DATA)}
    causes = {row["cause"]: [row["a"], row["b"]] for row in data["by_cause"] if row["a"] or row["b"]}
    assert bars == causes
    assert [sum(column[side] for column in bars.values()) for side in (0, 1)] == [data["a"]["peak"], data["b"]["peak"]]
    closed(page)


def test_a_replay_is_drawn_event_by_event_and_block_by_block(browser: Browser, tmp_path: Path) -> None:
    data, page = json.loads(every()["replay"]), opened(browser, tmp_path, every()["replay"])
    lines = {meta: (x, y) for meta, x, y in page.ask(page.plot("time"), DATA)}
    course = data["over_time"]
    assert lines["allocated"] == (course["events"], course["allocated"])
    assert lines["reserved"] == (course["events"], course["reserved"])
    at = course["allocated"].index(max(course["allocated"]))
    assert page.readout("time").startswith(f"{format_bytes(max(course['allocated']))}: event {course['events'][at]}.")
    drawn = dict(page.ask(page.plot("allocator"), "el.data.map((one) => [one.meta, one.x.reduce((a, b) => a + b, 0)])"))
    assert drawn["in use"] == sum(row["allocated"] for row in data["segments"])
    assert drawn["in use"] + drawn["free"] == sum(row["reserved"] for row in data["segments"])
    closed(page)


@pytest.mark.slow
def test_the_tried_of_a_search_are_drawn_by_cause(browser: Browser, tmp_path: Path) -> None:
    data, page = json.loads(every()["largest"]), opened(browser, tmp_path, every()["largest"])
    bars = page.ask(page.plot("beside"), DATA)
    tried = sorted(data["tried"], key=lambda row: row["value"])
    assert [sum(x[place] for _, x, _ in bars) for place in range(len(tried))] == [row["peak"] for row in tried]
    assert page.ask(page.plot("beside"), "el.layout.yaxis.ticktext") == [f"batch {row['value']}" for row in tried]
    closed(page)


@pytest.mark.slow
def test_what_is_alive_is_listed_with_its_bytes_birth_and_death(browser: Browser, tmp_path: Path) -> None:
    course, page = json.loads(explanation())["course"], opened(browser, tmp_path, explanation())
    cells = page.page.locator("[aria-label='Alive at the peak'] tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert len(cells) == len(course["alive"]) > 20
    for shown, (*_, held, born, died, _) in zip(cells, course["alive"], strict=True):
        assert shown[2] == format_bytes(held)
        assert shown[3] == f"{born:,} {'stays' if died is None else f'to {died:,}'}"
    closed(page)


def test_another_batch_has_the_peak_that_a_recording_of_it_has(browser: Browser, tmp_path: Path) -> None:
    """The slider's line goes through two recordings; further ones lie on it."""

    def recorded(batch: int) -> Explanation:
        return memplan.explain(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), f"{batch}x64")

    page = opened(browser, tmp_path, recorded(16).to_json())
    page.plot("batch")
    page.page.locator(".sliders input").first.focus()
    for batch in (32, 64, 128):
        page.page.keyboard.press("ArrowRight")
        assert page.readout("batch") == f"batch {batch}: {format_bytes(recorded(batch).timeline.peak_allocated)} peak"
    closed(page)


def rank(folder: Path, number: int) -> dict[str, Any]:
    """Save the step of a rank: another width for each, and so other bytes."""

    def build() -> Callable[[], None]:
        model, x = Net(8 + 8 * number), torch.randn(4, 3, 32, 32)
        return lambda: model(x).sum().backward()

    text = explain_trace(memplan.record(build, device="rtx4090"), title="stages.py:build").to_json()
    (folder / f"rank{number}.json").write_text(text, encoding="utf-8")
    return json.loads(text)


def test_ranks_of_one_step_stand_side_by_side_by_their_files(browser: Browser, tmp_path: Path) -> None:
    data = [rank(tmp_path, number) for number in range(3)]
    results = [read_results(str(tmp_path / f"rank{number}.json"))[0] for number in range(3)]
    (tmp_path / "ranks.html").write_text(page_of(results), encoding="utf-8")
    page = Opened(browser, tmp_path / "ranks.html")
    bars = page.ask(page.plot("beside"), DATA)
    peaks = [one["timeline"]["peak_allocated"] for one in data]
    assert [sum(x[place] for _, x, _ in bars) for place in range(3)] == peaks
    for cause, column, _ in bars:
        assert column == [one["by_cause"].get(cause, 0) for one in data], cause
    assert page.ask(page.plot("beside"), "el.layout.yaxis.ticktext") == ["rank0.json", "rank1.json", "rank2.json"]
    head = page.page.locator(".beside p").first.inner_text()
    most, least = format_bytes(peaks[2]), format_bytes(peaks[0])
    assert head == f"The highest peak is {most} (rank2.json) and the least {least} (rank0.json)."
    page.page.get_by_role("link", name="rank1.json").click()
    below = page.page.evaluate("document.querySelector('#result-2').getBoundingClientRect().top")
    assert abs(below) < 40
    assert page.page.locator("#result-2 h2").inner_text().startswith("rank1.json: stages.py:build")
    page.page.set_viewport_size({"width": 390, "height": 900})
    page.page.wait_for_timeout(800)  # the pictures follow the window
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    closed(page)


def test_results_of_different_kinds_are_labelled_and_those_with_a_peak_compared(
    browser: Browser, tmp_path: Path
) -> None:
    page = opened(browser, tmp_path, explanation(), planned().to_json(), every()["findings"])
    labels = page.page.locator("nav li").all_inner_texts()
    assert [line.split("\n")[0].rsplit(" ", 1)[-1] for line in labels] == ["explanation", "plan", "findings"]
    assert len(page.ask(page.plot("beside"), "el.layout.yaxis.ticktext")) == 2
    assert page.page.locator("article .verdict").count() == 3
    closed(page)


@pytest.mark.slow
def test_a_printed_page_is_light_and_shows_all_rows_and_pictures(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, explanation(), color_scheme="dark")
    page.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.page.emulate_media(media="print")
    assert page.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    clipped = (
        "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollHeight > one.clientHeight + 1).length"
    )
    assert page.page.evaluate(clipped) == 0
    assert page.page.locator(".chart:not([data-drawn])").count() == 0
    assert page.page.locator("#theme:visible, .find:visible").count() == 0
    assert page.page.pdf(format="A4")[:5] == b"%PDF-"
    closed(page)


def test_everything_is_reached_by_the_tab_key_alone(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, explanation())
    reached: list[str] = []
    name = "document.activeElement.getAttribute('aria-label') || document.activeElement.innerText || ''"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    for _ in range(400):
        page.page.keyboard.press("Tab")
        found = page.page.evaluate(f"[document.activeElement.tagName, {name}, {outline}]")
        if found[0] == "BODY":
            break
        assert found[2] == "solid", f"{found} shows that it has the focus"
        reached.append(found[1])
    wanted = {
        "light or dark",
        "Memory over time, by cause",
        "Layers by bytes",
        "share of the peak",
        "Segments and blocks",
    }
    assert wanted | {"saves", "outputs", "stem", "body.2"} <= set(reached)
    closed(page)


def test_two_files_of_one_name_are_told_apart_by_their_folders() -> None:
    from memplan.reports.html.page import names_of
    from memplan.reports.html.saved_results import result_of

    one = result_of(explanation(), "x")
    shown = [dataclasses.replace(one, source=source) for source in ("a/step.json", "b/step.json")]
    assert names_of(shown) == ["a/step.json", "b/step.json"]
    assert names_of([shown[0], shown[0]]) == ["a/step.json (1)", "a/step.json (2)"]
    assert names_of([shown[0], dataclasses.replace(shown[1], title="other")]) == [one.title, "other"]
