"""The site is built as `make docs` builds it, and a reader finds from its front page what they came for."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install 'dcp-nvcomp[docs]'"),
    pytest.mark.xdist_group("site"),
]

# What people look for, and a text that is there when they have found it.
FOUND = {
    "resume from latest": ("guides/training.html", "resume-from-the-latest-step", "manager.restore(state)"),
    "load one tensor": ("guides/inference.html", "load-one-tensor", "open_checkpoint"),
    "share as safetensors": ("guides/inference.html", "share-as-safetensors", "model.safetensors"),
    **{
        f"framework {page.stem}": (f"frameworks/{page.stem}.html", "", "dcp_nvcomp")
        for page in sorted((ROOT / "docs" / "frameworks").glob("*.md"))
    },
}


class Page(HTMLParser):
    """Links, anchors and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if found.get("id"):
            self.anchors.add(str(found["id"]))
        for name in ("src", "href"):
            if tag in ("script", "link", "img") and (found.get(name) or "").startswith(("http:", "https:")):
                assert (tag, found.get("rel")) == ("link", "canonical"), found  # nothing is fetched from elsewhere

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def split(page: str, link: str) -> tuple[str, str]:
    """Return the page that a link of a page leads to, and the anchor there."""
    path, _, anchor = link.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page, anchor


def test_every_link_leads_somewhere(site: Path) -> None:
    pages = {str(path.relative_to(site)): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 15
    dead = []
    for name, page in pages.items():
        for link in page.links:
            if link.startswith(("http:", "https:", "mailto:")):
                continue
            target, anchor = split(name, link)
            is_there = (site / target).is_file() or (site / target / "index.html").is_file()
            if not is_there or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.append(f"{name}: {link}")
    assert not dead


@pytest.mark.ci
@pytest.mark.parametrize("what", FOUND)
def test_at_most_two_links_from_the_front_page(site: Path, what: str) -> None:
    target, anchor, text = FOUND[what]
    reached = {"index.html"}
    for _ in range(2):
        links = [split(name, link)[0] for name in reached for link in Page(site / name).links if "://" not in link]
        reached |= {link for link in links if link.endswith(".html") and (site / link).is_file()}
    assert target in reached
    page = Page(site / target)
    assert text in page.text and (not anchor or anchor in page.anchors)


def test_the_api_names_everything(site: Path) -> None:
    import dcp_nvcomp

    text = Page(site / "api.html").text
    public = {*dcp_nvcomp.__all__, *dcp_nvcomp.runs.__all__, *dcp_nvcomp.tools.__all__}
    assert not [name for name in public - {"__version__", "codecs"} if name not in text]
    assert ">>>" in text and "Raises" in text


def _in_chromium(url: str, home: Path) -> str:
    """Return a page's DOM after its scripts ran, without a window or a network."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("apt-get install chromium")
    quiet = "--disable-background-networking --disable-component-update --disable-sync --no-first-run --disable-gpu"
    files = f"--no-sandbox --allow-file-access-from-files --user-data-dir={home}"
    command = [chromium, "--headless", *quiet.split(), *files.split(), "--virtual-time-budget=60000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.ci
def test_search_works_from_the_disk(site: Path, tmp_path: Path) -> None:
    found = _in_chromium(f"{(site / 'index.html').as_uri()}?q=reshard", tmp_path)
    first = re.findall(r'<a href="([^"]+#[^"]+)" class="md-search-result__link"', found)[0]
    path, _, anchor = first.removeprefix(f"{site.as_uri()}/").partition("#")
    assert path == "guides/training.html" and anchor in Page(site / path).anchors


_WIDTHS = """<pre id="widths"></pre><script>
const pages = PAGES, widths = {};
for (const page of pages) {
  const frame = document.createElement("iframe");
  Object.assign(frame, { src: page, width: 400, height: 800, onload: () => setTimeout(() => {
    const { scrollWidth, clientWidth } = frame.contentDocument.documentElement;
    widths[page] = scrollWidth - clientWidth;
    if (Object.keys(widths).length < pages.length) return;
    document.getElementById("widths").textContent = JSON.stringify(widths);
  }, 1000) });
  document.body.append(frame);
}
</script>"""


@pytest.mark.ci
def test_no_page_scrolls_sideways_on_a_phone(site: Path, tmp_path: Path) -> None:
    pages = [str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html"]
    frames = site / "frames.html"
    frames.write_text(_WIDTHS.replace("PAGES", json.dumps(pages)))
    try:
        found = re.search(r'<pre id="widths">(.+?)</pre>', _in_chromium(frames.as_uri(), tmp_path))
    finally:
        frames.unlink()
    assert found is not None
    widths = json.loads(html.unescape(found[1]))
    assert set(widths) == set(pages) and not {page: over for page, over in widths.items() if over > 0}
