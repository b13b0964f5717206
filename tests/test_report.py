"""`quantize report`: every number on the page is in the JSON, the page is whole and well-formed."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from lowbit.evals.report import plain
from lowbit.evals.report_blocks import blocks
from lowbit.evals.report_markdown import markdown
from lowbit.evals.report_page import html
from lowbit.evals.report_pieces import Table
from lowbit.evals.report_plots import COLOURS, INK, PLOTS, figure_svg
from lowbit.evals.results import header, numbers_of
from lowbit.evals.summary import GRADES, WITHIN_NOISE, grade, pareto_front, summarize
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.report import report
from typer.testing import CliRunner

from .results_sample import sample_bench, sample_report

HTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "link", "br", "hr", "img", "input", "col", "source", "wbr"}
SLOW = 240_000  # milliseconds, of a busy machine
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def results(**changes: Any) -> dict[str, Any]:
    return json.loads(sample_report(**changes).to_json())


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    """Two files of one protocol, a run's file, and one by another protocol."""
    ran = {**header("run"), "environment": results()["environment"], "protocol": None}
    made = {"method": "gptq", "scheme": "W7A16", "seconds": 77.25}
    size = results()["rows"][1]["size"]
    ran["rows"] = [
        {"name": "w1", "path": "/made/w1", "size": size, "made": made},
        {"name": "new", "path": "/made/new", "size": size, "made": {**made, "seconds": 11.5}},
    ]
    served = {**ran, "rows": [
        {"name": "w1", "path": "/made/w1", "size": size, "bench": sample_bench()},
        {"name": "fake", "path": "http://other/v1", "size": None, "bench": sample_bench(3.0)},
    ]}  # fmt: skip
    tasked = results(models=1)
    tasked["rows"][1]["tasks"] = [{
        "task": "riddles <i>", "questions": 40, "accuracy": 0.675, "accuracy_stderr": 0.0741,
        "accuracy_norm": 0.7, "accuracy_norm_stderr": 0.0725,
        "paired": {"only_base": 5, "only_model": 2, "both": 25, "neither": 8, "p_value": 0.453},
    }]  # fmt: skip
    other = results(text_sha256="cd" * 32, name="llama.cpp-512")
    return summarize([("a.json", tasked), ("b.json", results()), ("run.json", ran),
                      ("other.json", other), ("served.json", served)])  # fmt: skip


@pytest.fixture(scope="module")
def page(summary: dict[str, Any]) -> str:
    return html(summary, "What it <cost> & gained")


def test_rows_of_one_protocol_stand_together(summary: dict[str, Any]) -> None:
    first, second, third = summary["groups"]
    assert [row["label"] for row in first["rows"]] == [
        "tiny", "W7A16 gptq", "W7A16 gptq (/made/w1)", "W5A16 gptq"]  # fmt: skip
    assert [row["is_base"] for row in first["rows"]].count(True) == 1
    assert first["rows"][1]["made"]["seconds"] == 77.25, "from the run's file, by its path"
    assert second["protocol"]["name"] == "llama.cpp-512" and len(second["rows"]) == 3
    assert third["protocol"] is None
    assert [r["label"] for r in third["rows"]] == ["new", "fake"]
    assert first["rows"][1]["bench"]["loads"], "from the bench's file, by its path"


def test_ratios_are_those_of_the_rows(summary: dict[str, Any]) -> None:
    base, row = summary["groups"][0]["rows"][:2]
    found = row["against_base"]
    assert found["smaller"] == base["size"]["file_bytes"] / row["size"]["file_bytes"]
    assert found["faster"] == row["speed"]["decode"] / base["speed"]["decode"] == 2.0
    assert found["perplexity"] == math.exp(row["divergence"]["nll_difference"])
    assert base["against_base"] is None


def test_the_front_holds_what_nothing_beats() -> None:
    points = [(4, 1.0), (3, 1.0), (1, 9.0), (2, 3.0), (2, 2.0), (5, 0.5), (6, 0.5)]
    assert pareto_front(points) == [2, 4, 1, 5]
    assert pareto_front([]) == []


