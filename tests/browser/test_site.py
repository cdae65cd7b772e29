"""The static site: every lesson is readable without a kernel and without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import require_browser

require_browser("sphinx", "myst_nb", "sphinx_book_theme")

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("*.ipynb"))
PICTURES = ROOT / "test-results"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make site` builds it, where a warning is an error."""
    site = tmp_path_factory.mktemp("build") / "site"
    command = [sys.executable, str(ROOT / "docs" / "build.py"), str(site)]
    built = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return site


@pytest.fixture
def visit(site, context):
    """Call with a page's name: the page, what it asked for outside of the site, its errors."""
    pages = []

    def visit(name):
        page = context.new_page()
        pages.append(page)
        asked, wrong = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("requestfailed", lambda request: wrong.append(f"{request.url} failed"))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.goto(f"{site.as_uri()}/{name}.html", wait_until="networkidle")
        inside = (site.as_uri(), "data:", "blob:")
        return page, [url for url in asked if not url.startswith(inside)], wrong

    yield visit
    for page in pages:
        page.close()


def test_the_first_page_leads_to_every_lesson_and_stays_inside(visit):
    page, outside, wrong = visit("index")
    assert outside == [] and wrong == []
    links = page.locator("nav a").evaluate_all("links => links.map(a => a.href)")
    assert {f"{name}.html" for name in LESSONS} <= {link.rpartition("/")[2] for link in links}


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_whole_without_network_or_kernel(visit, name):
    page, outside, wrong = visit(f"lessons/{name}")
    stored = (ROOT / "lessons" / f"{name}.ipynb").read_text(encoding="utf-8")
    if "$$" in stored:
        page.wait_for_selector("mjx-container")
    assert outside == [] and wrong == []
    left = page.locator(".math").evaluate_all(
        "all => all.filter(e => !e.querySelector('mjx-container')).length"
    )
    assert left == 0, "every formula is set"
    pictures = page.locator(".cell_output img").evaluate_all(
        "all => all.map(i => [i.alt, i.naturalWidth, i.complete])"
    )
    assert len(pictures) == stored.count('"image/png":'), "every figure is there"
    assert all(width and complete for _, width, complete in pictures)
    assert not [alt for alt, _, _ in pictures if len(alt) < 20 or re.search(r"\.png$", alt)]
    assert page.locator(".cell_output", has_text="Error displaying widget").count() == 0
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"site-{name}.png", full_page=True)
