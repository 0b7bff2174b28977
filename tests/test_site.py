"""The documentation's site in a real browser, from disk, at two widths, light and dark.

Runs where MkDocs, Playwright and a browser are: `make site-test` installs the first two.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import FOUND_FIRST

pytest.importorskip("material", reason="the extra `browser` is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is not installed")

ROOT = Path(__file__).parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
HOME = "https://example.org/some/project"

pytestmark = [pytest.mark.once, pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)}")]

#: Code blocks that are wider than their place, each by its longest line.
SCROLLING = """() => [...document.querySelectorAll("article pre > code")]
    .filter((code) => code.scrollWidth > code.clientWidth + 1)
    .map((code) => code.textContent.split("\\n").reduce((a, b) => (a.length > b.length ? a : b)))"""
#: Tables that scroll sideways, folded ones too, each by its beginning.
WIDE_TABLES = """() => {
    document.querySelectorAll("article details").forEach((details) => (details.open = true));
    return [...document.querySelectorAll("article table")]
        .filter((table) => table.parentElement.scrollWidth > table.parentElement.clientWidth + 1)
        .map((table) => table.innerText.slice(0, 80));
}"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PROJECT_HOME": HOME}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        # As root, which containers are, Chromium starts without its sandbox only. All pages are ours.
        running = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


def opened(browser, **settings):
    """A page, and the list that gets its errors, and its requests to anywhere but the disk."""
    page, faults = browser.new_page(**settings), []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else faults.append(r.url)
    )
    return page, faults


def test_notebooks_are_pages_with_their_outputs(site):
    pages = sorted(site.glob("notebooks/*.html"))
    assert len(pages) == len(list(ROOT.glob("notebooks/*.ipynb")))
    for page in pages:
        text = page.read_text()
        assert "data:image/png;base64," in text
        assert "cell_type" not in text
        assert f"notebooks/{page.name}" in (site / "index.html").read_text()


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_and_raise_no_errors(site, browser, width, scheme):
    page, faults = opened(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    # 404.html is for servers.
    pages = sorted({*site.glob("*.html"), *site.glob("results/*.html")} - {site / "404.html"})
    assert len(pages) > 20
    found = {}
    for path in pages:
        page.goto(path.as_uri())
        dark = page.evaluate("() => document.body.dataset.mdColorScheme") == "slate"
        scrolling = page.evaluate(SCROLLING) if width >= 1280 else []
        scrolling += page.evaluate(WIDE_TABLES)
        found[path.name] = [*faults, *scrolling, *(["overflow"] if page.evaluate(OVERFLOW) > 0 else [])]
        found[path.name] += [] if dark == (scheme == "dark") else ["colours"]
        faults.clear()
    page.close()
    assert not {name: wrong for name, wrong in found.items() if wrong}


def searched(page, word):
    """Where the results lead, best first."""
    page.locator("input[name=query]").click()
    page.keyboard.type(word, delay=10)
    results = page.locator(".md-search-result__link")
    results.first.wait_for(state="attached", timeout=20_000)
    return results.evaluate_all("(links) => links.map((link) => link.href)")


@pytest.mark.parametrize("word", FOUND_FIRST)
def test_search_finds_the_page_that_answers_first(site, browser, word):
    page, faults = opened(browser, viewport={"width": 1280, "height": 900})
    page.goto((site / "index.html").as_uri())
    first = searched(page, word)[0]
    assert Path(first.partition("?")[0]).stem == Path(FOUND_FIRST[word]).stem
    assert faults == []
    page.close()


def test_the_first_page_shows_its_code_without_scrolling(site, browser):
    page, _ = opened(browser, viewport={"width": 1280, "height": 800})
    page.goto((site / "index.html").as_uri())
    box = page.locator("article pre").first.bounding_box()
    assert box["y"] + box["height"] < 800
    page.close()


@pytest.mark.parametrize("width", [400, 1280])
def test_search_from_disk_finds_a_public_name(site, browser, width):
    page, faults = opened(browser, viewport={"width": width, "height": 900})
    page.goto((site / "index.html").as_uri())
    if width < 1000:  # There the field is behind its icon.
        page.locator("label[for=__search]").first.click()
    links = searched(page, "loss_scaled")
    assert any(re.search(r"/api_training\.html\?.*#jmp_policy\.loss_scaled$", link) for link in links)
    assert faults == []
    page.close()


def test_examples_changelog_and_repository_are_in_the_menu(site, browser):
    page, faults = opened(browser, viewport={"width": 1280, "height": 900})
    page.goto((site / "index.html").as_uri())
    menu = page.locator(".md-nav--primary a.md-nav__link")
    links = dict(menu.evaluate_all("(links) => links.map((link) => [link.textContent.trim(), link.href])"))
    assert links["Repository"] == HOME
    for name, heading in (("Examples", "Examples"), ("Changelog", "Changelog")):
        page.goto(links[name])
        assert page.locator("article h1").inner_text().startswith(heading)
        assert page.locator("article a[href*='.md']").count() == 0
    page.goto(links["Examples"])
    target = page.locator("article a[href$='/digits.py']").first.evaluate("(link) => link.href")
    assert Path(target.removeprefix("file://")).read_text() == (ROOT / "examples" / "digits.py").read_text()
    assert faults == []
    page.close()