def test_grades_fall_with_the_divergence() -> None:
    assert grade(0.0003, 0.0003) == WITHIN_NOISE and grade(0.0003, None) == GRADES[0][1]
    assert [grade(k, 1e-5) for k in (0.02, 0.05, 0.3)] == [GRADES[1][1], GRADES[2][1], GRADES[3][1]]


def test_the_page_is_well_formed(page: str) -> None:
    root = ET.fromstring(page.partition("\n")[2])
    assert root.tag == f"{HTML}html" and page.startswith("<!DOCTYPE html>")
    assert root.find(f".//{HTML}h1").text == "What it <cost> & gained"  # type: ignore[union-attr]
    ids = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
    assert len(ids) == len(set(ids)), "no id twice, in whichever figure"
    used = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
    assert used and used <= set(ids)

    class Balance(HTMLParser):
        open: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.open.append(tag) if tag not in VOID else None

        def handle_endtag(self, tag: str) -> None:
            if tag not in VOID:
                assert self.open.pop() == tag

    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []


def test_the_page_needs_nothing_else(page: str) -> None:
    assert "<script" not in page and "@import" not in page and "<link" not in page
    for name, value in re.findall(r'\b((?:xlink:)?href|src|action)="([^"]*)"', page):
        assert value.startswith("#"), (name, value)
    assert not re.search(r"url\((?!#)", page)
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    assert 'name="viewport"' in page


def test_every_number_on_the_page_is_in_the_json(page: str, summary: dict[str, Any]) -> None:
    known = set(numbers_of(json.loads(json.dumps(summary))))
    root = ET.fromstring(page.partition("\n")[2])
    shown = [(e.attrib["value"], e.text or "") for e in root.iter(f"{HTML}data")]
    assert len(shown) > 150
    for value, text in shown:
        assert float(value) in known, (value, text)
        assert shows(text, float(value)), (value, text)
    headings = [h for b in blocks(summary) if isinstance(b, Table) for h in b.headings]
    words = " ".join([*strings_of(summary), *headings, "What it <cost> & gained"])
    for text in texts_of(root):
        for found in re.findall(r"\d[\d.,]*", text):
            assert found.rstrip(".,") in words, f"'{found}' in '{text}' is not in the JSON"


def shows(text: str, value: float) -> bool:
    """Whether `text` is `value` rounded, perhaps in percent, thousandths, millions or billions."""
    said = float(text.rstrip("%×").replace(",", ""))
    scale = 0.01 if text.endswith("%") else 1.0
    digits = re.sub(r"e.*", "", text.rstrip("%×")).partition(".")[2]
    exponent = int(text.partition("e")[2] or 0)
    half = 0.5001 * 10.0 ** (exponent - len(digits)) * scale
    return any(abs(said * scale * s - value) <= half * s for s in (1.0, 1e6, 1e-3, 1e9)) or (
        "." not in text or abs(said * scale / value - 1) < 5.1e-3
    )


