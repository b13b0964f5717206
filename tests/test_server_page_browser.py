"""The page at / in a headless Chromium: keys, a narrow screen, the dark, and an answer as it comes.

Skips where the package playwright or a program chromium is missing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from .runtime_models import FAMILIES, save_tiny
from .serving import Served, served, until

playwright = pytest.importorskip("playwright.sync_api", reason="no package playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no program chromium")

KEY = "a-key-of-a-page"
SLOW = 60_000  # milliseconds, of a busy machine
WIDTHS = {"phone": 320, "tablet": 768, "desk": 1280}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    folder = save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as runner:
        made = runner.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, server: Served) -> Iterator[Any]:
    """The server's page when it is ready, which asks nobody else and has nothing to complain of."""
    with opened(browser, server.url) as made:
        yield made


class opened:
    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self._context, self._url = browser.new_context(**options), url
        self._context.set_default_timeout(SLOW)
        self._asked: list[str] = []
        self._faults: list[str] = []

    def __enter__(self) -> Any:
        page = self._context.new_page()
        page.on("request", lambda request: self._asked.append(request.url))
        page.on("pageerror", lambda error: self._faults.append(str(error)))
        page.goto(self._url)
        page.locator("#state.ready").wait_for()
        return page

    def __exit__(self, *error: object) -> None:
        self._context.close()
        assert not self._faults
        assert all(url.startswith((self._url, "data:")) for url in self._asked)


def test_the_keyboard_is_enough(page, server):
    focus = "document.activeElement.id"
    assert page.evaluate(focus) == "question", "one may write at once"
    assert not page.locator("#key").is_visible(), "nobody asks for a key here"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#question") == "one\ntwo"
    page.keyboard.press("Enter")
    assert page.locator("article.user").text_content() == "one\ntwo"
    page.locator("article.assistant", has_text=re.compile(".")).wait_for()
    page.keyboard.press("Escape")
    page.locator("#stop:disabled").wait_for()
    server.idle()
    assert page.evaluate(focus) == "question", "the next question may be written at once"
    seen = []
    page.keyboard.press("Shift+Tab")
    for _ in range(6):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(focus))
    assert {"question", "send", "anew"} <= set(seen)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate(focus) == "question" and page.input_value("#question") == ""


def test_an_answer_comes_piece_by_piece_and_is_gone_on_from(page, server):
    page.evaluate("""() => {
        window.lengths = new Set();
        new MutationObserver(() => window.lengths.add(
            document.querySelector("article.assistant")?.textContent.length)
        ).observe(document.getElementById("said"), {subtree: true, childList: true});
    }""")
    page.locator("summary").click()
    page.fill("#most", "40")
    for number in (1, 2):
        page.fill("#question", f"question {number}")
        page.click("#send")
        page.locator("article.assistant small").nth(number - 1).wait_for()
    assert page.evaluate("window.lengths.size") > 5
    assert page.evaluate("messages.map(m => m.role).join()") == "user,assistant,user,assistant"
    tokens = page.locator("article.assistant small").first.text_content()
    assert re.fullmatch(r"\d+ tokens, [\d.]+ a second", tokens)


def test_a_new_conversation_has_nothing_of_the_one_that_it_cuts_off(page, server):
    page.fill("#question", "a long story")
    page.keyboard.press("Enter")
    page.locator("article.assistant", has_text=re.compile(".")).wait_for()
    page.click("#anew")
    page.locator("#stop:disabled").wait_for()
    server.idle()
    assert page.evaluate("messages.length") == 0
    assert page.locator("#said article").count() == 0


def test_what_is_refused_is_said(page):
    page.locator("summary").click()
    page.fill("#most", "")
    page.fill("#question", "hello")
    page.click("#send")
    page.locator("article.error").wait_for()
    told = page.locator("article.error").text_content()
    assert told == "max_tokens must be at least 1, got 0"
    assert page.evaluate("messages.length") == 0


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_nothing_is_cut_off_on_a_screen_of_any_width(browser, server, width):
    with opened(browser, server.url, viewport={"width": width, "height": 600}) as page:
        page.fill("#question", "x" * 200)
        page.click("#send")
        page.locator("article.user").wait_for()
        page.click("#anew")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("#question", "#send", "#anew", "#plots figure >> nth=-1"):
            box = page.locator(name).bounding_box()
            assert box["width"] > 30 and box["x"] >= 0 and box["x"] + box["width"] <= width


CONTRAST = """() => {
    const part = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = color => {
        const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(part);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const style = query => getComputedStyle(document.querySelector(query));
    const ground = light(style("body").backgroundColor);
    return {
        ground,
        text: ratio(light(style("body").color), ground),
        faint: ratio(light(style("#keys").color), ground),
        button: ratio(light(style("#send").color), light(style("#send").backgroundColor)),
    };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_the_reader_likes_and_can_be_read(browser, server, scheme):
    with opened(browser, server.url, color_scheme=scheme) as page:
        told = page.evaluate(CONTRAST)
    assert (told.pop("ground") < 0.2) == (scheme == "dark")
    assert all(ratio >= 4.5 for ratio in told.values()), told


def test_the_plots_show_what_the_server_does(page, server):
    server.complete("x", max_tokens=40, ignore_eos=True)
    figure = page.locator("figure", has_text="Time to the first token")
    figure.locator("output", has_text=re.compile(r"p50 \d")).wait_for()
    points = figure.locator("polyline").first.get_attribute("points")
    assert re.search(r"\d+,\d", points)


def test_a_server_with_keys_is_asked_with_the_one_that_is_typed_in(browser, tmp_path):
    folder = save_tiny(tmp_path / "model", FAMILIES["llama"]())
    with served(folder, api_keys=(KEY,)) as server, opened(browser, server.url) as page:
        page.locator("#key").wait_for()
        page.fill("#key", KEY)
        page.keyboard.press("Tab")
        page.locator("#model", has_text="tiny").wait_for()
        page.fill("#question", "hello")
        page.keyboard.press("Enter")
        page.locator("article.assistant", has_text=re.compile(".")).wait_for()
        page.keyboard.press("Escape")
        until(lambda: any(r["caller"] == "key 1" for r in server.requests()))
        server.idle()
