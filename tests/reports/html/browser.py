"""Pages in a real Chromium, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memplan.reports.html.page import page_of
from memplan.reports.html.saved_results import result_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: make browser installs it")
DRAWN = "[...document.querySelectorAll('.chart')].every((one) => one.dataset.drawn)"
DATA = "el.data.map((one) => [one.meta, [...one.x], [...one.y]])"
"""Of a picture: what each of its traces draws."""


def started() -> Iterator[Browser]:
    """Yield a browser, for a fixture."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page in a browser without a network, and what went wrong in it."""

    def __init__(self, browser: Browser, path: Path, width: int = 1280, **settings: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **settings)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.wrong: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda one: self.wrong.extend([one.url] * (one.url != path.as_uri())))
        self.page.on("dialog", lambda one: self.wrong.append(one.message))
        self.page.goto(path.as_uri())

    def plot(self, kind: str) -> str:
        """Bring a picture into view; return the selector of what plotly draws in."""
        chart = f".chart[data-kind={kind}]"
        self.page.locator(chart).first.scroll_into_view_if_needed()
        self.page.wait_for_selector(f"{chart}[data-drawn]")
        return f"{chart} .plot"

    def ask(self, plot: str, script: str) -> Any:
        """Evaluate an expression of ``el``, a picture's element."""
        return self.page.locator(plot).first.evaluate(f"(el) => {script}")

    def readout(self, kind: str) -> str:
        return self.page.locator(f".chart[data-kind={kind}] .readout").first.inner_text()

    def draw_all(self) -> None:
        self.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        self.page.wait_for_function(DRAWN)
        self.page.evaluate("dispatchEvent(new Event('afterprint'))")


def written(path: Path, *texts: str) -> Path:
    path.write_text(page_of([result_of(text, "the file") for text in texts]), encoding="utf-8")
    return path