def strings_of(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    keys = list(value) if isinstance(value, dict) else []
    return [*keys, *(s for inner in held for s in strings_of(inner))]


def texts_of(root: ET.Element) -> list[str]:
    """Text outside of <data>, <svg> and <style>."""
    found = []
    for child in root:
        if child.tag not in (f"{HTML}data", f"{SVG}svg", f"{HTML}style"):
            found += [child.text or "", *texts_of(child)]
        found.append(child.tail or "")
    return found


def test_figures_are_drawn_in_the_pages_ink(summary: dict[str, Any]) -> None:
    drawn = {k: figure_svg(k, summary["groups"][0], k) for k in PLOTS if k != "history"}
    for svg in drawn.values():
        assert "currentColor" in svg and INK not in svg and COLOURS[0] in svg
        assert "width=" not in svg.partition(">")[0] and "viewBox" in svg.partition(">")[0]
        assert "<text" in svg, "text is text, which readers and searches find"
    assert "W5A16 gptq" in drawn["size"] and "noise floor" in drawn["size"]
    assert drawn["size"] == figure_svg("size", summary["groups"][0], "size"), "the same each time"


def test_ticks_of_a_logarithmic_axis_are_plain_numbers(summary: dict[str, Any]) -> None:
    svg = ET.fromstring(figure_svg("quantiles", summary["groups"][0], "q"))
    texts = ["".join(e.itertext()).strip() for e in svg.iter(f"{SVG}text")]
    numbers = [t for t in texts if re.fullmatch(r"[\d.]+(e-\d+)?", t)]
    assert len(numbers) >= 2 and not [t for t in texts if "$" in t or "math" in t], texts


def test_a_row_has_the_same_colour_in_all_figures() -> None:
    given = results()
    given["rows"][1]["speed"] = None  # so that the second row is the first of the speeds
    group = summarize([("a.json", given)])["groups"][0]
    speed, size = (figure_svg(kind, group, kind) for kind in ("speed", "size"))
    assert COLOURS[0] in size and COLOURS[1] in size
    assert COLOURS[0] not in speed and COLOURS[1] in speed


def test_what_serving_took_is_shown(page: str, summary: dict[str, Any]) -> None:
    group = summary["groups"][2]
    assert group["rows"][1]["throughput"] == 300.0, "the most of any load"
    text = markdown(summary, "Title")
    assert "| plain | clients: 8 | 600.0 |" in text and "| other over plain | clients: 8 |" in text
    assert "other: no numbers, request 3 failed: out of order" in text
    assert "| decode | 4 | 128 | 10.00 | 5.00 | 2.00 | memory | 50.0% |" in text
    drawn = figure_svg("latency", group, "x"), figure_svg("memory", group, "x")
    assert "fake, plain, p99" in drawn[0] and "activations" in drawn[1]
    assert page.count("Serving: fake") == 1


def test_markdown_holds_the_same_numbers(summary: dict[str, Any]) -> None:
    text = markdown(summary, "Title")
    tables = [b for b in blocks(summary) if isinstance(b, Table)]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == sum(2 + len(t.rows) for t in tables)
    for line in lines:
        assert line.count(" | ") == len(re.split(r"(?<!\\)\|", line)) - 3
    for table in tables:
        for row in table.rows:
            for piece in (p for cell in row for p in cell if p.value is not None):
                assert piece.text in text
    assert r"riddles \<i\>" in text


def test_what_speed_nobody_measured_is_left_out() -> None:
    bare = summarize([("a.json", results(speed=False))])
    text = html(bare, "t")
    assert "tokens/s" not in text.partition("Protocol")[0] and "Divergence against size" in text
    alone = json.loads(sample_report(models=0).to_json())
    alone["protocol"]["base"], alone["noise_floor"] = None, None
    assert "<svg" not in html(summarize([("a.json", alone)]), "t")


def test_errors_nobody_measured_have_no_table() -> None:
    given = results()
    for row in given["rows"]:
        for linear in row["linears"] or []:
            linear["relative_error"] = None
    assert "largest errors" not in html(summarize([("a.json", given)]), "t")
    assert "largest errors" in html(summarize([("a.json", results())]), "t")


def run(*arguments: str) -> str:
    """What it says."""
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False).stderr


