"""The page of `opforge explain` in a real browser: nothing goes wrong, every kernel is there, and 500 kernels open in two seconds."""

from __future__ import annotations

import copy
import json
import re
import shutil
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import opforge
from opforge.report.page import page_text, write_page

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
SECTIONS = ("timeline", "steps", "picture", "roofline", "memory", "texts")


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(x @ w, -1)
    y = y / y.sum(0)
    return torch.nn.functional.gelu(y.t() @ x).sum()


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    x, w = torch.randn(96, 64), torch.randn(64, 48, requires_grad=True)

    def step(x: torch.Tensor, w: torch.Tensor) -> None:
        program(x, w).backward()

    return opforge.explain(step)(x, w).report()


def longer(facts: dict[str, Any], kernels: int) -> dict[str, Any]:
    """The same with so many kernels: the steps of the first graph one after the other, each time reading the last ones' results."""
    made = copy.deepcopy(facts)
    graph, shortened = made["graphs"][0], made["graphs"][0]["steps"]
    steps: list[dict[str, Any]] = []
    edges: list[list[Any]] = []
    timeline: list[dict[str, Any]] = []
    start = 0.0
    while sum(s["kind"] == "kernel" for s in steps) < kernels:
        first = len(steps)
        for s in shortened:
            name = f"k{len(steps)}_{s['name'].partition('_')[2]}" if s["kind"] == "kernel" else s["name"]
            timeline.append({"step": len(steps), "name": name, "start": start, "seconds": s["measured"] or 1e-6})
            start += (s["measured"] or 1e-6) * 1.1
            steps.append(s | {"name": name})
        edges += [[a + first, b + first, *rest] for a, b, *rest in graph["edges"]]
        if first:
            edges.append([first - 1, first, "between", 4096, "unknown"])
    graph |= {"steps": steps, "edges": edges, "timeline": timeline}
    graph["kernels"] = sum(s["kind"] == "kernel" for s in steps)
    graph["measured"] = {"seconds": start, "calls": 5, "timed_seconds": start}
    blocks = graph["memory"]["blocks"]
    times = len(steps) // len(shortened)
    shift = len(shortened)
    graph["memory"]["blocks"] = [
        b | {"first": b["first"] + shift * k, "last": b["last"] + shift * k} for k in range(times) for b in blocks
    ]
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("C19: no Chromium is installed (apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="C19: playwright is not installed (pip install playwright)")
    with api.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        started.close()


def opened(browser: Any, path: Path, theme: str = "light") -> tuple[Any, list[str], float]:
    """The page, what its console and its errors say, and the seconds until it can be used."""
    page = browser.new_page(viewport={"width": 1500, "height": 950}, color_scheme=theme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else said.append(request.url))
    start = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    page.wait_for_selector("#timeline h2")
    return page, said, time.perf_counter() - start


def scrolled(page: Any, graph: int = 0) -> None:
    """Brings every section into sight, which draws it for the chosen graph."""
    for name in SECTIONS:
        page.evaluate(f"document.getElementById('{name}').scrollIntoView()")
        page.wait_for_selector(f"#{name}[data-drawn='{graph}']", state="attached")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_section_of_every_graph_is_drawn(facts: dict[str, Any], browser: Any, tmp_path: Path, theme: str) -> None:
    page, said, _ = opened(browser, write_page(facts, tmp_path / "page.html"), theme)
    assert len(facts["graphs"]) == 2
    for number, graph in enumerate(facts["graphs"]):
        page.click(f"#graphs [data-graph='{number}']")
        scrolled(page, number)
        kernels = [s["name"] for s in graph["steps"] if s["kind"] == "kernel"]
        assert page.eval_on_selector_all("#steps [data-kernel]", "rows => rows.map(r => r.dataset.kernel)") == kernels
        assert page.locator("#picture .box").count() == len(graph["steps"])
        assert 0 < page.locator("#timeline .mark").count() <= len(graph["steps"])
        assert page.locator("#roofline circle").count() > 0
        assert page.locator("#memory .mark").count() == len([b for b in graph["memory"]["blocks"] if b["bytes"]])
        for k, step in enumerate(graph["steps"]):
            page.evaluate(f"select({k})")
            detail = page.inner_text("#detail")
            assert step["name"] in detail
            assert all(line in detail for line in step["lines"])
            assert step["code"].strip() in detail
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(19, 20, 22)") == (theme == "dark")
    assert said == []


def test_keys_and_the_filter(facts: dict[str, Any], browser: Any, tmp_path: Path) -> None:
    page, said, _ = opened(browser, write_page(facts, tmp_path / "page.html"))
    steps = facts["graphs"][0]["steps"]
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.inner_text("#detail .detail-title") == steps[1]["name"]
    assert page.evaluate("location.hash") == "#graph=0&step=1"
    page.keyboard.press("Escape")
    assert "Select a kernel" in page.inner_text("#detail")
    page.keyboard.press("/")
    page.keyboard.type("softmax")
    texts = [[s["name"], *s["operators"], *s["lines"], *(n for n, _ in [*s["reads"], *s["writes"]])] for s in steps]
    wanted = [s["name"] for s, words in zip(steps, texts, strict=True) if "softmax" in " ".join(words)]
    assert page.locator("#steps tbody tr").count() == len(wanted) > 0
    page.keyboard.press("Enter")
    assert page.inner_text("#detail .detail-title") in wanted
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    assert said == []


def test_a_page_of_500_kernels_opens_in_two_seconds(facts: dict[str, Any], browser: Any, tmp_path: Path) -> None:
    many = longer(facts, 500)
    path = write_page(many, tmp_path / "page.html")
    runs = []
    for _ in range(3):  # others may use the machine meanwhile
        page, said, seconds = opened(browser, path)
        runs.append(seconds)
    page.wait_for_function("document.querySelectorAll('#steps tbody tr').length === graph().steps.length")
    assert page.locator("#steps [data-kernel]").count() == many["graphs"][0]["kernels"] >= 500
    scrolled(page)
    assert page.locator("#picture .box").count() == len(many["graphs"][0]["steps"])
    assert said == []
    print(f"a page of 500 kernels can be used after {min(runs):.2f} s")
    assert min(runs) < 2


def boxes(page: Any, selector: str) -> list[list[float]]:
    script = "all => all.map(e => e.getBoundingClientRect()).map(r => [r.left, r.top, r.right, r.bottom])"
    return page.eval_on_selector_all(selector, script)


@pytest.mark.parametrize("selector", ["#picture .box rect.body", "#roofline text.mono", "#picture .bytes rect"])
def test_nothing_overlaps(facts: dict[str, Any], browser: Any, tmp_path: Path, selector: str) -> None:
    page, _, _ = opened(browser, write_page(longer(facts, 30), tmp_path / "page.html"))
    scrolled(page)
    found = boxes(page, selector)
    assert found
    for k, a in enumerate(found):
        for b in found[:k]:
            assert a[0] >= b[2] - 1 or b[0] >= a[2] - 1 or a[1] >= b[3] - 2 or b[1] >= a[3] - 2


def test_what_was_not_compiled_and_what_was_raised_is_said(browser: Any, tmp_path: Path) -> None:
    eager = opforge.explain(lambda x: x + 1)(torch.ones(3, device="meta"))
    page, said, _ = opened_plainly(browser, write_page(eager.report(), tmp_path / "eager.html"))
    assert "Nothing was compiled." in page.inner_text("main")
    assert "1 graph ran eagerly: UnsupportedError" in page.inner_text("main")
    assert said == []
    facts = opforge.explain(lambda x: x + 1)(torch.ones(3)).report() | {"error": "ValueError: <boom>"}
    page, said, _ = opened(browser, write_page(facts, tmp_path / "raised.html"))
    assert "The program raised ValueError: <boom>" in page.inner_text("#overview")
    assert said == []


def opened_plainly(browser: Any, path: Path) -> tuple[Any, list[str], float]:
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    return page, said, 0.0


class Elements(HTMLParser):
    """Text of the script elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data


def test_no_text_ends_the_data(facts: dict[str, Any]) -> None:
    """A line of the program may hold anything."""
    evil = "</script><script>alert('<!--')</script> & {{DATA}} {{SCRIPT}}"
    told = facts | {"title": evil}
    page = Elements()
    page.feed(page_text(told))
    assert len(page.scripts) == 2
    assert json.loads(page.scripts[0]) == json.loads(json.dumps(told))


def test_the_page_asks_for_nothing_from_elsewhere(facts: dict[str, Any]) -> None:
    text = page_text(facts | {"graphs": []})
    assert not re.search(r"""(src|href)=["'](?!data:)[^"'#$]""", text)
    assert "default-src 'none'" in text
    assert "http" not in re.sub(r"http-equiv", "", text)


def test_the_file_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    said = opforge.explain(lambda x: x.sin() + 1)(torch.randn(8))
    assert said.html(tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(OSError, match="no/such"):
        said.html("no/such/page.html")
