"""Pages in a real Chromium: hover, zoom, layers, tables, sliders, keyboard; what is drawn is what the file says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from environment import slow
from reports.html.browser import DATA, Opened, needs_browser, started, written
from reports.saved_results import EVIL, every, explanation, planned, sweep

from memplan._bytes import format_bytes
from memplan.reports.document import size_or_dash

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from started()


@pytest.fixture(scope="module")
def opened_step(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(browser, written(tmp_path_factory.mktemp("pages") / "step.html", explanation()))


@pytest.fixture
def step(opened_step: Opened) -> Iterator[Opened]:
    """A page that the tests share: opening it takes longer than what they do."""
    opened_step.plot("time")
    yield opened_step
    assert opened_step.wrong == []


def test_what_is_drawn_over_time_is_what_the_file_says(step: Opened) -> None:
    course = json.loads(explanation())["course"]
    drawn = {meta: (x, y) for meta, x, y in step.ask(step.plot("time"), DATA)}
    assert drawn.pop("allocated") == (course["ticks"], course["allocated"])
    assert drawn.pop("reserved") == (course["ticks"], course["reserved"])
    assert drawn == {cause: (course["ticks"], column) for cause, column in course["causes"].items()}
    spans = {note["text"] for note in step.ask(step.plot("time"), "el.layout.annotations")}
    assert {"forward 1", "backward 1", "forward 2", "backward 2"} <= spans


def test_hovering_at_the_peak_names_its_op_layer_and_line(step: Opened) -> None:
    data = json.loads(explanation())
    plot = step.plot("time")
    script = """(() => { const box = el.querySelector(".nsewdrag").getBoundingClientRect(); const all = el.data.at(-1);
        const at = all.y.indexOf(Math.max(...all.y));
        return [box.x + el._fullLayout.xaxis.l2p(all.x[at]) + 0.5, box.y + box.height / 2] })()"""
    x, y = step.ask(plot, script)
    step.page.mouse.move(x, y)
    step.page.wait_for_selector(f"{plot} .hoverlayer .hovertext")
    peak = data["peak"]
    for text in (str(step.page.locator(f"{plot} .hoverlayer").text_content()), step.readout("time")):
        for part in (peak["op"], peak["layer"], peak["where"], format_bytes(peak["bytes"])):
            assert part in text
    shown = step.readout("time")
    for cause, size in data["by_cause"].items():
        assert (not size) or format_bytes(size) in shown, cause


@pytest.mark.slow
def test_dragging_zooms_and_a_double_click_shows_all(step: Opened) -> None:
    plot = step.plot("time")
    whole = step.ask(plot, "el.layout.xaxis.range")
    box = step.page.locator(f"{plot} .nsewdrag").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    step.page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    step.page.mouse.down()
    step.page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=8)
    step.page.mouse.up()
    step.page.wait_for_timeout(400)
    start, end = step.ask(plot, "el.layout.xaxis.range")
    length = whole[1] - whole[0]
    assert start == pytest.approx(whole[0] + 0.3 * length, abs=0.02 * length)
    assert end == pytest.approx(whole[0] + 0.6 * length, abs=0.02 * length)
    step.page.mouse.dblclick(box["x"] + 80, middle)
    step.page.wait_for_timeout(400)
    assert step.ask(plot, "el.layout.xaxis.range") == whole


@pytest.mark.slow
def test_the_keyboard_moves_along_the_step(step: Opened) -> None:
    course = json.loads(explanation())["course"]
    plot = step.plot("time")
    step.page.locator(plot).focus()
    step.page.keyboard.press("Home")
    assert step.readout("time").startswith(format_bytes(course["allocated"][0]))
    for _ in range(3):
        step.page.keyboard.press("ArrowRight")
    assert step.readout("time").startswith(format_bytes(course["allocated"][3]))
    step.page.keyboard.press("p")
    assert step.readout("time").startswith(format_bytes(max(course["allocated"])))
    whole = step.ask(plot, "el.layout.xaxis.range")
    step.page.keyboard.press("+")
    start, end = step.ask(plot, "el.layout.xaxis.range")
    assert end - start == pytest.approx((whole[1] - whole[0]) / 2)
    step.page.keyboard.press("Escape")
    assert step.ask(plot, "el.layout.xaxis.range") == whole


def test_layers_open_by_a_click_and_by_the_keyboard(step: Opened) -> None:
    data = json.loads(explanation())
    plot = step.plot("layers")
    ids, values = step.ask(plot, "[el.data[0].ids, el.data[0].values]")
    sizes = dict(zip(ids, values, strict=True))
    assert sizes["\0"] == data["saved_bytes"]
    assert all(sizes[row["name"]] >= row["saved_bytes"] for row in data["layers"])
    step.page.locator(f"{plot} g.slice", has_text="body").first.click()
    step.page.wait_for_timeout(1000)
    inside = sum(row["saved_bytes"] for row in data["layers"] if row["name"].startswith("body"))
    assert step.readout("layers").startswith(f"body: saves {format_bytes(inside)}")
    step.page.locator("[aria-label='By layer'] .layer", has_text="stem").first.focus()
    step.page.keyboard.press("Enter")
    step.page.wait_for_timeout(500)
    assert step.ask(plot, "el.data[0].level") == "stem"
    assert step.readout("layers").startswith("stem: saves")
    step.page.locator("[data-key=peak]").click()
    held = sum(row["bytes"] for row in data["holders"])
    assert dict(zip(ids, step.ask(plot, "el.data[0].values"), strict=True))["\0"] == held


def rows(step: Opened, name: str, column: int) -> list[str]:
    visible = f"[aria-label='{name}'] tbody tr:not([hidden]) td:nth-child({column})"
    return step.page.locator(visible).all_inner_texts()


def test_tables_are_sorted_and_searched(step: Opened) -> None:
    data = json.loads(explanation())
    by_size = sorted((row["output_bytes"] for row in data["layers"]), reverse=True)
    head = step.page.locator("[aria-label='By layer'] th", has_text="outputs")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert rows(step, "By layer", 3) == [size_or_dash(size) for size in by_size]
    head.locator("button").press("Enter")
    assert rows(step, "By layer", 3) == [size_or_dash(size) for size in reversed(by_size)]
    search = step.page.locator(".table", has=step.page.locator("[aria-label='Alive at the peak']")).locator("input")
    search.fill("optimizer STATE")
    shown = rows(step, "Alive at the peak", 2)
    assert len(shown) == sum(row[3] == "optimizer_state" for row in data["course"]["alive"]) > 0
    assert set(shown) == {"optimizer state"}


def test_names_are_texts_in_tables_and_pictures(step: Opened) -> None:
    step.draw_all()
    assert EVIL in step.page.locator("article h2").inner_text()
    plot = step.plot("layers")
    step.page.locator("[data-key=peak]").click()
    step.ask(plot, "Plotly.restyle(el, {level: el.data[0].ids[0]}).then(() => null)")
    step.page.wait_for_timeout(500)
    assert EVIL in step.ask(plot, "el.querySelector('.iciclelayer').textContent")
    assert EVIL in rows(step, "By layer", 1)
    assert step.page.evaluate("typeof hacked") == "undefined"
    assert step.page.locator("img").count() == 0


def test_blocks_of_the_allocator_are_drawn_with_their_bytes(step: Opened) -> None:
    data = json.loads(explanation())
    sums = step.ask(step.plot("allocator"), "el.data.map((one) => [one.meta, one.x.reduce((a, b) => a + b, 0)])")
    drawn = dict(sums)
    free = drawn.pop("free")
    assert sum(drawn.values()) == data["timeline"]["peak_allocated"]
    assert free == sum(block[1] for one in data["course"]["segments"] for block in one[3] if block[3] == "inactive")


@pytest.mark.slow
def test_dark_and_light_change_by_a_button(step: Opened) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    assert step.page.evaluate(colour) == "rgb(255, 255, 255)"
    step.page.locator("#theme").press("Enter")
    assert step.page.evaluate(colour) == "rgb(20, 23, 28)"
    assert step.ask(step.plot("time"), "el.layout.font.color") == "#e6edf3"
    step.page.locator("#theme").press("Enter")
    assert step.ask(step.plot("time"), "el.layout.font.color") == "#1b1f24"


def test_sliders_move_the_bars_to_the_points_of_the_sweep(browser: Browser, tmp_path: Path) -> None:
    data = json.loads(sweep())
    opened = Opened(browser, written(tmp_path / "sweep.html", sweep()))
    plot = opened.plot("sweep")
    first, second = opened.page.locator(".sliders input").all()
    first.focus()
    opened.page.keyboard.press("ArrowRight")
    second.press("End")
    row = next(row for row in data["rows"] if (row["batch"], row["size"]) == (4, 24))
    shown = opened.readout("sweep")
    assert shown.startswith(f"batch 4, size 24: {format_bytes(row['peak'])} peak")
    assert f"saved activations {format_bytes(row['saved'])}" in shown
    bars = {meta: y for meta, _, y in opened.ask(plot, DATA)}
    for place, batch in enumerate((2, 4, 8)):
        point = next(row for row in data["rows"] if (row["batch"], row["size"]) == (batch, 24))
        assert sum(column[place] for column in bars.values()) == point["peak"]
        assert bars["saved"][place] == point["saved"]
    assert opened.wrong == []
    opened.context.close()


@pytest.mark.slow
def test_before_and_after_stand_on_one_axis(browser: Browser, tmp_path: Path) -> None:
    plan = planned()
    opened = Opened(browser, written(tmp_path / "plan.html", plan.to_json()))
    lines = {meta: (x, y) for meta, x, y in opened.ask(opened.plot("time"), DATA)}
    assert max(lines["before"][1]) == plan.eager_peak
    assert max(lines["allocated"][1]) == plan.peak
    for name in ("before", "allocated"):
        x = [one for one in lines[name][0] if one is not None]
        assert x == sorted(x)
        assert 0 <= x[0] < x[-1] <= 3
    assert plan.as_python()[:80] in opened.page.locator("pre").inner_text()
    assert opened.wrong == []
    opened.context.close()


@pytest.mark.parametrize("width", [390, *slow(1280)])
def test_every_kind_fits_the_window_and_draws(browser: Browser, tmp_path: Path, width: int) -> None:
    results = every()
    opened = Opened(browser, written(tmp_path / "all.html", *results.values()), width, color_scheme="dark")
    opened.draw_all()
    assert opened.page.locator("article").count() == len(results)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    wide = "[...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll, pre, .js-plotly-plot') "
    wide += f"&& one.getBoundingClientRect().right > {width}).map((one) => one.outerHTML.slice(0, 80))"
    assert opened.page.evaluate(wide) == []
    assert opened.wrong == []
    opened.context.close()