def test_the_command_writes_all_three(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(results()))
    for ending in ("html", "md", "json"):
        out = tmp_path / f"out.{ending}"
        assert " models from 1 file\n" in run(str(file), "-o", str(out), "--title", "Mine")
        assert out.stat().st_size > 1000
        with pytest.raises(UserError, match="exists; give --overwrite"):
            run(str(file), "-o", str(out))
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["groups"][0]["rows"][1]["divergence"] == results()["rows"][1]["divergence"]
    assert written["sources"][0]["file"] == "r.json"
    with pytest.raises(UserError, match=r"ends in .html, .md, .json"):
        run(str(file), "-o", str(tmp_path / "r.pdf"))
    with pytest.raises(UserError, match="over the input"):
        run(str(file), "-o", str(file), "--overwrite")
    with pytest.raises(UserError, match="is no results file"):
        run(str(tmp_path / "out.json"), "-o", str(tmp_path / "x.html"))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    given = results()
    given["rows"][1]["name"] = "</svg><script>alert(1)</script>&amp;$x_{y}$ | \\"
    given["rows"][2]["name"] = "_$\\frac$ {"
    given["rows"][1]["linears"][0]["name"] = "<img src=x onerror=alert(1)>"
    found = summarize([("<b>.json", given)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = html(found, "t")
    root = ET.fromstring(text.partition("\n")[2])
    assert "<script" not in text and "<img" not in text and root is not None
    assert plain(given["rows"][1]["name"]) in "".join(root.itertext())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, by playwright."""
    if CHROMIUM is None:
        pytest.skip("no Chromium to look at the page with")
    reason = "playwright is not installed (pip install playwright)"
    api = pytest.importorskip("playwright.sync_api", reason=reason)
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=SLOW
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def page_file(page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


LOOK = """() => {
    const of = (element) => getComputedStyle(element);
    const svgs = [...document.querySelectorAll('figure svg')];
    const inks = svgs.map(svg => {
        const texts = [...svg.querySelectorAll('text')];
        return texts.map(t => of(t).fill).find(f => f !== 'none');
    });
    return {
        back: of(document.body).backgroundColor, text: of(document.body).color, inks,
        sideways: document.documentElement.scrollWidth - innerWidth,
        figures: svgs.map(svg => svg.getBoundingClientRect().width),
        first: document.querySelector('h1').getBoundingClientRect().width,
    };
}"""


def brightness(colour: str) -> float:
    """Of rgb(...), from 0 to 1."""
    red, green, blue = (int(n) for n in re.findall(r"\d+", colour)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_chromium_shows_the_page(browser: Any, page_file: Path, scheme: str, width: int) -> None:
    asked: list[str] = []
    said: list[str] = []
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    shown = context.new_page()
    shown.set_default_timeout(SLOW)
    shown.on("request", lambda request: asked.append(request.url))
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.goto(page_file.as_uri())
    found = shown.evaluate(LOOK)
    assert asked == [page_file.as_uri()], "the page fetches nothing"
    assert said == []
    dark, light = sorted((brightness(found["back"]), brightness(found["text"])))
    assert dark < 0.2 and light > 0.85
    assert (brightness(found["back"]) < 0.5) == (scheme == "dark")
    assert found["sideways"] <= 0, "wide tables scroll by themselves, not the page"
    assert found["figures"] and all(0 < w <= width for w in found["figures"])
    inks = [brightness(ink) for ink in found["inks"]]
    assert all((ink > 0.5) == (scheme == "dark") for ink in inks), "figures are in the page's ink"
    shot = shown.screenshot(full_page=True)
    assert shot.startswith(b"\x89PNG") and len(shot) > 20_000
    context.close()


def test_chromium_prints_the_page(browser: Any, page_file: Path) -> None:
    """Black on white for whoever reads in the dark, and no table cut at the paper's edge."""
    context = browser.new_context(color_scheme="dark", viewport={"width": 794, "height": 1123})
    shown = context.new_page()
    shown.set_default_timeout(SLOW)
    shown.goto(page_file.as_uri())
    shown.emulate_media(media="print", color_scheme="dark")
    found = shown.evaluate(LOOK)
    assert brightness(found["back"]) > 0.99 and brightness(found["text"]) < 0.01
    assert all(brightness(ink) < 0.01 for ink in found["inks"])
    printed = shown.pdf(format="A4")
    assert printed.startswith(b"%PDF") and len(printed) > 20_000
    context.close()
